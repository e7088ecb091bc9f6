"""Products whose operands are made fp8 on the way, with a scale per tensor, and their derivatives.

Scales are powers of two, as large as the tensor's largest element allows: nothing is rounded but
the elements themselves. Tensors that are kept for the backward pass are in fp8 as well; the
products of the backward pass are in the dtype of the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._derivatives import register
from ._context import context_of, rows_of_d
from ._derivatives import Saved, gathered_grads, scattered_grads
from ._operands import ALL_GATHER, REDUCE_SCATTER
from ._operators import define, scaled_matmul, shapes_of

__all__: list[str] = []

_FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of _FP8
_OPS = torch.ops.crossdock
_below_autograd = torch._C._AutoDispatchBelowAutograd


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in fp8, and the number ``[1]`` by which its elements are multiplied to give x."""
    if x.numel() == 0:
        return x.to(_FP8), x.new_ones(1, dtype=torch.float32)
    most = x.abs().amax().to(torch.float32).reshape(1)
    # Without elements but zeros any scale will do. Beside an infinite element, or NaN, none will:
    # the scale and all elements become NaN.
    exponent = torch.floor(torch.log2(_LARGEST / most)).clamp_(-64, 64) + (most - most)
    scaled = x.to(torch.float32) * torch.exp2(exponent)
    return scaled.clamp_(-_LARGEST, _LARGEST).to(_FP8), torch.exp2(-exponent)


def _widened(rows: Tensor, scales: Tensor, tokens: Sequence[int] | None, dtype: Any) -> Tensor:
    """Rows of all ranks, each rank's times its scale."""
    parts = rows.chunk(scales.shape[0]) if tokens is None else rows.split(list(tokens))
    return torch.cat([_times(part, scale, dtype) for part, scale in zip(parts, scales)])


def _times(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Exact where `dtype` has the result."""
    # Scales of small numbers are smaller than what float16 has.
    wide = torch.float32 if dtype == torch.float16 else dtype
    return (rows.to(wide) * scale.to(wide)).to(dtype)


def _multiplied(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    context: int,
    tokens: Sequence[int] | None,
    operation: int,
    algo: int,
    keep_gathered: bool,
    needs: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> d, gathered and its scales, and a in fp8 and its scale."""
    order = context_of(context).order
    rows, scale_a = _quantised(a)
    columns, scale_b = _quantised(b.t())  # as a weight lies
    made = scaled_matmul(
        rows,
        columns.t(),
        scale_a,
        scale_b,
        bias,
        None,
        order,
        context,
        tokens,
        operation,
        0,
        algo,
        keep_gathered,
        a.dtype,
        False,
        needs,
    )
    return (*made, rows, scale_a)


@define(
    "tp_fp8_all_gather_matmul(Tensor a, Tensor b, Tensor? bias, Tensor? main_grad, "
    "Tensor(a!) order, int context, SymInt[]? tokens, int algo, bool keep, int needs) "
    "-> (Tensor, Tensor, Tensor)",
    lambda *_: ALL_GATHER,
)
def _all_gather_matmul(a, b, bias, main_grad, order, context, tokens, algo, keep, needs):
    """-> d, gathered, and the scale of each rank's rows."""
    return _multiplied(a, b, bias, context, tokens, ALL_GATHER, algo, keep, needs)[:3]


@shapes_of("tp_fp8_all_gather_matmul")
def _all_gather_matmul_shapes(a, b, bias, main_grad, order, context, tokens, algo, keep, needs):
    tp = context_of(context)
    rows = rows_of_d(tp, ALL_GATHER, a.shape[0], tokens)
    gathered = a.new_empty((rows, a.shape[1]) if keep else 0, dtype=_FP8)
    scales = a.new_empty(tp.num_ranks if keep else 0, dtype=torch.float32)
    return a.new_empty((rows, b.shape[1])), gathered, scales


@define(
    "tp_fp8_matmul_reduce_scatter(Tensor a, Tensor b, Tensor? bias, Tensor? main_grad, "
    "Tensor(a!) order, int context, SymInt[]? tokens, int algo, int needs) "
    "-> (Tensor, Tensor, Tensor)",
    lambda *_: REDUCE_SCATTER,
)
def _matmul_reduce_scatter(a, b, bias, main_grad, order, context, tokens, algo, needs):
    """-> d, a in fp8, and its scale."""
    made = _multiplied(a, b, bias, context, tokens, REDUCE_SCATTER, algo, False, needs)
    return made[0], made[3], made[4]


@shapes_of("tp_fp8_matmul_reduce_scatter")
def _matmul_reduce_scatter_shapes(a, b, bias, main_grad, order, context, tokens, algo, needs):
    rows = rows_of_d(context_of(context), REDUCE_SCATTER, a.shape[0], tokens)
    scale = a.new_empty(1, dtype=torch.float32)
    return a.new_empty((rows, b.shape[1])), torch.empty_like(a, dtype=_FP8), scale


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, main_grad, order, context, tokens, algo, keep, needs):
        with _below_autograd():
            outputs = _OPS.tp_fp8_all_gather_matmul.default(
                a, b, bias, main_grad, order, context, tokens, algo, keep, needs
            )
        _, gathered, scales = outputs
        ctx.saved = Saved(ctx.needs_input_grad[:3], order, main_grad, context, tokens)
        ctx.keep, ctx.dtype = keep, a.dtype
        rows = (gathered, scales) if keep else (a, None)
        ctx.save_for_backward(*(rows if ctx.saved.b_needs else (None, None)), b, bias)
        ctx.mark_non_differentiable(gathered, scales)
        return outputs

    @staticmethod
    def backward(ctx, grad, grad_gathered, grad_scales):
        rows, scales, b, bias = ctx.saved_tensors
        if scales is not None:
            rows = _widened(rows, scales, ctx.saved.tokens, ctx.dtype)
        return (*gathered_grads(ctx.saved, ctx.keep, rows, b, bias, grad), *(None,) * 7)


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, main_grad, order, context, tokens, algo, needs):
        with _below_autograd():
            outputs = _OPS.tp_fp8_matmul_reduce_scatter.default(
                a, b, bias, main_grad, order, context, tokens, algo, needs
            )
        _, rows, scale = outputs
        ctx.saved = Saved(ctx.needs_input_grad[:3], order, main_grad, context, tokens)
        ctx.dtype = a.dtype
        ctx.save_for_backward(*((rows, scale) if ctx.saved.b_needs else (None, None)), b, bias)
        ctx.mark_non_differentiable(rows, scale)
        return outputs

    @staticmethod
    def backward(ctx, grad, grad_rows, grad_scale):
        rows, scale, b, bias = ctx.saved_tensors
        a = None if rows is None else _times(rows, scale, ctx.dtype)
        return (*scattered_grads(ctx.saved, a, b, bias, grad), *(None,) * 6)


register("tp_fp8_all_gather_matmul", _AllGatherMatmul)
register("tp_fp8_matmul_reduce_scatter", _MatmulReduceScatter)
