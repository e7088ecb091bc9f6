"""Ranks with unequal numbers of experts, in arrays that have one shape on all of them.

Arrays have L experts, as many as the rank with the most; the library sees a rank's own ones, which
are the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ._config import EpConfig

if TYPE_CHECKING:
    from ._group import AnyGroup

__all__ = ["own", "own_offsets", "unequal"]

Array: TypeAlias = jax.Array

# The arrays that begin with a dimension of experts, by their names in the C headers.
_BULK = ("counts", "padded_counts", "offsets", "w_in", "w_out", "grad_w_in", "grad_w_out")
_LOW_LATENCY = {
    "slots": ("recv_tokens", "recv_scales", "expert_out", "counts"),
    "by_expert": ("counts", "row_offsets"),
    "by_rank": ("counts",),
}


def unequal(group: AnyGroup, names: Sequence[str]) -> tuple[list[int], list[str]]:
    """By how much each rank's arrays are longer than its experts, and which of these they are.

    Nothing where all ranks hold equally many.
    """
    held = _held(group)
    if len(set(held)) == 1:
        return [], []
    config = group.config
    by_expert = _BULK if isinstance(config, EpConfig) else _LOW_LATENCY[config.receive]
    return [max(held) - one for one in held], [name for name in names if name in by_expert]


def own(group: AnyGroup, array: Array) -> Array:
    """``[L, ...]`` with 0 behind the rank's own experts, where the library writes nothing."""
    if len(set(_held(group))) == 1:
        return array
    is_own = jnp.arange(len(array)) < _held_here(group)
    return jnp.where(is_own.reshape(-1, *[1] * (array.ndim - 1)), array, jnp.zeros((), array.dtype))


def own_offsets(group: AnyGroup, offsets: Array) -> Array:
    """``[L + 1]`` with the end of the last zone behind the rank's own experts."""
    if len(set(_held(group))) == 1:
        return offsets
    held = _held_here(group)
    return jnp.where(jnp.arange(len(offsets)) <= held, offsets, offsets[held])


def _held(group: AnyGroup) -> tuple[int, ...]:
    return group.config.held_experts(group.place.num_ranks)


def _held_here(group: AnyGroup) -> Array:
    """How many experts the rank holds that the caller's program, inside shard_map, runs for."""
    place = group.place
    axes = tuple(axis for axis in place.axes if place.mesh.shape[axis] > 1)
    return jnp.array(_held(group), np.int32)[jax.lax.axis_index(axes)]
