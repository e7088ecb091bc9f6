"""The command ``crossdock``: look at this machine, measure on it, train a demonstration.

Only the standard library and :mod:`crossdock` itself are needed. rich makes the output nicer,
matplotlib draws plots, PyTorch brings GPUs; each is asked for only where it is used.
"""

from crossdock.cli._command import main

__all__ = ["main"]
