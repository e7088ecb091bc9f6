"""Brings a product of the user's arrays to the ranks: checks, sizes, layouts on the mesh."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from crossdock import GemmConfig
from crossdock._core import constants
from crossdock._dtypes import OPERANDS, SUMMABLE
from crossdock._gemm_config import Algo, GemmOperation, gemm_word

from .._calls import uniform, varying
from .._group import Place, programs_of
from .._where import check_split, check_varies, inside, laid, parts_along
from . import _calls, _ops
from ._calls import Activation, Array, Scales, Way, own_rows
from ._contexts import Contexts, current_mesh
from ._tags import tag_of_call

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "REDUCE_SCATTER",
    "Options",
    "check_kinds",
    "product",
    "sizes_of",
    "tokens_of",
    "way_of",
]

_MOST_PROGRAMS = 1000  # of a context
_FP8 = tuple(name for name in OPERANDS if name not in SUMMABLE)
_ACTIVATIONS = {word: constants.GEMM_EPILOGUES[word] for word in get_args(Activation)}


class Options(NamedTuple):
    """The arguments of a call beside arrays, as the user gave them; see `Way`."""

    transpose_b: bool
    activation: Activation | None
    allow_tf32: bool
    algo: Algo
    save_gathered: bool = True
    return_gathered: bool = False
    out_dtype: np.dtype[Any] | None = None  # of products of fp8
    tokens_per_rank: tuple[int, ...] | None = None
    fp8: bool = False


class Kind(NamedTuple):
    """The differences between the three products.

    Attributes:
        name: of the user's function.
        on_rank: runs it: of a way, a dimension, a, b, the order, and a bias that may be left out.
        splits_columns: whether b is split over ranks along N; otherwise along K.
        tokens_in, tokens_out: whether tokens of a, and of the result, are split over ranks.
        dim: the name of the argument that says along which dimension.
    """

    name: str
    on_rank: Callable[..., tuple[Array, Array]]
    splits_columns: bool
    tokens_in: bool
    tokens_out: bool
    dim: str


class Sizes(NamedTuple):
    """Of one rank's product: m tokens of the rank, K and N."""

    tokens: int
    k: int
    n: int


# In the order in which they come to the ranks.
_ARGUMENTS = ("a", "b", "after", "bias", "a_scale", "b_scale")


def product(
    kind: Kind,
    a: Any,
    b: Any,
    bias: Any,
    dim: int,
    options: Options,
    config: GemmConfig | None,
    after: Any,
    mesh: Contexts | None,
    scales: tuple[Any, Any] | None = None,
) -> tuple[Array, ...]:
    """-> out, gathered a if it is wanted, order; inside or outside shard_map."""
    mesh = current_mesh() if mesh is None else mesh
    place = mesh.place
    arrays = {"a": jnp.asarray(a), "b": jnp.asarray(b)}
    if bias is not None:
        arrays["bias"] = jnp.asarray(bias)
    check_kinds(**arrays, out_dtype=options.out_dtype)
    if scales is not None:
        arrays |= _scales(kind, place, options, arrays, *map(jnp.asarray, scales))
    ndim = arrays["a"].ndim
    dim = _dimension(kind, dim, arrays["a"].shape)
    specs = {
        "a": _tokens(place, ndim, dim if kind.tokens_in else None, not kind.splits_columns),
        "b": _weights(place, columns=kind.splits_columns != bool(options.transpose_b)),
        "bias": PartitionSpec(place.axes) if kind.splits_columns else PartitionSpec(),
        "after": PartitionSpec(place.batch_axes),
    }
    specs |= _of_scales(kind, place, arrays, specs)
    order = _first_order(place) if after is None else _order_of(place, after)
    given = {name: (array, specs[name]) for name, array in (arrays | {"after": order}).items()}
    if inside(place):
        _check_varying(kind, place, arrays)
    else:
        check_split(place, given if after is not None else _without_order(given))
    dtype = arrays["a"].dtype
    shapes = {name: _local(place, *given[name]) for name in arrays}
    sizes = sizes_of(kind, place, dim, options, shapes, dtype)
    way = way_of(kind, mesh, sizes, dtype, options, config, tag_of_call(*arrays.values(), order))
    tokens = options.tokens_per_rank
    if tokens is not None and len(set(tokens)) > 1:
        inner = sizes.tokens // max(tokens)
        way = way._replace(tokens=tuple(inner * one for one in tokens))
    run: Callable[..., tuple[Array, ...]] = functools.partial(kind.on_rank, way, dim)
    if options.return_gathered:
        run = functools.partial(_all_gather_and_rows, way, dim, not inside(place))
    names = tuple(name for name in _ARGUMENTS if name in given)
    if scales is not None:
        run = functools.partial(_scaled, kind, way, dim, names)
    if not inside(place):
        out = _tokens(place, ndim, dim if kind.tokens_out else None, kind.splits_columns)
        rows = (_tokens(place, ndim, None, False),) * options.return_gathered
        in_specs = tuple(given[name][1] for name in names)
        key = kind, way, dim, in_specs, options.return_gathered
        run = _program(key, run, way, in_specs, (out, *rows, specs["after"]))
    return run(*(given[name][0] for name in names))


