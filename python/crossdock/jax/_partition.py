"""Functions whose arguments lie on the mesh in several ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ._group import Place
from ._where import inside, refuse_elsewhere

__all__ = ["on_each_rank"]


def on_each_rank(
    place: Place,
    run: Callable[..., Any],
    arrays: Mapping[str, tuple[jax.Array, PartitionSpec]],
    out_specs: Any,
) -> Any:
    """Call ``run`` with one rank's arrays: inside shard_map as they are, outside with their parts.

    Args:
        place: what lies where.
        run: of the arrays of one rank.
        arrays: by the names of arguments, each with how it lies on the mesh.
        out_specs: of what ``run`` returns.

    Raises:
        ValueError: an array cannot be split evenly, or lies otherwise: see `refuse_elsewhere`.
    """
    given = [array for array, _ in arrays.values()]
    if inside(place):
        return run(*given)
    for argument, (array, spec) in arrays.items():
        _check_lengths(place, argument, array, spec)
        refuse_elsewhere(place, argument, array, spec)
    in_specs = tuple(spec for _, spec in arrays.values())
    return jax.shard_map(run, mesh=place.mesh, in_specs=in_specs, out_specs=out_specs)(*given)


def _check_lengths(place: Place, argument: str, array: jax.Array, spec: PartitionSpec) -> None:
    for dimension, axes in enumerate(spec):
        axes = (axes,) if isinstance(axes, str) else axes
        parts = math.prod(place.mesh.shape[axis] for axis in axes)
        if array.ndim <= dimension or array.shape[dimension] % parts:
            raise ValueError(
                f"{argument}: expected dimension {dimension} to be a multiple of {parts}, the "
                f"ranks along {axes}, got shape {array.shape}"
            )
