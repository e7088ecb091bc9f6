"""The custom calls on one rank's matrices: shapes, names and order; no derivatives.

Every function runs inside ``shard_map`` and takes one rank's parts, and the order, which it returns
last. Arrays vary over the same axes of the mesh when they come here, but for a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from crossdock._core import constants
from crossdock._gemm_config import Algo

from .._calls import uniform
from ._contexts import TpContext

__all__ = [
    "Activation",
    "Scales",
    "Way",
    "all_gather",
    "all_reduce",
    "bulk_gather",
    "bulk_reduce",
    "invariant",
    "own_rows",
    "reduce_scatter",
]

Activation = Literal["gelu", "relu"]
Array: TypeAlias = jax.Array


class Way(NamedTuple):
    """How an operation is made, all that is no array. Hashable.

    Attributes:
        context: on which it runs.
        transpose_b: whether b is stored as ``[N, K]``.
        activation: what is applied to the sum.
        allow_tf32: whether GPUs may compute products of float32 in TF32, here and backward.
        algo: how transfer and product are interleaved; backward as the context says.
        save_gathered: whether gathered rows are kept for the backward pass.
        out_dtype: of the result, where it is not that of a: of products of fp8.
        fp8: whether operands are made fp8 on the way; backward they are not.
        tag: of the product, as of ``xd_gemm_args``, even; that of its backward ones is the next.
        tokens: rows of each rank, where these differ. Arrays of a rank's rows have as many as the
            most of these; behind its own is anything.
    """

    context: TpContext
    transpose_b: bool
    activation: Activation | None
    allow_tf32: bool
    algo: Algo
    save_gathered: bool
    tag: int
    out_dtype: np.dtype[Any] | None = None
    fp8: bool = False
    tokens: tuple[int, ...] | None = None

    @property
    def backward(self) -> Way:
        """The way of the product of a gradient and b, which gives that of a."""
        return self._replace(
            transpose_b=not self.transpose_b,
            activation=None,
            algo="auto",
            tag=self.tag | 1,
            fp8=False,
        )

    def columns(self, b: Array) -> int:
        """N, the columns of a product with b."""
        return b.shape[0 if self.transpose_b else 1]

    def gathered(self, rows: int) -> int:
        """The rows of all ranks, by those of an array of one rank's."""
        return rows * self.context.place.num_ranks if self.tokens is None else sum(self.tokens)

    def scattered(self, rows: int) -> int:
        """The rows of an array of one rank's, by those of all ranks."""
        return rows // self.context.place.num_ranks if self.tokens is None else max(self.tokens)


class Scales(NamedTuple):
    """Of fp8: what elements of a, and of b, are multiplied by; ``[1]``, or of rows and columns."""

    a_scale: Array
    b_scale: Array


