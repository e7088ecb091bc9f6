"""How arrays lie on the mesh, where only the compiler knows; functions of arrays that lie in
several ways.

XLA would quietly move an array that lies otherwise than an operation takes it, with collectives of
its own. That is refused instead: at once for an array at hand, and when XLA compiles for one that a
program computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ._mesh import Place
from ._where import inside

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
        ValueError: an array cannot be split evenly, or lies otherwise; as
            ``jax.errors.JaxRuntimeError`` where that is known when XLA compiles.
    """
    given = [array for array, _ in arrays.values()]
    if inside(place):
        return run(*given)
    for argument, (array, spec) in arrays.items():
        _check_lengths(place, argument, array, spec)
        refuse_elsewhere(place, argument, array, spec)
    in_specs = tuple(spec for _, spec in arrays.values())
    return jax.shard_map(run, mesh=place.mesh, in_specs=in_specs, out_specs=out_specs)(*given)


def refuse_elsewhere(place: Place, argument: str, array: Any, spec: PartitionSpec) -> None:
    """Refuse an array that XLA would have to move to where ``spec`` says."""
    expected = NamedSharding(place.mesh, spec)

    def check(found: Sharding) -> None:
        if not found.is_equivalent_to(expected, array.ndim):
            got = found.spec if isinstance(found, NamedSharding) else found
            raise ValueError(
                f"{argument}: expected {spec}, each dimension split over the axes named and the "
                f"others not at all; got {got}"
            )

    if isinstance(array, jax.core.Tracer):
        jax.debug.inspect_array_sharding(array, callback=check)
    elif getattr(array, "committed", False):
        check(array.sharding)


def _check_lengths(place: Place, argument: str, array: jax.Array, spec: PartitionSpec) -> None:
    for dimension, axes in enumerate(spec):
        axes = (axes,) if isinstance(axes, str) else axes
        parts = math.prod(place.mesh.shape[axis] for axis in axes)
        if array.ndim <= dimension or array.shape[dimension] % parts:
            raise ValueError(
                f"{argument}: expected dimension {dimension} to be a multiple of {parts}, the "
                f"ranks along {axes}, got shape {array.shape}"
            )
