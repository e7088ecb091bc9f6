"""The results of operators: shapes and dtypes, written once for running and for tracing.

Names are those of the functions of ``_calls`` that write them; R rows, T tokens.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from crossdock._quantise import QuantiseWay

from . import _calls
from ._group import EpGroup
from ._pool import SymmetricPool

__all__: list[str] = []

# Shapes and dtypes by name; None = not asked for.
_Parts: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype] | None]


# The results of one call of an operator, in their order but for the order tensor: first receive
# tensors, which come from the pool of symmetric memory, then the others.
Outputs: TypeAlias = tuple[_Parts, _Parts]

_FLOAT32, _INT32 = torch.float32, torch.int32


def make(outputs: Outputs, pool: SymmetricPool, like: Tensor) -> dict[str, Any]:
    """Tensors to write, on the device of `like`, with undefined content; None if absent."""
    symmetric, plain = outputs
    made = dict(zip(symmetric, pool.tensors(symmetric.values()))) if symmetric else {}
    for name, output in plain.items():
        made[name] = None if output is None else _plain(name, output, like)
    return made


def traced(outputs: Outputs, like: Tensor, ordered: bool = True) -> tuple[Tensor | None, ...]:
    """The results of the operator where only shapes and dtypes are known.

    Args:
        like: the order, or another tensor of the device.
        ordered: whether the order is among the results.
    """
    results = [
        None if output is None else _plain(name, output, like)
        for parts in outputs
        for name, output in parts.items()
    ]
    return (*results, torch.empty_like(like)) if ordered else tuple(results)


def _plain(name: str, output: tuple[tuple[int, ...], torch.dtype], like: Tensor) -> Tensor:
    shape, dtype = output
    if name == "link":  # one zero that stands for all elements
        return like.new_zeros(1, dtype=dtype).expand(shape)
    return like.new_empty(shape, dtype=dtype)


def prepare(ep: EpGroup) -> Outputs:
    """`info` has the counts: see PlanParts.

    Offsets have memory of their own: for GPUs torch 2.11 compiles ``bucketize`` and
    ``searchsorted`` so that boundaries are read from where their memory begins.
    """
    plain: _Parts = {
        "plan": ((ep.plan_bytes,), torch.uint8),
        "info": ((ep.plan_parts.num_elements,), _INT32),
        "offsets": ((ep.num_local_experts + 1,), _INT32),
    }
    return {}, plain


def routing_layout(ep: EpGroup, num_tokens: int) -> Outputs:
    """The fields of RoutingLayout."""
    ranks = ep.comm.num_ranks
    plain: _Parts = {
        "rows_per_rank": ((ranks,), _INT32),
        "rows_per_expert": ((ep.num_experts,), _INT32),
        "token_in_rank": ((num_tokens, ranks), torch.bool),
        "bad_ids": ((1,), _INT32),
    }
    return {}, plain


def dispatch(
    ep: EpGroup,
    tokens: Tensor,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    topk: int,
    way: QuantiseWay | None,
) -> Outputs:
    """`link` stands for quantised tokens in autograd: fp8 tensors cannot have wider gradients."""
    rows, columns, rank_major = ep.rows, tokens.shape[1], ep.layout == "rank_major"
    recv_scales = weights = idx = link = None
    if way is not None:
        dtype = _FLOAT32 if way.scale == "float32" else _calls.E8M0
        recv_scales = ((rows, columns // way.block), dtype)
        link = ((rows, columns), tokens.dtype)
    elif scales is not None:
        recv_scales = ((rows, scales.shape[1]), scales.dtype)
    if topk_weights is not None:
        weights = ((rows, topk) if rank_major else (rows,), _FLOAT32)
    if rank_major:
        idx = ((rows, topk), _INT32)
    received = tokens.dtype if way is None else torch.float8_e4m3fn
    symmetric: _Parts = {
        "recv_tokens": ((rows, columns), received),
        "recv_weights": weights,
        "recv_topk_idx": idx,
        "recv_scales": recv_scales,
    }
    return symmetric, {"link": link}


def dispatch_bwd(
    grad_recv_tokens: Tensor | None, grad_recv_weights: Tensor | None, num_tokens: int, topk: int
) -> Outputs:
    """The gradients that those given lead to."""
    rows, weights = grad_recv_tokens, grad_recv_weights
    plain: _Parts = {
        "grad_tokens": None if rows is None else ((num_tokens, rows.shape[1]), rows.dtype),
        "grad_topk_weights": None if weights is None else ((num_tokens, topk), weights.dtype),
    }
    return {}, plain


def moe_forward(ep: EpGroup, tokens: Tensor, topk_weights: Tensor | None, w_out: Tensor) -> Outputs:
    """Rows on their way through the experts, which the backward pass needs, and ``[T, H]``."""
    rows, (num_tokens, columns), dtype = ep.rows, tokens.shape, tokens.dtype
    ffn = w_out.shape[1]
    symmetric: _Parts = {
        "recv_tokens": ((rows, columns), dtype),
        "recv_weights": None if topk_weights is None else ((rows,), _FLOAT32),
        "expert_out": ((rows, columns), dtype),
    }
    plain: _Parts = {
        "inner": ((rows, 2 * ffn), dtype),
        "activated": ((rows, ffn), dtype),
        "out": ((num_tokens, columns), dtype),
    }
    return symmetric, plain


def moe_backward(
    grad_out: Tensor, w_in: Tensor | None, w_out: Tensor | None, choices: tuple[int, int] | None
) -> Outputs:
    """The gradients of tokens, of ``choices`` weights, and of matrices; None = not wanted."""

    def like(matrices: Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
        return None if matrices is None else (tuple(matrices.shape), matrices.dtype)

    plain: _Parts = {
        "grad_tokens": (tuple(grad_out.shape), grad_out.dtype),
        "grad_topk_weights": None if choices is None else (choices, _FLOAT32),
        "grad_w_in": like(w_in),
        "grad_w_out": like(w_out),
    }
    return {}, plain


def moe_way(ep: EpGroup, like: Tensor, ffn: int, weighted: bool) -> Outputs:
    """Gradients of rows on their way back, which nobody needs afterwards."""
    rows, columns, dtype = ep.rows, like.shape[1], like.dtype
    symmetric: _Parts = {
        "grad_expert_out": ((rows, columns), dtype),
        "grad_recv_weights": ((rows,), _FLOAT32) if weighted else None,
        "grad_recv_tokens": ((rows, columns), dtype),
    }
    plain: _Parts = {
        "grad_activated": ((rows, ffn), dtype),
        "grad_inner": ((rows, 2 * ffn), dtype),
    }
    return symmetric, plain


def combine(expert_out: Tensor, num_tokens: int) -> Outputs:
    """``[T, H]``."""
    return {}, {"out": ((num_tokens, expert_out.shape[1]), expert_out.dtype)}


def combine_bwd(
    grad_out: Tensor, expert_out: Tensor | None, weights: Tensor | None, rows: int
) -> Outputs:
    """The gradient of weights needs both `expert_out` and `weights`."""
    grad_weights = None
    if expert_out is not None and weights is not None:
        grad_weights = (tuple(weights.shape), _FLOAT32)
    symmetric: _Parts = {
        "grad_expert_out": ((rows, grad_out.shape[1]), grad_out.dtype),
        "grad_weights": grad_weights,
    }
    return symmetric, {}
