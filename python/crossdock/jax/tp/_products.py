"""The three products for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import jax

from crossdock import GemmConfig
from crossdock._gemm_config import Algo

from . import _run
from ._calls import Activation
from ._mesh import TpMesh

__all__ = [
    "GatheredProduct",
    "Product",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]


class Product(NamedTuple):
    """The results of an operation.

    Attributes:
        out: the product.
        order: stands for the operations so far, for the `after` of an operation beside this one.
    """

    out: jax.Array
    order: jax.Array


class GatheredProduct(NamedTuple):
    """The results of `all_gather_matmul` where the gathered rows are wanted.

    Attributes:
        out: the product.
        gathered: the rows of all ranks.
        order: as of `Product`.
    """

    out: jax.Array
    gathered: jax.Array
    order: jax.Array


@overload
def all_gather_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    transpose_b: bool = False,
    gather_dim: int = 0,
    save_gathered: bool = True,
    return_gathered: Literal[False] = False,
    tokens_per_rank: Sequence[int] | None = None,
    fp8: bool = False,
    allow_tf32: bool = False,
    algo: Algo = "auto",
    config: GemmConfig | None = None,
    after: Any = None,
    mesh: TpMesh | None = None,
) -> Product: ...
@overload
def all_gather_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    transpose_b: bool = False,
    gather_dim: int = 0,
    save_gathered: bool = True,
    return_gathered: Literal[True],
    tokens_per_rank: Sequence[int] | None = None,
    fp8: bool = False,
    allow_tf32: bool = False,
    algo: Algo = "auto",
    config: GemmConfig | None = None,
    after: Any = None,
    mesh: TpMesh | None = None,
) -> GatheredProduct: ...
def all_gather_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    transpose_b: bool = False,
    gather_dim: int = 0,
    save_gathered: bool = True,
    return_gathered: bool = False,
    tokens_per_rank: Sequence[int] | None = None,
    fp8: bool = False,
    allow_tf32: bool = False,
    algo: Algo = "auto",
    config: GemmConfig | None = None,
    after: Any = None,
    mesh: TpMesh | None = None,
) -> Product | GatheredProduct:
    """``act(all-gather(a) @ b + bias)``, as in a column-parallel layer. Collective, differentiable.

    Inside ``shard_map`` over the mesh of `init`, arrays are one rank's, of shapes as below. Outside
    they are global, and lie on the mesh: `a` split over the ranks along `gather_dim`, `b` and
    `bias` along N, the result along N. Its first dimension is split over `data_axes`, too.

    Args:
        a: ``[..., K]`` bfloat16, float16 or float32, this rank's tokens.
        b: ``[K, N]`` of the same dtype, this rank's columns of the layer; with `transpose_b` stored
            as ``[N, K]``.
        bias: ``[N]`` of that dtype or float32.
        activation: act: "gelu" (tanh form), "relu", or None.
        transpose_b: see `b`.
        gather_dim: the dimension of `a` along which the ranks' tokens follow one another in the
            result. Where dimensions of more than one element come before it, the result is
            transposed once.
        save_gathered: whether the gathered `a` is kept for the backward pass, W times what this
            rank has; otherwise it is gathered again there, beside a product.
        return_gathered: whether the gathered `a` is returned, too, for other products with it.
            Inside ``shard_map`` each rank has a copy of its own, and the gradients of the copies
            are summed over the ranks beside that of `b`. Outside it is one array on all ranks. With
            `fp8` these rows are as they have travelled, in the dtype of `a` again.
        tokens_per_rank: sizes of `gather_dim` on the ranks, where they differ; equal on all ranks.
            Arrays have as many on each rank as the rank with the most: what lies behind its own
            counts for nothing, and has a gradient of zeros. The result has those of all ranks, one
            behind the other. No dimension of more than one element comes before `gather_dim`.
        fp8: make `a` and `b` float8_e4m3fn on the way, each rank with a scale for each, a power of
            two. Tokens travel, and are kept, as fp8; the products of the backward pass are in the
            dtype of `a`.
        allow_tf32: whether GPUs may compute products of float32 in TF32.
        algo: how transfer and product are interleaved; "auto" = as `config` says. The gradient is
            always made as that says.
        config: bounds of the context; None = those of this operation and its gradient. Operations
            with equal ones share their context.
        after: a `Product`, an order, or a plan of expert parallelism, whose operations so far come
            before this one, and whose backward operations come after, although no data says so.
            Needed where two layers of one program do not depend on one another: without it ranks
            may run them in different orders.
        mesh: from `init`; None = the last one.

    Returns:
        out ``[..., N]`` with the tokens of all ranks, if it is wanted `a` ``[..., K]`` of all
        ranks, and the order.

    Raises:
        TypeError, ValueError: a bad argument, while tracing.
        jax.errors.JaxRuntimeError: when it runs, on all ranks. On the CPU: FAILED_PRECONDITION
            where ranks disagree, UNIMPLEMENTED for what cannot be done, with the reason. On GPUs
            `TpMesh.check` raises these.
    """
    options = _run.Options(
        transpose_b,
        activation,
        allow_tf32,
        algo,
        save_gathered,
        bool(return_gathered),
        tokens_per_rank=_run.tokens_of(tokens_per_rank),
        fp8=bool(fp8),
    )
    found = _run.product(_run.ALL_GATHER, a, b, bias, gather_dim, options, config, after, mesh)
    return GatheredProduct(*found) if return_gathered else Product(*found)


def matmul_reduce_scatter(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    transpose_b: bool = False,
    scatter_dim: int = 0,
    tokens_per_rank: Sequence[int] | None = None,
    fp8: bool = False,
    allow_tf32: bool = False,
    algo: Algo = "auto",
    config: GemmConfig | None = None,
    after: Any = None,
    mesh: TpMesh | None = None,
) -> Product:
    """``act(sum over ranks of a @ b, + bias)``, this rank's tokens, as in a row-parallel layer.

    Collective, differentiable. Sums are in float32 by ascending rank.

    Outside ``shard_map`` arrays are global, and lie on the mesh: `a` and `b` split over the ranks
    along K, the bias whole, the result along `scatter_dim`. Its first dimension is split over
    `data_axes`, too.

    Args:
        a: ``[..., K]``, all tokens, this rank's part of the inner dimension.
        b: ``[K, N]``, with `transpose_b` stored as ``[N, K]``.
        bias: ``[N]``, added once.
        scatter_dim: the dimension of `a` that is dealt out to the ranks, a multiple of W. Where
            dimensions of more than one element come before it, `a` is transposed once.
        tokens_per_rank: how many of `scatter_dim`, which has their sum, each rank gets, where that
            differs; equal on all ranks. The result has as many on each rank as the rank with the
            most, with zeros behind its own. Otherwise as of `all_gather_matmul`.
        fp8: make `a` and `b` float8_e4m3fn on the way, as of `all_gather_matmul`; terms are
            rounded to the dtype of `a` before they are summed.
        activation, transpose_b, allow_tf32, algo, config, after, mesh: as `all_gather_matmul`.

    Returns:
        out ``[..., N]`` with this rank's tokens, and the order.

    Raises:
        TypeError, ValueError, jax.errors.JaxRuntimeError: as `all_gather_matmul`.
    """
    tokens = _run.tokens_of(tokens_per_rank)
    options = _run.Options(
        transpose_b, activation, allow_tf32, algo, tokens_per_rank=tokens, fp8=bool(fp8)
    )
    return Product(
        *_run.product(_run.REDUCE_SCATTER, a, b, bias, scatter_dim, options, config, after, mesh)
    )


def matmul_all_reduce(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    transpose_b: bool = False,
    allow_tf32: bool = False,
    algo: Algo = "auto",
    config: GemmConfig | None = None,
    after: Any = None,
    mesh: TpMesh | None = None,
) -> Product:
    """``act(sum over ranks of a @ b, + bias)``, all tokens on all ranks.

    Collective, differentiable: the backward pass needs no transfer. Arrays are those of
    `matmul_reduce_scatter`, but for the result, which all ranks have; the bias, too.

    Args:
        a: ``[..., K]``, all tokens, this rank's part of the inner dimension.
        b: ``[K, N]``, with `transpose_b` stored as ``[N, K]``.
        bias: ``[N]``, equal on all ranks.
        activation, transpose_b, allow_tf32, algo, config, after, mesh: as `all_gather_matmul`.

    Returns:
        out ``[..., N]``, and the order.

    Raises:
        TypeError, ValueError, jax.errors.JaxRuntimeError: as `all_gather_matmul`.
    """
    options = _run.Options(transpose_b, activation, allow_tf32, algo)
    return Product(*_run.product(_run.ALL_REDUCE, a, b, bias, 0, options, config, after, mesh))