def _program(
    key: Hashable,
    on_rank: Callable[..., Any],
    way: Way,
    in_specs: tuple[Any, ...],
    out_specs: tuple[Any, ...],
) -> Callable[..., Any]:
    """The product as a function of global arrays, which is compiled once for a key.

    Keys have tags, so there is one for each call of a loop that is traced; the oldest ones go.
    """
    programs = programs_of(way.context)
    if key not in programs:
        if len(programs) >= _MOST_PROGRAMS:
            del programs[next(iter(programs))]
        mapped = jax.shard_map(
            on_rank, mesh=way.context.place.mesh, in_specs=in_specs, out_specs=out_specs
        )
        programs[key] = jax.jit(mapped, inline=True)
    return programs[key]


# ---- On one rank ---------------------------------------------------------------------------------


def _all_gather(
    way: Way, dim: int, a: Array, b: Array, order: Array, bias: Array | None = None
) -> tuple[Array, Array]:
    given = _uniform_rows(way, a, b, order, bias)
    out, order = _ops.all_gather_matmul(way, *given)
    return _laid_out(way, dim, a.shape[:-1], out), order


def _all_gather_and_rows(
    way: Way, dim: int, alike: bool, a: Array, b: Array, order: Array, bias: Array | None = None
) -> tuple[Array, Array, Array]:
    given = _uniform_rows(way, a, b, order, bias)
    out, rows, order = _ops.all_gather_matmul_and_rows(way, alike, *given)
    own = a.shape[:-1]
    return _laid_out(way, dim, own, out), _laid_out(way, dim, own, rows), order


def _uniform_rows(
    way: Way, a: Array, b: Array, order: Array, bias: Array | None
) -> tuple[Array, Array, Array | None, Array]:
    """a, b, the bias and the order of a gather, all varying alike."""
    rows, b, order = uniform(own_rows(way, a.reshape(-1, a.shape[-1])), b, order)
    return rows, b, None if bias is None else uniform(bias, order)[0], order


def _laid_out(way: Way, dim: int, own: tuple[int, ...], rows: Array) -> Array:
    """Gathered rows in the dimensions of tokens, of which each rank has `own`."""
    ranks, leading = way.context.place.num_ranks, list(own)
    if way.tokens is not None:  # no dimension comes before
        return rows.reshape(*own[:dim], -1, *own[dim + 1 :], rows.shape[-1])
    rows = jnp.moveaxis(rows.reshape(ranks, *leading, rows.shape[-1]), 0, dim)
    leading[dim] *= ranks
    return rows.reshape(*leading, rows.shape[-1])


def _reduce_scatter(
    way: Way, dim: int, a: Array, b: Array, order: Array, bias: Array | None = None
) -> tuple[Array, Array]:
    leading, rows = _dealt_out(way, dim, a)
    rows, b, order = uniform(rows, b, order)
    bias = _of_sums(way.context.place, bias, order)
    out, order = _ops.matmul_reduce_scatter(way, rows, b, bias, order)
    out = own_rows(way, out)
    return out.reshape(*leading, out.shape[-1]), order


