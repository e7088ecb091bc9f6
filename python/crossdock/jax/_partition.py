"""Runs functions of one rank's arrays on global arrays: what automatic partitioning sees.

Inside ``jax.shard_map`` over the mesh a public function gets one rank's arrays and simply runs.
Outside it gets global arrays, whose leading dimension lies along the token axes, and maps itself
over the mesh. XLA would quietly move an array that lies otherwise, with collectives of its own;
that is refused instead, for what a jitted function computes when it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


def on_each_rank(
    name: str,
    mesh: Mesh,
    axes: tuple[str, ...],
    run: Callable[..., Any],
    arrays: Mapping[str, Any],
    specs: Mapping[str, PartitionSpec] | None = None,
    out_specs: Any = None,
) -> Any:
    """Call ``run(*arrays.values())`` with one rank's arrays, on every rank.

    Args:
        name: of the public function, for errors.
        mesh: of all ranks.
        axes: of the mesh, along which the leading dimension of arrays lies: the expert axis, and
            those for data.
        run: of one rank's arrays. What it returns has arrays with a leading dimension only.
        arrays: by the names of the arguments; a value may be a tree of arrays.
        specs: of arguments that lie otherwise than along ``axes``.
        out_specs: of what ``run`` returns; None = all along ``axes``.

    Raises:
        ValueError: ``jax.shard_map`` around this leaves out an axis of the mesh, or an array lies
            otherwise. Of arrays that are computed under ``jax.jit`` that is known when XLA compiles,
            which reports it as ``jax.errors.JaxRuntimeError`` with this text.
    """
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    wanted = {axis for axis, size in mesh.shape.items() if size > 1 or axis in axes}
    if manual & wanted:
        if not wanted <= manual:
            raise ValueError(
                f"{name}: expected jax.shard_map over all axes of the mesh, {_words(wanted)}, "
                f"got {_words(manual)}"
            )
        return run(*arrays.values())
    along = PartitionSpec(axes)
    in_specs = tuple((specs or {}).get(argument, along) for argument in arrays)
    for argument, spec in zip(arrays, in_specs):
        for leaf, leaf_spec in zip(*_leaves(arrays[argument], spec)):
            _check_length(f"{name}: {argument}", leaf, leaf_spec, mesh)
            _check_place(f"{name}: {argument}", leaf, NamedSharding(mesh, leaf_spec))
    return jax.shard_map(
        run, mesh=mesh, in_specs=in_specs, out_specs=along if out_specs is None else out_specs
    )(*arrays.values())


def _leaves(tree: Any, specs: Any) -> tuple[list[Any], list[PartitionSpec]]:
    """Arrays of an argument, and the spec of each; a spec may stand for a whole tree."""
    leaves, structure = jax.tree.flatten(tree)
    if isinstance(specs, PartitionSpec):
        return leaves, [specs] * len(leaves)
    return leaves, structure.flatten_up_to(specs)


def _check_length(what: str, array: jax.Array, spec: PartitionSpec, mesh: Mesh) -> None:
    for dimension, axes in enumerate(spec):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        parts = 1
        for axis in axes:
            parts *= mesh.shape[axis]
        length = array.shape[dimension] if dimension < array.ndim else None
        if length is None or length % parts:
            raise ValueError(
                f"{what}: expected dimension {dimension} to be a multiple of {parts}, the ranks "
                f"along {_words(axes)}, got shape {array.shape}"
            )


def _check_place(what: str, array: jax.Array, expected: NamedSharding) -> None:
    """Refuse an array that XLA would have to move."""

    def check(found: Sharding) -> None:
        if not found.is_equivalent_to(expected, array.ndim):
            got = found.spec if isinstance(found, NamedSharding) else found
            raise ValueError(f"{what}: expected sharding {expected.spec}, got {got}")

    if isinstance(array, jax.core.Tracer):
        jax.debug.inspect_array_sharding(array, callback=check)
    elif getattr(array, "committed", False):
        check(array.sharding)



def _words(axes: Any) -> str:
    return ", ".join(repr(axis) for axis in sorted(axes))
