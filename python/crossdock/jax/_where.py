"""Where a function of one rank's arrays runs: in the caller's shard_map, or in one of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ._calls import uniform, varying
from ._group import AnyGroup, Place, programs_of

__all__ = [
    "batch_parts",
    "check_layout",
    "check_split",
    "check_varies",
    "checks_varying",
    "inside",
    "laid",
    "local_shape",
    "on_each_rank",
    "on_ranks",
    "parts_along",
    "refuse_elsewhere",
]


def inside(place: Place) -> bool:
    """Whether the caller is inside shard_map, where arrays are one rank's.

    Raises:
        ValueError: it is in one that leaves axes of the mesh to the compiler, or over another mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = frozenset(mesh.manual_axes)
    if not manual:
        return False
    wanted = {axis for axis in place.mesh.axis_names if place.mesh.shape[axis] > 1}
    if not wanted <= manual:
        raise ValueError(
            f"shard_map: expected one over all axes of the mesh of {place.init}, "
            f"{place.mesh.axis_names}; got one over {tuple(sorted(manual))}"
        )
    for axis in wanted:
        if mesh.shape[axis] != place.mesh.shape[axis]:
            raise ValueError(
                f"shard_map: expected the mesh of {place.init}, {dict(place.mesh.shape)}; "
                f"got {dict(mesh.shape)}"
            )
    return True


def laid(place: Place, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """An array of the library's own, as one that lies so.

    It has to be said only where layouts are part of types, which is up to the mesh, not to the
    mesh that is current. Else XLA finds the place.
    """
    if jax.sharding.AxisType.Explicit not in place.mesh.axis_types or inside(place):
        return array
    return jax.sharding.reshard(array, NamedSharding(place.mesh, spec))


def batch_parts(place: Place) -> int:
    """The number of parts of a batch that lies outside of shard_map: one for each rank."""
    return math.prod(place.mesh.shape[axis] for axis in place.batch_axes)


def local_shape(place: Place, argument: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one rank's part of an array of this shape."""
    if inside(place):
        return shape
    parts = batch_parts(place)
    if not shape or shape[0] % parts:
        raise ValueError(
            f"{argument}: expected a first dimension that {parts} devices share evenly, "
            f"got shape {shape}"
        )
    return (shape[0] // parts, *shape[1:])


def check_layout(place: Place, argument: str, array: Any) -> None:
    """Refuses arrays that are known to be split otherwise than the operations take them.

    Inside shard_map: not over all axes of ranks. Outside: otherwise than along the batch axes.

    Raises:
        ValueError: see `refuse_elsewhere`.
    """
    if inside(place):
        check_varies(place, argument, array)
        return
    refuse_elsewhere(place, argument, array, PartitionSpec(place.batch_axes))


def check_varies(place: Place, argument: str, array: Any) -> None:
    """Refuses, inside shard_map, an array that is known to be the same on all ranks."""
    missing = [axis for axis in place.axes if axis not in varying(array)]
    if missing and place.num_ranks > 1 and checks_varying():
        raise ValueError(
            f"{argument}: expected parts that differ along {place.axes}, got an array that "
            f"is replicated along {tuple(missing)}: name them in in_specs, or if it is made inside "
            f"of shard_map, give jax.lax.pcast({argument}, {tuple(missing)}, to='varying')"
        )


def refuse_elsewhere(place: Place, argument: str, array: Any, spec: PartitionSpec) -> None:
    """Refuses a global array that XLA would have to move to where `spec` says.

    It would do so quietly, with collectives of its own. An array that is not committed to any
    device lies nowhere yet, and may go where it is wanted; so does one without elements.

    Raises:
        ValueError: with the layout that was expected. For what a jitted program computes it comes
            when XLA compiles, which makes it a ``jax.errors.JaxRuntimeError`` with this text.
    """
    if array.size == 0:
        return
    expected = NamedSharding(place.mesh, spec)

    def check(found: Sharding) -> None:
        if not found.is_equivalent_to(expected, array.ndim):
            got = found.spec if isinstance(found, NamedSharding) else found
            raise ValueError(
                f"{argument}: expected {spec}, dimensions split over the axes named and the others "
                f"not at all; got {got}. jax.lax.with_sharding_constraint says how a computed "
                "array is to be split"
            )

    def check_computed(found: Sharding) -> None:
        # One device of several only outside jit, in an eager jax.checkpoint: an array that is not
        # committed to it, or one that JAX itself refuses to combine with the mesh.
        if not isinstance(found, SingleDeviceSharding):
            check(found)

    array = _behind_derivatives(array)
    if isinstance(array, jax.core.Tracer):
        jax.debug.inspect_array_sharding(array, callback=check_computed)
    elif getattr(array, "committed", False):
        check(array.sharding)


def _behind_derivatives(array: Any) -> Any:
    """The array that eager ``jax.grad`` wraps: one at hand, or one that a program computes."""
    while isinstance(array, jax.core.Tracer) and hasattr(array, "primal"):
        array = array.primal
    return array


def checks_varying() -> bool:
    """Whether this shard_map knows over which axes arrays vary."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return bool(axes) and bool(varying(jax.lax.axis_index(axes)))


def on_ranks(function: Callable[..., Any], group: AnyGroup, *static: Any) -> Callable[..., Any]:
    """``function(group, *static, *arrays)`` as a function of arrays, inside or outside shard_map.

    Outside, the first dimension of every array and result is split over the batch axes, in a
    shard_map of its own.
    """
    local = functools.partial(function, group, *static)
    if inside(group.place):
        return lambda *arrays: local(*uniform(*arrays))
    key = (function, static)
    programs = programs_of(group)
    if key not in programs:
        spec = PartitionSpec(group.place.batch_axes)
        mapped = jax.shard_map(
            local, mesh=group.place.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        programs[key] = jax.jit(mapped, inline=True)
    return programs[key]


def on_each_rank(
    place: Place,
    run: Callable[..., Any],
    arrays: Mapping[str, tuple[jax.Array, PartitionSpec]],
    out_specs: Any,
) -> Any:
    """Calls ``run`` with one rank's arrays: inside shard_map as they are, outside with their parts.

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
    in_specs = check_split(place, arrays)
    mapped = jax.shard_map(run, mesh=place.mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped, inline=True)(*given)


def check_split(
    place: Place, arrays: Mapping[str, tuple[jax.Array, PartitionSpec]]
) -> tuple[PartitionSpec, ...]:
    """How global arrays lie on the mesh, each of which is given with that.

    Raises:
        ValueError: as `on_each_rank`.
    """
    for argument, (array, spec) in arrays.items():
        _check_lengths(place, argument, array, spec)
        refuse_elsewhere(place, argument, array, spec)
    return tuple(spec for _, spec in arrays.values())


def _check_lengths(place: Place, argument: str, array: jax.Array, spec: PartitionSpec) -> None:
    for dimension, axes in enumerate(spec):
        parts = parts_along(place, axes)
        if array.ndim <= dimension or array.shape[dimension] % parts:
            raise ValueError(
                f"{argument}: expected dimension {dimension} to be a multiple of {parts}, the "
                f"ranks along {axes}, got shape {array.shape}"
            )


def parts_along(place: Place, axes: str | tuple[str, ...] | None) -> int:
    """Into how many parts a dimension is split that lies along these axes of the mesh."""
    axes = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(place.mesh.shape[axis] for axis in axes)