def _dealt_out(way: Way, dim: int, a: Array) -> tuple[list[int], Array]:
    """The dimensions of a rank's tokens, and rows of all ranks, those of rank 0 first."""
    *leading, columns = a.shape
    ranks = way.context.place.num_ranks
    if way.tokens is not None:  # no dimension comes before
        leading[dim] = max(way.tokens) // math.prod(leading[dim + 1 :])
        return leading, a.reshape(-1, columns)
    leading[dim] //= ranks
    rows = a.reshape(*leading[:dim], ranks, *leading[dim:], columns)
    return leading, jnp.moveaxis(rows, dim, 0).reshape(-1, columns)


def _all_reduce(
    way: Way, dim: int, a: Array, b: Array, order: Array, bias: Array | None = None
) -> tuple[Array, Array]:
    *leading, columns = a.shape
    rows, b, order = uniform(a.reshape(-1, columns), b, order)
    bias = _of_sums(way.context.place, bias, order)
    out, order = _ops.matmul_all_reduce(way, rows, b, bias, order)
    return out.reshape(*leading, out.shape[-1]), order


def _scaled(
    kind: Kind, way: Way, dim: int, names: tuple[str, ...], *arrays: Array
) -> tuple[Array, Array]:
    """A product of fp8, which has no derivative."""
    given = dict(zip(names, arrays))
    a, b, bias = given["a"], given["b"], given.get("bias")
    a_scale, b_scale = given["a_scale"], given["b_scale"]
    blocks = b_scale.ndim == 2
    if blocks and not way.transpose_b:
        b_scale = b_scale.T
    leading, rows = list(a.shape[:-1]), a.reshape(-1, a.shape[-1])
    if blocks or a_scale.shape == a.shape[:-1]:
        a_scale = a_scale if blocks else a_scale[..., None]
        if kind is REDUCE_SCATTER:
            a_scale = _dealt_out(way, dim, a_scale)[1]
        a_scale = a_scale.reshape(-1, a_scale.shape[-1])
    if not blocks:
        a_scale = a_scale.reshape(-1)
    if kind is REDUCE_SCATTER:
        leading, rows = _dealt_out(way, dim, a)
    varied = uniform(rows, b, given["after"], a_scale, b_scale)
    rows, b, order = varied[:3]
    scales = Scales(*varied[3:])
    if kind is ALL_GATHER:
        bias = None if bias is None else uniform(bias, order)[0]
        out, _, _, order = _calls.all_gather(
            way, rows, b, bias, order, gathered=False, activation=False, scales=scales
        )
        return _laid_out(way, dim, a.shape[:-1], out), order
    call = _calls.reduce_scatter if kind is REDUCE_SCATTER else _calls.all_reduce
    bias = _of_sums(way.context.place, bias, order)
    out, _, order = call(way, rows, b, bias, order, activation=False, scales=scales)
    out = own_rows(way, out) if kind is REDUCE_SCATTER else out
    return out.reshape(*leading, out.shape[-1]), order


def _of_sums(place: Place, bias: Array | None, order: Array) -> Array | None:
    """The bias as varying like `order`, but not over ranks if all have the same one."""
    if bias is None:
        return None
    ranks, found = frozenset(place.axes), varying(bias)
    axes = varying(order) - found
    missing = tuple(axes if found & ranks else axes - ranks)
    return jax.lax.pcast(bias, missing, to="varying") if missing else bias


ALL_GATHER = Kind("all_gather_matmul", _all_gather, True, True, False, "gather_dim")
REDUCE_SCATTER = Kind("matmul_reduce_scatter", _reduce_scatter, False, False, True, "scatter_dim")
ALL_REDUCE = Kind("matmul_all_reduce", _all_reduce, False, False, False, "")


# ---- Layouts -------------------------------------------------------------------------------------


