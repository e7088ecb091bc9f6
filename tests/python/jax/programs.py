"""Programs of whole arrays on a mesh: what XLA makes of them, and what they must give.

A mesh is JAX's, or one of the package's that has JAX's as its ``mesh``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

COLLECTIVES = re.compile(
    r"\b((?:all-gather|all-to-all|ragged-all-to-all|all-reduce|reduce-scatter|collective-permute|"
    r"collective-broadcast)(?:-start|-done)?)\("
)
# Instructions are fused as without xla_flags.QUICK_TO_COMPILE.
AS_USERS_COMPILE = {"xla_cpu_use_fusion_emitters": True}
# The pass is left out that drops the barrier before what jax.checkpoint repeats.
KEEPING_BARRIERS = AS_USERS_COMPILE | {"xla_disable_hlo_passes": "cse_barrier_expander"}


def jax_mesh(mesh: Any) -> Mesh:
    return mesh if isinstance(mesh, Mesh) else mesh.mesh


def place(mesh: Any, array: np.ndarray, spec: P) -> jax.Array:
    """The array on the mesh; each process has the whole one, and puts its devices' parts there."""
    sharding = NamedSharding(jax_mesh(mesh), spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def placed(mesh: Any, arrays: Iterable[np.ndarray], specs: Iterable[P]) -> list[jax.Array]:
    return [place(mesh, *pair) for pair in zip(arrays, specs, strict=True)]


def same(name: str, got: jax.Array, wanted: Any, tolerance: float = 0) -> None:
    """Every shard of this process has the numbers that are expected of it: exactly, or nearly."""
    wanted = np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), name
    for shard in got.addressable_shards:
        np.testing.assert_allclose(
            np.asarray(shard.data).astype(np.float64),
            wanted[shard.index].astype(np.float64),
            rtol=tolerance,
            atol=tolerance,
            err_msg=f"{name} on {shard.device}",
        )


def all_same(got: Any, wanted: Any, tolerance: float = 0) -> None:
    """`same` of every array of two trees, which have the same keys."""

    def check(path: Any, got: jax.Array, wanted: Any) -> None:
        same(jax.tree_util.keystr(path), got, wanted, tolerance)

    jax.tree_util.tree_map_with_path(check, got, wanted)


def mapped(
    mesh: Any, function: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any
) -> Callable[..., Any]:
    """The compiled function of whole arrays that calls `function` with the parts of each rank."""
    return jax.jit(
        jax.shard_map(
            function, mesh=jax_mesh(mesh), in_specs=in_specs, out_specs=out_specs, **options
        )
    )


def spelled(
    mesh: Any, spelling: str, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """A function of whole arrays: `function` itself, or with the parts of each rank in a map."""
    if spelling == "automatic":
        return function
    return mapped(mesh, function, in_specs, out_specs)


def with_gradients(function: Callable[..., Any], *, late: bool = False) -> Callable[..., Any]:
    """-> a compiled function of (gradient, *args): the result, and the gradients of `args`.

    Args:
        late: the gradient is there no earlier than the result, as that of a loss.
    """

    def step(grad: Any, *args: jax.Array) -> Any:
        out, backward = jax.vjp(function, *args)
        if late:
            grad = jax.tree.map(lambda grad, out: grad + 0 * out, grad, out)
        return out, backward(grad)

    return jax.jit(step)


def compiled(
    function: Callable[..., Any],
    args: Iterable[Any],
    chain: list[str] | None,
    options: dict[str, Any] = AS_USERS_COMPILE,
) -> Any:
    """The program that XLA makes of a compiled function for these arguments.

    It has no collective but ours, and its operations are this chain, unless that is None.
    """
    here = {
        name: value
        for name, value in options.items()
        if jax.default_backend() == "cpu" or not name.startswith("xla_cpu_")
    }
    program = function.lower(*args).compile(here)
    text = program.as_text()
    assert COLLECTIVES.findall(text) == []
    assert chain is None or chain_of_calls(text) == chain
    return program


def chain_of_calls(text: str) -> list[str]:
    """Operations in the order that their operands force; fails if it leaves a choice."""
    operands = dependencies(text)
    call = r'^ *(?:ROOT )?(%[\w.-]+) = .*custom_call_target="crossdock_(?:ep|gemm)_(\w+)"'
    calls = dict(re.findall(call, text, re.MULTILINE))

    def before(name: str, seen: set[str]) -> set[str]:
        for operand in operands.get(name, []):
            if operand not in seen:
                seen.add(operand)
                before(operand, seen)
        return seen

    needs = {name: before(name, set()) & calls.keys() for name in calls}
    order = sorted(calls, key=lambda name: len(needs[name]))
    assert [len(needs[name]) for name in order] == list(range(len(order)))
    return [calls[name] for name in order]


def dependencies(text: str) -> dict[str, list[str]]:
    """The instructions before each one, also across calls, as of command buffers."""
    operands, parameters, roots, called = {}, {}, {}, []
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?(%[\w.-]+) .*\{$", line):
            parameters[computation := header[1]] = {}
        elif instruction := re.match(r" *(ROOT )?(%[\w.-]+) = (.*)$", line):
            root, name, rest = instruction.groups()
            operands[name] = re.findall(r"%[\w.-]+", rest)
            if root:
                roots[computation] = name
            if number := re.search(r" parameter\((\d+)\)", rest):
                parameters[computation][int(number[1])] = name
            if call := re.search(r" call\((.*?)\), to_apply=(%[\w.-]+)", rest):
                called.append((name, re.findall(r"%[\w.-]+", call[1]), call[2]))
    for name, given, computation in called:
        operands[name].append(roots[computation])
        for number, parameter in parameters[computation].items():
            operands[parameter].append(given[number])
    return operands
