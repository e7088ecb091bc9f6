"""Ranks that a group for few tokens is told to leave out, and its way back into step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from crossdock._membership import of_kind

from . import _calls
from ._config import LowLatencyConfig
from ._group import LowLatencyGroup, programs_of

__all__ = ["mask", "mask_set", "require_masks", "reset"]


def require_masks(config: LowLatencyConfig) -> None:
    """Raises TypeError or ValueError unless groups of this config mask ranks."""
    of_kind("config", config, LowLatencyConfig)
    if config.on_peer_loss != "mask":
        raise ValueError(
            f"config.on_peer_loss: expected 'mask' for this call, got {config.on_peer_loss!r}"
        )


def mask(group: LowLatencyGroup) -> dict[jax.Device, np.ndarray]:
    """By this process's devices."""
    found, _ = _on_devices(group, _calls.ll_mask_get)
    return {shard.device: np.asarray(shard.data) for shard in found.addressable_shards}


def mask_set(group: LowLatencyGroup, rank: int, masked: bool) -> None:
    """On this process's devices, but for the rank itself."""
    ranks = group.place.num_ranks
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0 to {ranks - 1}, got {rank}")
    _on_devices(group, _calls.ll_mask_set, rank, masked)


def reset(group: LowLatencyGroup) -> None:
    """Waits for all ranks that are not masked."""
    _on_devices(group, _calls.ll_reset)


def _on_devices(
    group: LowLatencyGroup, function: Callable[..., Any], *static: Any
) -> tuple[Any, ...]:
    """Results of ``function(group, *static, order)`` of every device, when it has ended there."""
    programs, key = programs_of(group), (function, static)
    if key not in programs:
        mesh = group.place.mesh

        def of_one_device() -> tuple[Any, ...]:
            return function(group, *static, jnp.zeros((1,), jnp.float32))

        everywhere = PartitionSpec(mesh.axis_names)
        programs[key] = jax.jit(
            jax.shard_map(
                of_one_device, mesh=mesh, in_specs=(), out_specs=everywhere, check_vma=False
            )
        )
    return jax.block_until_ready(programs[key]())
