"""A mixture-of-experts layer whose outputs are exact, and its weights in a file."""

from __future__ import annotations

import os
import pathlib

import numpy as np

EXPERTS, TOPK, HIDDEN, FFN = 8, 2, 64, 128
GATES = np.array([0.75, 0.25], np.float32)  # weights of a token's first and second choice


def save_checkpoint(path: pathlib.Path) -> None:
    """Writes weights that are small whole numbers: float32 sums of them are exact in any order."""
    random = np.random.default_rng(7)
    shapes = {"router": (HIDDEN, EXPERTS), "up": (EXPERTS, HIDDEN, FFN)}
    shapes["down"] = EXPERTS, FFN, HIDDEN
    weights = {name: random.integers(-1, 2, shape) for name, shape in shapes.items()}
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **{name: one.astype(np.float32) for name, one in weights.items()})
    os.replace(partial, path)


def route(tokens: np.ndarray, router: np.ndarray) -> np.ndarray:
    """The experts of each token, ``[tokens, TOPK]``."""
    return np.argsort(-(tokens @ router), axis=1, kind="stable")[:, :TOPK]


def expert(rows: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """The results of one expert for its rows."""
    return np.maximum(rows @ up, 0) @ down


class Requests:
    """The tokens that users of one rank ask for, and the exact output of each."""

    def __init__(self, checkpoint: pathlib.Path, rank: int, tokens: int = 256) -> None:
        weights = np.load(checkpoint)
        self._rank = rank
        pool = np.random.default_rng(rank).integers(-2, 3, (tokens, HIDDEN))
        self._tokens = pool.astype(np.float32)
        self._experts = route(self._tokens, weights["router"])
        self._expected = np.zeros_like(self._tokens)
        for e in range(EXPERTS):
            out = expert(self._tokens, weights["up"][e], weights["down"][e])
            self._expected += out * (GATES * (self._experts == e)).sum(axis=1, keepdims=True)

    def batch(self, step: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of a step, their experts, and their exact outputs."""
        chosen = np.random.default_rng((self._rank, step)).integers(0, len(self._tokens), size)
        return self._tokens[chosen], self._experts[chosen], self._expected[chosen]
