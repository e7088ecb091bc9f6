"""Layers of mixtures of experts: their parts, and those of known models."""
