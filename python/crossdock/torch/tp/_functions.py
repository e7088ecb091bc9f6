"""Products for users: tensors of any number of dimensions, activations, tokens per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn import functional as F

from crossdock._core import constants
from crossdock._gemm_config import Algo

from .._autocast import autocast
from .._derivatives import call
from .._direct import FUNCTIONS, unobserved
from . import _derivatives, _fp8  # noqa: F401  (register operators and derivatives)
from ._arguments import (
    Fold,
    needs_of,
    read_tokens,
    require,
    require_main_grad,
    word_number,
)
from ._context import TpContext
from ._operands import ALL_GATHER, ALL_REDUCE, BULK, REDUCE_SCATTER

__all__ = [
    "Activation",
    "activated",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "bulk_all_gather",
    "bulk_reduce_scatter",
    "fp8_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "replicated_matmul",
    "scaled",
    "scaled_fold",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]

Activation = Literal["gelu", "relu"]

_OPS = torch.ops.crossdock
_PRODUCTS = {
    ALL_GATHER: "tp_all_gather_matmul",
    REDUCE_SCATTER: "tp_matmul_reduce_scatter",
    ALL_REDUCE: "tp_matmul_all_reduce",
}


def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    context: TpContext,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    gather_dim: int = 0,
    tokens_per_rank: Sequence[int] | None = None,
    return_gathered: bool = False,
    save_gathered: bool = True,
    main_grad: torch.Tensor | None = None,
    algo: Algo = "auto",
) -> Any:
    """``act(all-gather(a) @ b + bias)``: a column-parallel product. Collective, differentiable.

    In the backward pass the gradient of a is a product whose rows are summed over the ranks and
    scattered while the gradient of b is computed.

    Args:
        a: ``[..., K]``, this rank's tokens: bfloat16, float16 or float32, of two or more
            dimensions.
        b: ``[K, N]``, dtype of a. The view ``weight.t()`` of a weight ``[N, K]`` is read in place.
        context: on whose ranks; K and N within its bounds.
        bias: ``[N]``, dtype of the result or float32.
        activation: ``"gelu"`` (its tanh form) or ``"relu"``.
        gather_dim: along which ranks follow one another; any but the last. For another than 0 rows
            are copied once before the operation and once behind it.
        tokens_per_rank: size of that dimension on each rank, equal on all ranks; None = the same
            size everywhere.
        return_gathered: also return the gathered a, without a gradient.
        save_gathered: keep the gathered a for the gradient of b; else it is gathered once more,
            beside a product of the backward pass.
        main_grad: the gradient of b is added to this, and b gets none: laid out as b is stored, of
            b's dtype or float32.
        algo: how transfer and product are interleaved; "auto" = the context's choice, and on one
            rank torch's own product.

    Returns:
        ``[..., N]``, larger along gather_dim; with return_gathered a pair.

    Raises:
        TypeError, ValueError: a bad argument; the peers get Mismatch.
        InvalidArgument: one that the library finds, such as a shape.
        Mismatch: the ranks' arguments disagree, or another rank's are bad.
        Unsupported: the algorithm, or these types or sizes on this device, with the reason.
        CrossdockError: the others of ``crossdock.errors``. On CUDA what other ranks have done wrong
            is raised by `TpContext.check` or by a later call.
    """
    require(context, ALL_GATHER, a, b, bias)
    if context.num_ranks == 1 and main_grad is None and algo == "auto":
        out = activated(F.linear(a, b.t(), bias), activation)
        return (out, a.detach().clone()) if return_gathered else out
    a, b, bias = autocast(a, b, bias)
    fold = Fold(context, ALL_GATHER, "gather_dim", a, gather_dim, tokens_per_rank)
    keep = save_gathered and torch.is_grad_enabled() and b.requires_grad
    d, gathered, _ = _product(
        context, ALL_GATHER, fold, b, bias, main_grad, activation, algo, keep or return_gathered
    )
    return (fold.back(d), fold.back(gathered)) if return_gathered else fold.back(d)


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    context: TpContext,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    scatter_dim: int = 0,
    tokens_per_rank: Sequence[int] | None = None,
    main_grad: torch.Tensor | None = None,
    algo: Algo = "auto",
) -> torch.Tensor:
    """This rank's part of ``act(sum over ranks of a @ b + bias)``: a row-parallel product.

    Collective, differentiable. In the backward pass the gradient is gathered once, beside the
    product that is the gradient of a.

    Args:
        a: ``[..., K]``, the tokens of all ranks, of which this rank has some of the columns.
        b: ``[K, N]``; see `all_gather_matmul`.
        context: on whose ranks; N within its bounds.
        bias: ``[N]``, equal on all ranks, each of which gets the gradient of all tokens.
        activation, main_grad, algo: as of `all_gather_matmul`.
        scatter_dim: along which ranks follow one another; any but the last.
        tokens_per_rank: size of that dimension of each rank's result; None = equal shares.

    Returns:
        ``[..., N]``, smaller along scatter_dim.

    Raises:
        As `all_gather_matmul`.
    """
    require(context, REDUCE_SCATTER, a, b, bias)
    if context.num_ranks == 1 and main_grad is None and algo == "auto":
        return activated(F.linear(a, b.t(), bias), activation)
    a, b, bias = autocast(a, b, bias)
    fold = Fold(context, REDUCE_SCATTER, "scatter_dim", a, scatter_dim, tokens_per_rank)
    d, _, _ = _product(context, REDUCE_SCATTER, fold, b, bias, main_grad, activation, algo, False)
    return fold.back(d)


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    context: TpContext,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    main_grad: torch.Tensor | None = None,
    algo: Algo = "auto",
) -> torch.Tensor:
    """``act(sum over ranks of a @ b + bias)``, equal on all ranks. Collective, differentiable.

    Args:
        a: ``[..., K]``, all tokens, of which this rank has some of the columns.
        b: ``[K, N]``; see `all_gather_matmul`.
        context: on whose ranks; N within its bounds.
        bias: ``[N]``, equal on all ranks.
        activation, main_grad, algo: as of `all_gather_matmul`.

    Returns:
        ``[..., N]``. Its gradient must be equal on all ranks, as it is where they go on alike.

    Raises:
        As `all_gather_matmul`.
    """
    require(context, ALL_REDUCE, a, b, bias)
    if context.num_ranks == 1 and main_grad is None and algo == "auto":
        return activated(F.linear(a, b.t(), bias), activation)
    a, b, bias = autocast(a, b, bias)
    fold = Fold(context, ALL_REDUCE, "dim", a, 0, None)
    d, _, _ = _product(context, ALL_REDUCE, fold, b, bias, main_grad, activation, algo, False)
    return fold.back(d)


def replicated_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    context: TpContext,
    bias: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a @ b + bias`` of all tokens, which all ranks have: a column-parallel product.

    Nothing is transferred. In the backward pass the gradient of a is summed over the ranks.
    """
    require(context, ALL_REDUCE, a, b, bias)
    if context.num_ranks == 1 and main_grad is None:
        return F.linear(a, b.t(), bias)
    a, b, bias = autocast(a, b, bias)
    fold = Fold(context, ALL_REDUCE, "dim", a, 0, None)
    require_main_grad(context, ALL_REDUCE, main_grad, b)
    needs = needs_of(fold.rows, b, bias)
    given = (fold.rows, b, bias, main_grad, context.order, context.handle, needs)
    return fold.back(call(_OPS.tp_replicated_matmul.default, needs > 0, *given))


