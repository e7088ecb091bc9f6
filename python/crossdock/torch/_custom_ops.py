"""The operations as torch operators, with shapes for tracing and derivatives.

They are functional, so that compilers may handle them like any other: each takes the group as an
integer, and takes and returns a small tensor `order`. Order tensors make the operations of one plan
a chain of data dependencies, and their gradients a chain in the other direction; nothing reads their
values. Outputs that were not asked for are tensors without elements.

Receive tensors come from the symmetric pool, others from torch's allocator, on the current stream.
Arguments are checked where an operation runs, so also inside compiled graphs: what the library
cannot see in an address, a shape and a dtype is checked here, the rest by the library.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from . import _calls
from ._group import EpGroup, group_of

__all__: list[str] = []

_FLOAT32 = torch.float32
_DIFFERENTIABLE = (torch.bfloat16, torch.float16, torch.float32)


def _next(order: Tensor) -> Tensor:
    """A new order tensor. Anomaly detection, which looks for NaN, is the only one that reads it."""
    return torch.zeros_like(order) if torch.is_anomaly_enabled() else torch.empty_like(order)


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _given(output: Optional[Tensor], like: Tensor) -> Tensor:
    """An optional output as operators return it."""
    return _absent(like) if output is None else output


def _usable(grad: Optional[Tensor]) -> Optional[Tensor]:
    """A gradient as the library takes it: autograd gives any strides and alignment."""
    if grad is None or (grad.is_contiguous() and grad.data_ptr() % 16 == 0):
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def _check(group: EpGroup, operation: int, **tensors: tuple[Optional[Tensor], int]) -> None:
    """Refuses tensors on another device, not contiguous, of foreign dtypes or dimensions.

    Args:
        tensors: by argument (tensor, number of dimensions).
    """
    for name, (tensor, dimensions) in tensors.items():
        if tensor is None:
            continue
        if tensor.device != group.comm.device:
            kind = ValueError
            problem = f"expected a tensor on {group.comm.device}, got one on {tensor.device}"
        elif tensor.dtype not in _calls.DTYPE_CODES:
            kind = TypeError
            problem = f"expected a dtype that the library moves, got {tensor.dtype}"
        elif tensor.dim() != dimensions:
            kind = ValueError
            problem = f"expected {dimensions} dimensions, got shape {tuple(tensor.shape)}"
        elif not tensor.is_contiguous():
            kind = ValueError
            problem = (
                f"expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )
        else:
            continue
        group.refuse(operation, kind, f"{name}: {problem}")


def _check_tokens(group: EpGroup, operation: int, name: str, rows: Tensor, expected: int) -> None:
    if rows.shape[0] != expected:
        problem = f"expected the plan's {expected} tokens, got shape {tuple(rows.shape)}"
        group.refuse(operation, ValueError, f"{name}: {problem}")


# ---- prepare ------------------------------------------------------------------------------------


@torch.library.custom_op("crossdock::prepare", mutates_args=())
def _prepare(topk_idx: Tensor, order: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """-> plan, counts (see PlanParts), order."""
    ep = group_of(group)
    _check(ep, _calls.PREPARE, topk_idx=(topk_idx, 2))
    parts = ep.plan_parts
    plan = topk_idx.new_empty(ep.plan_bytes, dtype=torch.uint8)
    info = topk_idx.new_zeros(parts.num_elements, dtype=torch.int32)
    _calls.prepare(
        ep.core,
        topk_idx,
        plan,
        info[parts.counts],
        info[parts.padded_counts],
        info[parts.offsets],
        info[parts.total],
        info[parts.rank_rows].view(parts.num_ranks, parts.num_ranks),
    )
    return plan, info, _next(order)


@_prepare.register_fake
def _(topk_idx, order, group):
    ep = group_of(group)
    return (
        topk_idx.new_empty(ep.plan_bytes, dtype=torch.uint8),
        topk_idx.new_empty(ep.plan_parts.num_elements, dtype=torch.int32),
        torch.empty_like(order),
    )


def _prepare_backward(ctx, grad_plan, grad_info, grad_order):
    return None, grad_order.clone(), None


_prepare.register_autograd(_prepare_backward)


# ---- dispatch -----------------------------------------------------------------------------------


@torch.library.custom_op("crossdock::dispatch", mutates_args=())
def _dispatch(
    plan: Tensor,
    x: Tensor,
    topk_weights: Optional[Tensor],
    scales: Optional[Tensor],
    order: Tensor,
    group: int,
    num_tokens: int,
    topk: int,
    quantize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> tokens, weights, topk_idx, scales, link, order.

    `link` stands for quantised tokens in autograd: fp8 tensors cannot have wider gradients.
    """
    ep = group_of(group)
    operation = _calls.DISPATCH
    _check(ep, operation, x=(x, 2), topk_weights=(topk_weights, 2), scales=(scales, 2))
    _check_tokens(ep, operation, "x", x, num_tokens)
    pool, rows = ep.comm.pool, ep.rows
    rank_major = ep.layout == "rank_major"
    dtype = torch.float8_e4m3fn if quantize else x.dtype
    tokens = pool.empty((rows, x.shape[1]), dtype)
    weights = idx = recv_scales = link = None
    if topk_weights is not None:
        weights = pool.empty((rows, topk) if rank_major else (rows,), _FLOAT32)
    if rank_major:
        idx = pool.empty((rows, topk), torch.int32)
    if quantize:
        recv_scales = pool.empty((rows, x.shape[1] // 128), _FLOAT32)
        link = _link(x, rows)
    elif scales is not None:
        recv_scales = pool.empty((rows, scales.shape[1]), scales.dtype)
    _calls.dispatch(
        ep.core,
        plan,
        x,
        tokens,
        scales=scales,
        topk_weights=topk_weights,
        recv_scales=recv_scales,
        recv_weights=weights,
        recv_topk_idx=idx,
    )
    optional = (_given(output, x) for output in (weights, idx, recv_scales, link))
    return (tokens, *optional, _next(order))


def _link(x: Tensor, rows: int) -> Tensor:
    """As many elements as the received rows have, in the memory of one."""
    return x.new_zeros(1).expand(rows, x.shape[1])


@_dispatch.register_fake
def _(plan, x, topk_weights, scales, order, group, num_tokens, topk, quantize):
    ep = group_of(group)
    rank_major = ep.layout == "rank_major"
    rows, columns = ep.rows, x.shape[1]
    weights, idx, recv_scales, link = (_absent(x) for _ in range(4))
    if topk_weights is not None:
        weights = x.new_empty((rows, topk) if rank_major else (rows,), dtype=_FLOAT32)
    if rank_major:
        idx = x.new_empty((rows, topk), dtype=torch.int32)
    if quantize:
        recv_scales = x.new_empty((rows, columns // 128), dtype=_FLOAT32)
        link = _link(x, rows)
    elif scales is not None:
        recv_scales = scales.new_empty((rows, scales.shape[1]))
    tokens = x.new_empty((rows, columns), dtype=torch.float8_e4m3fn if quantize else x.dtype)
    return tokens, weights, idx, recv_scales, link, torch.empty_like(order)


def _dispatch_context(ctx, inputs, output) -> None:
    plan, x, topk_weights, _, _, group, ctx.num_tokens, ctx.topk, ctx.quantize = inputs
    tokens, weights, idx, recv_scales, link, _ = output
    ctx.ep = group_of(group)  # keeps it until the backward pass
    ctx.save_for_backward(plan)
    # Rows that have a derivative arrive as themselves, or as the link.
    plain = x.dtype in _DIFFERENTIABLE and not ctx.quantize
    fixed = [idx, recv_scales]
    fixed += [] if plain else [tokens]
    fixed += [link] if not ctx.quantize else []
    fixed += [weights] if topk_weights is None else []
    ctx.mark_non_differentiable(*fixed)


def _dispatch_backward(ctx, grad_tokens, grad_weights, grad_idx, grad_scales, grad_link, grad_order):
    (plan,) = ctx.saved_tensors
    _, x_needs, weights_need, *_ = ctx.needs_input_grad
    if not (x_needs or weights_need):
        return None, None, None, None, grad_order.clone(), None, None, None, None
    grad_rows = grad_link if ctx.quantize else grad_tokens
    grad_x, grad_topk_weights, order = torch.ops.crossdock.dispatch_bwd.default(
        plan,
        grad_rows if x_needs else None,
        grad_weights if weights_need else None,
        grad_order,
        ctx.ep.handle,
        ctx.num_tokens,
        ctx.topk,
    )
    grad_x = grad_x if x_needs else None
    grad_topk_weights = grad_topk_weights if weights_need else None
    return None, grad_x, grad_topk_weights, None, order, None, None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_context)


@torch.library.custom_op("crossdock::dispatch_bwd", mutates_args=())
def _dispatch_bwd(
    plan: Tensor,
    grad_recv_tokens: Optional[Tensor],
    grad_recv_weights: Optional[Tensor],
    order: Tensor,
    group: int,
    num_tokens: int,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> grad_tokens, grad_topk_weights, order."""
    ep = group_of(group)
    grad_tokens = grad_topk_weights = None
    if grad_recv_tokens is not None:
        grad_tokens = grad_recv_tokens.new_empty(num_tokens, grad_recv_tokens.shape[1])
    if grad_recv_weights is not None:
        grad_topk_weights = grad_recv_weights.new_empty(num_tokens, topk)
    _calls.dispatch_bwd(
        ep.core,
        plan,
        grad_recv_tokens=_usable(grad_recv_tokens),
        grad_recv_weights=_usable(grad_recv_weights),
        grad_tokens=grad_tokens,
        grad_topk_weights=grad_topk_weights,
    )
    return _given(grad_tokens, order), _given(grad_topk_weights, order), _next(order)


@_dispatch_bwd.register_fake
def _(plan, grad_recv_tokens, grad_recv_weights, order, group, num_tokens, topk):
    grad_tokens = grad_topk_weights = None
    if grad_recv_tokens is not None:
        grad_tokens = grad_recv_tokens.new_empty(num_tokens, grad_recv_tokens.shape[1])
    if grad_recv_weights is not None:
        grad_topk_weights = grad_recv_weights.new_empty(num_tokens, topk)
    return _given(grad_tokens, order), _given(grad_topk_weights, order), torch.empty_like(order)


# ---- combine ------------------------------------------------------------------------------------


@torch.library.custom_op("crossdock::combine", mutates_args=())
def _combine(
    plan: Tensor,
    expert_out: Tensor,
    weights: Optional[Tensor],
    order: Tensor,
    group: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """-> out, order."""
    ep = group_of(group)
    dimensions = 2 if ep.layout == "rank_major" else 1  # the library refuses those of rank_major
    _check(ep, _calls.COMBINE, expert_out=(expert_out, 2), weights=(weights, dimensions))
    out = expert_out.new_empty(num_tokens, expert_out.shape[1])
    _calls.combine(ep.core, plan, expert_out, out, weights=weights)
    return out, _next(order)


@_combine.register_fake
def _(plan, expert_out, weights, order, group, num_tokens):
    return expert_out.new_empty(num_tokens, expert_out.shape[1]), torch.empty_like(order)


def _combine_context(ctx, inputs, output) -> None:
    plan, expert_out, weights, _, group, _ = inputs
    ctx.ep = group_of(group)
    ctx.rows = expert_out.shape[0]
    weights_need = weights is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(plan, expert_out if weights_need else None, weights)


def _combine_backward(ctx, grad_out, grad_order):
    plan, expert_out, weights = ctx.saved_tensors
    _, out_needs, weights_need, *_ = ctx.needs_input_grad
    if not (out_needs or weights_need):
        return None, None, None, grad_order.clone(), None, None
    grad_expert_out, grad_weights, order = torch.ops.crossdock.combine_bwd.default(
        plan, grad_out, expert_out, weights, grad_order, ctx.ep.handle, ctx.rows
    )
    return None, grad_expert_out, grad_weights if weights_need else None, order, None, None


_combine.register_autograd(_combine_backward, setup_context=_combine_context)


@torch.library.custom_op("crossdock::combine_bwd", mutates_args=())
def _combine_bwd(
    plan: Tensor,
    grad_out: Tensor,
    expert_out: Optional[Tensor],
    weights: Optional[Tensor],
    order: Tensor,
    group: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> grad_expert_out, grad_weights (given expert_out), order."""
    ep = group_of(group)
    grad_expert_out = ep.comm.pool.empty((rows, grad_out.shape[1]), grad_out.dtype)
    grad_weights = None if expert_out is None else ep.comm.pool.empty((rows,), _FLOAT32)
    _calls.combine_bwd(
        ep.core,
        plan,
        _usable(grad_out),
        grad_expert_out,
        expert_out=expert_out,
        weights=weights,
        grad_weights=grad_weights,
    )
    return grad_expert_out, _given(grad_weights, order), _next(order)


@_combine_bwd.register_fake
def _(plan, grad_out, expert_out, weights, order, group, rows):
    grad_weights = None if expert_out is None else expert_out.new_empty(rows, dtype=_FLOAT32)
    return (
        grad_out.new_empty(rows, grad_out.shape[1]),
        _given(grad_weights, order),
        torch.empty_like(order),
    )