class _Result(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    everywhere: bool = False  # whether it is the same on all ranks


def all_gather(
    way: Way,
    a: Array,
    b: Array,
    bias: Array | None,
    order: Array,
    gathered: bool,
    activation: bool,
    behind: Array | None = None,
    scales: Scales | None = None,
) -> tuple[Any, ...]:
    """-> d ``[M, N]``, gathered a ``[M, K]`` or None, d before its activation or None, order.

    Of fp8 with one scale the gathered a is a pair, with the scales ``[W]`` of the ranks.

    Args:
        gathered, activation: whether these are wanted.
        behind: what has to be there before, which is not read.
        scales: of fp8.
    """
    _check_bounds(way, tokens=a.shape[0], k=a.shape[1], n=way.columns(b))
    rows = way.gathered(a.shape[0])
    outputs = {"d": _Result((rows, way.columns(b)), way.out_dtype or a.dtype)}
    if activation:
        outputs["pre_activation"] = outputs["d"]
    if gathered:
        outputs["gathered"] = _Result((rows, a.shape[1]), a.dtype, everywhere=True)
    if gathered and scales is not None:
        ranks = way.context.place.num_ranks
        outputs["gathered_scale"] = _Result((ranks,), np.float32, everywhere=True)
    names = ("d", "gathered", "gathered_scale", "pre_activation")
    inputs = {"a": a, "b": b, "bias": bias, "behind": behind} | _by_name(scales)
    d, kept, scale, before, order = _call("all_gather", way, inputs, outputs, order, names)
    return d, kept if scale is None else (kept, scale), before, order


def reduce_scatter(
    way: Way,
    a: Array,
    b: Array,
    bias: Array | None,
    order: Array,
    activation: bool,
    behind: Array | None = None,
    scales: Scales | None = None,
) -> tuple[Any, ...]:
    """-> d ``[m, N]``, d before its activation or None, order. Others: as of `all_gather`."""
    rows = way.scattered(a.shape[0])
    _check_bounds(way, tokens=rows, n=way.columns(b))
    outputs = {"d": _Result((rows, way.columns(b)), way.out_dtype or a.dtype)}
    if activation:
        outputs["pre_activation"] = outputs["d"]
    names = ("d", "pre_activation")
    inputs = {"a": a, "b": b, "bias": bias, "behind": behind} | _by_name(scales)
    return _call("reduce_scatter", way, inputs, outputs, order, names)


def all_reduce(
    way: Way,
    a: Array,
    b: Array,
    bias: Array | None,
    order: Array,
    activation: bool,
    scales: Scales | None = None,
) -> tuple[Any, ...]:
    """-> d ``[M, N]``, d before its activation or None, order."""
    tokens = -(-a.shape[0] // way.context.place.num_ranks)
    _check_bounds(way, tokens=tokens, n=way.columns(b))
    dtype = way.out_dtype or a.dtype
    outputs = {"d": _Result((a.shape[0], way.columns(b)), dtype, everywhere=True)}
    if activation:
        outputs["pre_activation"] = outputs["d"]
    names = ("d", "pre_activation")
    inputs = {"a": a, "b": b, "bias": bias} | _by_name(scales)
    return _call("all_reduce", way, inputs, outputs, order, names)


def bulk_gather(way: Way, a: Array, b: Array, rows: Array, order: Array) -> tuple[Any, ...]:
    """A backward product while rows ``[m, H]`` are gathered: -> d, ``[M, H]``, order."""
    _check_bounds(way, tokens=rows.shape[0], k=rows.shape[1])
    total = way.gathered(rows.shape[0])
    outputs = {
        "d": _Result((a.shape[0], way.columns(b)), a.dtype),
        "out": _Result((total, rows.shape[1]), rows.dtype, everywhere=True),
    }
    return _call("bulk", way, {"a": a, "b": b, "in": rows}, outputs, order, collective="all_gather")


def bulk_reduce(way: Way, a: Array, b: Array, rows: Array, order: Array) -> tuple[Any, ...]:
    """The product of a, transposed, and b while rows are summed: -> d, ``[m, H]``, order."""
    own = way.scattered(rows.shape[0])
    _check_bounds(way, tokens=own, n=rows.shape[1])
    outputs = {
        "d": _Result((a.shape[1], b.shape[1]), a.dtype),
        "out": _Result((own, rows.shape[1]), rows.dtype),
    }
    way = way._replace(transpose_b=False)
    return _call(
        "bulk",
        way,
        {"a": a, "b": b, "in": rows},
        outputs,
        order,
        transpose_a=True,
        collective="reduce_scatter",
    )


def own_rows(way: Way, rows: Array) -> Array:
    """An array of one rank's rows: with zeros behind its own, which have no gradient."""
    if way.tokens is None:
        return rows
    own = jnp.array(way.tokens, np.int32)[jax.lax.axis_index(way.context.place.axes)]
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < own, rows, jnp.zeros((), rows.dtype))


def _by_name(scales: Scales | None) -> dict[str, Array]:
    return {} if scales is None else scales._asdict()


def _check_bounds(way: Way, tokens: int, k: int = 0, n: int = 0) -> None:
    """Refuses what is larger than the context is made for."""
    config = way.context.config
    for name, needed in (("max_tokens", tokens), ("max_k", k), ("max_n", n)):
        if getattr(config, name) < needed:
            raise ValueError(
                f"config.{name}: expected at least {needed} for this operation or its gradient, "
                f"got {getattr(config, name)}"
            )


def _call(
    operation: str,
    way: Way,
    inputs: Mapping[str, Array | None],
    outputs: Mapping[str, _Result],
    order: Array,
    names: tuple[str, ...] = (),
    transpose_a: bool = False,
    collective: str = "all_gather",
) -> tuple[Any, ...]:
    """Runs one operation.

    Args:
        inputs, outputs: by their names in ``crossdock/gemm.h``; inputs may be None.
        names: of the results, those that are not in `outputs` as None; () = all outputs.
        transpose_a: whether a is stored as ``[K, m]``.
        collective: of bulk.

    Returns:
        The results, and the order. The order is only passed through: it is one buffer before and
        after, which nothing writes.
    """
    given = {name: array for name, array in inputs.items() if array is not None}
    arrays = uniform(*given.values(), order)
    kind = jax.typeof(arrays[-1]).manual_axis_type
    mesh = jax.sharding.get_abstract_mesh()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def declared(result: _Result) -> jax.ShapeDtypeStruct:
        known = invariant(kind, way.context.place.axes) if result.everywhere else kind
        return jax.ShapeDtypeStruct(
            result.shape, result.dtype, manual_axis_type=known, sharding=sharding
        )

    results = [declared(result) for result in outputs.values()]
    results.append(declared(_Result(order.shape, order.dtype)))
    call = jax.ffi.ffi_call(
        f"crossdock_gemm_{operation}",
        results,
        input_output_aliases={len(given): len(outputs)},
        vmap_method=None,
    )
    *found, order = call(
        *arrays,
        context=np.int64(way.context.number),
        config=way.context.text,
        arguments=" ".join([*given, "order"]),
        results=" ".join([*outputs, "order"]),
        transpose_a=np.int64(transpose_a),
        transpose_b=np.int64(way.transpose_b),
        allow_tf32=np.int64(way.allow_tf32),
        epilogue=np.int64(constants.GEMM_EPILOGUES[way.activation or "none"]),
        algo=np.int64(constants.GEMM_ALGOS[way.algo]),
        collective=np.int64(constants.GEMM_OPERATIONS[collective]),
        tag=np.int64(way.tag),
        tokens=np.array(way.tokens or (), np.int64),
    )
    by_name = dict(zip(outputs, found))
    return (*(by_name.get(name) for name in names or outputs), order)


def invariant(kind: Any, axes: tuple[str, ...]) -> Any:
    """The kind of an array that does not vary over these axes, and else varies as `kind` says."""
    return None if kind is None else kind.update(varying=kind.varying - frozenset(axes))