def fp8_matmul(
    operation: int,
    a: torch.Tensor,
    b: torch.Tensor,
    context: TpContext,
    *,
    bias: torch.Tensor | None,
    dim: int,
    tokens_per_rank: Sequence[int] | None,
    save_gathered: bool = True,
    main_grad: torch.Tensor | None = None,
    algo: Algo = "auto",
) -> torch.Tensor:
    """`all_gather_matmul` or `matmul_reduce_scatter` with operands made fp8 on the way."""
    require(context, operation, a, b, bias)
    a, b, bias = autocast(a, b, bias)
    gathers = operation == ALL_GATHER
    fold = Fold(
        context, operation, "gather_dim" if gathers else "scatter_dim", a, dim, tokens_per_rank
    )
    number = word_number(context, operation, "algo", algo, constants.GEMM_ALGOS)
    require_main_grad(context, operation, main_grad, b)
    needs = needs_of(fold.rows, b, bias)
    given = (fold.rows, b, bias, main_grad, context.order, context.handle, fold.tokens, number)
    if not gathers:
        operator = _OPS.tp_fp8_matmul_reduce_scatter.default
        return fold.back(call(operator, needs > 0, *given, needs)[0])
    keep = save_gathered and torch.is_grad_enabled() and b.requires_grad
    operator = _OPS.tp_fp8_all_gather_matmul.default
    return fold.back(call(operator, needs > 0, *given, keep, needs)[0])