def _tokens(place: Place, ndim: int, dim: int | None, features: bool) -> PartitionSpec:
    """How tokens lie on the mesh.

    Args:
        ndim: number of dimensions.
        dim: the one that is split over ranks; None = tokens are not.
        features: whether their last dimension is.
    """
    axes: list[tuple[str, ...]] = [()] * ndim
    axes[0] = place.data_axes
    if dim is not None:
        axes[dim] += place.axes
    if features:
        axes[-1] = place.axes
    return PartitionSpec(*(names or None for names in axes))


def _weights(place: Place, columns: bool) -> PartitionSpec:
    """How b lies on the mesh: split along its second dimension, or along its first one."""
    return PartitionSpec(None, place.axes) if columns else PartitionSpec(place.axes, None)


def _first_order(place: Place) -> Array:
    """The order that nothing comes before: one element for each rank."""
    order = jnp.zeros(_order_shape(place), np.float32)
    return laid(place, order, PartitionSpec(place.batch_axes))


def _order_shape(place: Place) -> tuple[int]:
    if inside(place):
        return (1,)
    return (math.prod(place.mesh.shape[axis] for axis in place.batch_axes),)


def _order_of(place: Place, after: Any) -> Array:
    """The argument `after`, if it has an order or is one."""
    order = jnp.asarray(getattr(after, "order", after))
    if order.dtype != np.float32 or order.shape != _order_shape(place):
        raise ValueError(
            "after: expected what an operation returned, or its order, which is float32 of shape "
            f"{_order_shape(place)} here; got {order.dtype} of shape {order.shape}"
        )
    return order


# ---- Arguments -----------------------------------------------------------------------------------


def check_kinds(
    a: Array, b: Array, bias: Array | None = None, out_dtype: np.dtype[Any] | None = None
) -> None:
    """Dtypes and numbers of dimensions. Products with an `out_dtype` are those of fp8."""
    if out_dtype is None:
        if a.dtype.name not in SUMMABLE:
            raise TypeError(f"a: expected bfloat16, float16 or float32, got {a.dtype}")
        if b.dtype != a.dtype:
            raise TypeError(f"b: expected the dtype of a, {a.dtype}, got {b.dtype}")
    else:
        for name, array in (("a", a), ("b", b)):
            if array.dtype.name not in _FP8:
                raise TypeError(f"{name}: expected {' or '.join(_FP8)}, got {array.dtype}")
        if out_dtype.name not in SUMMABLE:
            raise TypeError(f"out_dtype: expected {', '.join(SUMMABLE)}, got {out_dtype}")
    if a.ndim < 2:
        raise ValueError(f"a: expected [..., K] with tokens before K, got shape {a.shape}")
    if b.ndim != 2:
        raise ValueError(f"b: expected 2 dimensions, got shape {b.shape}")
    if bias is not None:
        dtype = out_dtype or a.dtype
        if bias.dtype not in (dtype, np.float32):
            raise TypeError(f"bias: expected {dtype} or float32, got {bias.dtype}")
        if bias.ndim != 1:
            raise ValueError(f"bias: expected [N], got shape {bias.shape}")


def tokens_of(given: Any) -> tuple[int, ...] | None:
    """The argument `tokens_per_rank`."""
    if given is None:
        return None
    return tuple(operator.index(number) for number in given)


_BLOCK = 128  # columns of K, and of N, that a scale may be for


