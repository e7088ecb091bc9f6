"""Holds the model on a mesh against the model on one device: forward, and every gradient."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .trainer import Trainer

# Sums over tokens come in another order on a mesh.
TOLERANCE = 1e-5  # |difference| / |value|, norms of an array


def compare(reference: Trainer, trainer: Trainer, text: bytes, show: bool) -> bool:
    """Whether both have the same losses, load and gradients in the first step.

    Each process compares what its own devices hold. ``show``: print a table.
    """
    data = np.frombuffer(text, np.uint8)
    parts = []
    for each in (reference, trainer):
        (_, (losses, load)), gradients = each.loss_and_gradients(
            each.params, *each.batch(data, step=0)
        )
        parts.append({"losses": losses, "load of experts": load, "gradient": gradients})
    rows = [
        (_name(path), _difference(np.asarray(expected), got))
        for (path, expected), (_, got) in zip(
            *(jax.tree_util.tree_leaves_with_path(part) for part in parts), strict=True
        )
    ]
    if show:
        print(f"{trainer.title} against {reference.title}, first step:")
        for name, difference in rows:
            verdict = "agrees" if difference <= TOLERANCE else "DISAGREES"
            print(f"    {name:<40} differs by {difference:.1e}  allowed {TOLERANCE:.0e}  {verdict}")
    return all(difference <= TOLERANCE for _, difference in rows)


def _difference(expected: np.ndarray, got: jax.Array) -> float:
    """The largest relative difference of a part that lies here; NaN if there is one."""
    differences = []
    for shard in got.addressable_shards:
        part = expected[shard.index]
        norm = np.linalg.norm(part)
        differences.append(np.linalg.norm(np.asarray(shard.data) - part) / (norm or 1.0))
    return float(np.max(differences))


def _name(path: tuple[Any, ...]) -> str:
    return " ".join(str(key.key) for key in path).replace("gradient", "gradient of", 1)