def all_gather_scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    context: TpContext,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    gather_dim: int = 0,
    tokens_per_rank: Sequence[int] | None = None,
    return_gathered: bool = False,
    algo: Algo = "auto",
) -> Any:
    """`all_gather_matmul` of fp8 with scales, without derivatives.

    Args:
        a: ``[..., K]`` float8_e4m3fn or float8_e5m2; not both of a and b in e5m2.
        b: ``[K, N]``; on CUDA the transposed view of a weight ``[N, K]``.
        scale_a, scale_b: float32, as of ``torch._scaled_mm``: a single number each, or one per row
            of a ``[..., 1]`` and per column of b ``[1, N]``, or one per 128 columns
            ``[..., K / 128]`` and per 128 times 128 of b ``[K / 128, N / 128]``. Scales of a are
            this rank's, and are gathered with its rows.
        bias: ``[N]``, of the result's dtype (bfloat16 where that is fp8) or float32.
        scale_result: a single float32 by which results in fp8 are multiplied.
        out_dtype: bfloat16, float16, float32, or fp8.
        use_fast_accum: sums may stay in the tensor cores' narrower accumulators.
        context, gather_dim, tokens_per_rank, return_gathered, algo: as of `all_gather_matmul`.

    Raises:
        As `all_gather_matmul`.
    """
    fold = scaled_fold(context, ALL_GATHER, "gather_dim", a, b, gather_dim, tokens_per_rank)
    options = (scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, algo)
    d, gathered, _ = scaled(fold, b, *options, return_gathered)
    return (fold.back(d), fold.back(gathered)) if return_gathered else fold.back(d)


def scaled_matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    context: TpContext,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    scatter_dim: int = 0,
    tokens_per_rank: Sequence[int] | None = None,
    algo: Algo = "auto",
) -> torch.Tensor:
    """`matmul_reduce_scatter` of fp8 with scales, without derivatives.

    The arguments are those of `all_gather_scaled_matmul` and `matmul_reduce_scatter`.
    """
    fold = scaled_fold(context, REDUCE_SCATTER, "scatter_dim", a, b, scatter_dim, tokens_per_rank)
    options = (scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, algo)
    return fold.back(scaled(fold, b, *options, False)[0])


def scaled_matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    context: TpContext,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    algo: Algo = "auto",
) -> torch.Tensor:
    """`matmul_all_reduce` of fp8 with scales, without derivatives.

    The arguments are those of `all_gather_scaled_matmul` and `matmul_all_reduce`.
    """
    fold = scaled_fold(context, ALL_REDUCE, "dim", a, b, 0, None)
    options = (scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, algo)
    return fold.back(scaled(fold, b, *options, False)[0])