def _scales(
    kind: Kind,
    place: Place,
    options: Options,
    arrays: dict[str, Array],
    a_scale: Array,
    b_scale: Array,
) -> dict[str, Array]:
    """Scales of fp8, checked: ``[1]`` each, or of rows and columns, or of blocks of both."""
    tokens, k = arrays["a"].shape[:-1], arrays["a"].shape[-1]
    stored = arrays["b"].shape
    columns = (stored[0 if options.transpose_b else 1],)
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scale.dtype != np.float32:
            raise ValueError(f"{name}: expected float32, got {scale.dtype}")
    if a_scale.size == b_scale.size == 1 and a_scale.ndim < 2 and b_scale.ndim < 2:
        return {"a_scale": a_scale.reshape(1), "b_scale": b_scale.reshape(1)}
    shapes = a_scale.shape, b_scale.shape
    of_rows = tokens, columns
    blocks = (*tokens, -(-k // _BLOCK)), tuple(-(-size // _BLOCK) for size in stored)
    if shapes not in (of_rows, blocks):
        raise ValueError(
            "a_scale, b_scale: expected one number each, or one for each token and column, of "
            f"shapes {tokens} and {columns}, or for {_BLOCK} columns of a token and {_BLOCK} x "
            f"{_BLOCK} elements of b, of shapes {blocks[0]} and {blocks[1]}; got {shapes[0]} and "
            f"{shapes[1]}"
        )
    split = columns[0] if kind.splits_columns else k
    if shapes == blocks and not inside(place) and split % (place.num_ranks * _BLOCK):
        name = "columns" if kind.splits_columns else "rows"
        raise ValueError(
            f"b_scale: expected {name} of b that are a multiple of {_BLOCK} on each of "
            f"{place.num_ranks} ranks, lest a block be of two; got {split} of all ranks"
        )
    return {"a_scale": a_scale, "b_scale": b_scale}


def _of_scales(
    kind: Kind, place: Place, arrays: dict[str, Array], specs: dict[str, PartitionSpec]
) -> dict[str, PartitionSpec]:
    """How scales lie on the mesh: as a and b do, or their rows and columns; single ones nowhere."""
    if "b_scale" not in arrays or arrays["b_scale"].shape == (1,):
        return dict.fromkeys(("a_scale", "b_scale"), PartitionSpec())
    if arrays["b_scale"].ndim == 2:
        return {"a_scale": specs["a"], "b_scale": specs["b"]}
    columns = PartitionSpec(place.axes) if kind.splits_columns else PartitionSpec()
    return {"a_scale": PartitionSpec(*tuple(specs["a"])[:-1]), "b_scale": columns}


def _dimension(kind: Kind, given: Any, shape: tuple[int, ...]) -> int:
    """The dimension of tokens, from 0."""
    dim = operator.index(given)
    if not -len(shape) <= dim < len(shape) or dim % len(shape) == len(shape) - 1:
        raise ValueError(
            f"{kind.dim}: expected a dimension of a before its last one, 0 to {len(shape) - 2}, "
            f"got {dim} for shape {shape}"
        )
    return dim % len(shape)


def _check_varying(kind: Kind, place: Place, arrays: dict[str, Array]) -> None:
    """Refuses parts that all ranks have alike, or not alike, where it has to be otherwise."""
    for name in ("a", "b"):
        check_varies(place, name, arrays[name])
    bias = arrays.get("bias")
    if bias is None:
        return
    if kind.splits_columns:
        check_varies(place, "bias", bias)
    elif not kind.tokens_out and varying(bias) & frozenset(place.axes):
        raise ValueError(
            "bias: expected the same one on all ranks, got parts that differ along "
            f"{tuple(varying(bias) & frozenset(place.axes))}"
        )


def sizes_of(
    kind: Kind,
    place: Place,
    dim: int,
    options: Options,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype[Any],
) -> Sizes:
    """The sizes of one rank's product, if the shapes of its matrices fit one another."""
    a, b, ranks = shapes["a"], shapes["b"], place.num_ranks
    k, n = reversed(b) if options.transpose_b else b
    if a[-1] != k:
        stored = "[N, K]" if options.transpose_b else "[K, N]"
        raise ValueError(
            f"b: expected {stored} with K = {a[-1]} as of a, {a} on a rank; got {b} on a rank"
        )
    if shapes.get("bias", (n,)) != (n,):
        raise ValueError(f"bias: expected [N] with N = {n} as of b, got {shapes['bias']} on a rank")
    itemsize = 1 if options.fp8 else dtype.itemsize
    for name, columns in (("K", k), ("N", n)):
        if columns < 1 or columns * itemsize % 16:
            raise ValueError(
                f"b: expected rows and columns of a positive multiple of 16 bytes on a rank, got "
                f"{name} = {columns} of {itemsize} bytes"
            )
    if options.tokens_per_rank is not None:
        return _sizes_of_ranks(kind, ranks, dim, options.tokens_per_rank, a, k, n)
    if kind.tokens_out and a[dim] % ranks:
        raise ValueError(
            f"a: expected a multiple of the {ranks} ranks along {kind.dim} = {dim}, got shape {a} "
            "on a rank"
        )
    tokens = math.prod(a[:-1])
    if tokens == 0:
        # Every rank has as many, so there is nothing to compute, and XLA of JAX 0.11 crashes.
        raise ValueError(f"a: expected at least one token on a rank, got shape {a} on a rank")
    return Sizes(tokens if kind.tokens_in else -(-tokens // ranks), k, n)


def _sizes_of_ranks(
    kind: Kind, ranks: int, dim: int, tokens: tuple[int, ...], a: tuple[int, ...], k: int, n: int
) -> Sizes:
    """The sizes where the numbers of all ranks' tokens are given."""
    if len(tokens) != ranks or min(tokens) < 0 or max(tokens) < 1:
        raise ValueError(
            f"tokens_per_rank: expected {ranks} numbers from 0, one of them above it, got {tokens}"
        )
    if math.prod(a[:dim]) != 1:
        raise ValueError(
            f"{kind.dim}: expected a dimension with none of more than one element before it, as "
            f"tokens_per_rank is given; got {dim} for shape {a} on a rank"
        )
    wanted = max(tokens) if kind.tokens_in else sum(tokens)
    if a[dim] != wanted:
        what = "most of" if kind.tokens_in else "sum of"
        raise ValueError(
            f"a: expected {wanted} along {kind.dim} = {dim} on a rank, the {what} tokens_per_rank "
            f"{tokens}, got shape {a} on a rank"
        )
    inner = math.prod(a[dim + 1 : -1])
    if inner == 0:
        raise ValueError(f"a: expected at least one token on a rank, got shape {a} on a rank")
    return Sizes(max(tokens) * inner, k, n)


def _local(place: Place, array: Array, spec: PartitionSpec) -> tuple[int, ...]:
    """The shape of one rank's part."""
    if inside(place):
        return array.shape
    parts = [parts_along(place, axes) for axes in spec] + [1] * (array.ndim - len(spec))
    return tuple(length // count for length, count in zip(array.shape, parts))


# Products by cuBLASMp wait on the host and give no gathered rows, so no program can contain them.
_ALGOS = {
    word: number for word, number in constants.GEMM_ALGOS.items() if not word.startswith("cublasmp")
}


def way_of(
    kind: Kind,
    mesh: Contexts,
    sizes: Sizes,
    dtype: Any,
    options: Options,
    config: GemmConfig | None,
    tag: int = 0,
) -> Way:
    if options.activation is not None:
        gemm_word("activation", options.activation, _ACTIVATIONS)
    gemm_word("algo", options.algo, _ALGOS)
    return Way(
        mesh.context(
            _bounds(kind, sizes, options.out_dtype or dtype, options) if config is None else config
        ),
        bool(options.transpose_b),
        options.activation,
        bool(options.allow_tf32),
        options.algo,
        bool(options.save_gathered),
        tag,
        options.out_dtype,
        bool(options.fp8),
    )


def _bounds(kind: Kind, sizes: Sizes, dtype: Any, options: Options) -> GemmConfig:
    """The bounds of an operation and of its gradient.

    The two layers of a pair, one column-parallel and one row-parallel, have the same ones. Tokens
    are rounded up to a power of two, so that programs for many lengths have few contexts.
    """
    operations: tuple[GemmOperation, ...] = ("all_gather", "reduce_scatter")
    if kind is ALL_REDUCE:
        operations = ("all_reduce",)
    elif not options.save_gathered or options.return_gathered:
        operations += ("bulk",)
    outer = sizes.n if kind is REDUCE_SCATTER else sizes.k  # of tokens between the ranks
    return GemmConfig(
        max_tokens=1 << (sizes.tokens - 1).bit_length(),
        max_k=outer,
        max_n=sizes.n if kind is ALL_REDUCE else max(sizes.k, sizes.n),
        dtype=dtype,
        operations=operations,
    )


def _without_order(given: dict[str, Any]) -> dict[str, Any]:
    """All but an order of ours, which is a constant that XLA puts where it is wanted."""
    return {name: item for name, item in given.items() if name != "after"}