def bulk_all_gather(
    array: torch.Tensor,
    context: TpContext,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    accumulate: torch.Tensor | None = None,
    tokens_per_rank: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gathers an array while this rank computes ``a @ b``. Collective, without derivatives.

    Args:
        array: ``[m, H]`` of any dtype that the library moves.
        context: made for "bulk" and "all_gather".
        a, b: a product of this rank alone, of any sizes; None = none.
        accumulate: a tensor to which the product is added.
        tokens_per_rank: m of each rank; None = equal shares.

    Returns:
        ``[M, H]``, and the product: None where there is none, or where it has been added.

    Raises:
        As `all_gather_matmul`.
    """
    return _bulk(array, context, a, b, accumulate, tokens_per_rank, reduces=False)


def bulk_reduce_scatter(
    array: torch.Tensor,
    context: TpContext,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    accumulate: torch.Tensor | None = None,
    tokens_per_rank: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums an array over the ranks, and scatters it, while this rank computes ``a @ b``.

    Collective, without derivatives. Sums are in float32, by ascending rank, rounded once.

    Args:
        array: ``[M, H]`` bfloat16, float16 or float32.
        context: made for "bulk" and "reduce_scatter".
        a, b, accumulate, tokens_per_rank: as of `bulk_all_gather`.

    Returns:
        ``[m, H]``, and the product, as of `bulk_all_gather`.

    Raises:
        As `all_gather_matmul`.
    """
    return _bulk(array, context, a, b, accumulate, tokens_per_rank, reduces=True)


# ---- Arguments -----------------------------------------------------------------------------------


_ACTIVATIONS = {word: constants.GEMM_EPILOGUES[word] for word in ("gelu", "relu")}


def _product(
    context: TpContext,
    operation: int,
    fold: Fold,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    activation: Activation | None,
    algo: Algo,
    keep_gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    epilogue = 0
    if activation is not None:
        epilogue = word_number(context, operation, "activation", activation, _ACTIVATIONS)
    number = word_number(context, operation, "algo", algo, constants.GEMM_ALGOS)
    require_main_grad(context, operation, main_grad, b)
    needs = needs_of(fold.rows, b, bias)
    tensors, name = (fold.rows, b, bias, main_grad), _PRODUCTS[operation]
    given = (context.order, context.handle, fold.tokens, epilogue, number, keep_gathered, needs)
    if not needs and unobserved(context.order, *tensors):
        return FUNCTIONS[name](*tensors, *given)
    return call(getattr(_OPS, name).default, needs > 0, *tensors, *given)


def activated(x: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    """Torch's activation of that name."""
    if activation is None:
        return x
    if activation == "relu":
        return F.relu(x)
    if activation == "gelu":
        return F.gelu(x, approximate="tanh")
    raise ValueError(f"activation: expected one of 'gelu', 'relu', got {activation!r}")


def scaled_fold(
    context: TpContext,
    operation: int,
    argument: str,
    a: torch.Tensor,
    b: torch.Tensor,
    dim: int,
    tokens_per_rank: Sequence[int] | None,
) -> Fold:
    """Tokens in fp8 as rows."""
    require(context, operation, a, b)
    return Fold(context, operation, argument, a, dim, tokens_per_rank)


def scaled(
    fold: Fold,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale_result: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    algo: Algo,
    keep_gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The product, the gathered rows and their scales, all by rows."""
    context, operation = fold.context, fold.operation
    beside = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias, "scale_result": scale_result}
    context.require_tensors(operation, a=fold.rows, **beside)
    return _OPS.tp_scaled_matmul.default(
        fold.rows,
        b,
        _scale_of_a(fold, scale_a),
        _scale_of_b(scale_b),
        bias,
        None if scale_result is None else scale_result.reshape(1),
        context.order,
        context.handle,
        fold.tokens,
        operation,
        0,
        word_number(context, operation, "algo", algo, constants.GEMM_ALGOS),
        keep_gathered,
        out_dtype,
        use_fast_accum,
    )


def _scale_of_a(fold: Fold, scale: torch.Tensor | None) -> torch.Tensor | None:
    """[1], [rows], or [rows, blocks of columns]."""
    if scale is None or scale.dim() < 2:
        return None if scale is None else scale.reshape(-1)
    moved = scale if fold.dim == 0 else scale.movedim(fold.dim, 0)
    return moved.reshape(-1) if scale.shape[-1] == 1 else moved.reshape(-1, scale.shape[-1])


def _scale_of_b(scale: torch.Tensor | None) -> torch.Tensor | None:
    """[1], [N], or [blocks of N, blocks of K]."""
    if scale is None or scale.dim() < 2 or scale.shape[0] == 1:
        return None if scale is None else scale.reshape(-1)
    return scale.t()


def _bulk(
    array: torch.Tensor,
    context: TpContext,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    accumulate: torch.Tensor | None,
    tokens_per_rank: Sequence[int] | None,
    reduces: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not isinstance(context, TpContext):
        raise TypeError(f"context: expected a TpContext, got {type(context).__name__}")
    context.require_tensors(BULK, array=array, a=a, b=b, accumulate=accumulate)
    if (a is None) != (b is None) or (a is None and accumulate is not None):
        problem = "a and b: expected both or none, and accumulate with both alone"
        context.refuse(BULK, ValueError, problem)
    tokens = read_tokens(context, BULK, tokens_per_rank)
    out, product = _OPS.tp_bulk.default(
        array, a, b, accumulate, context.order, context.handle, tokens, reduces
    )
    return out, None if a is None or accumulate is not None else product
