"""The routed experts of a layer as one operator with a derivative: ``xd_moe_forward`` and backward.

They return what the derivative needs, as compilers want it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock._core import constants

from .. import _calls, _outputs
from .._calls import SUMMABLE
from .._custom_ops import as_packed, as_rows, check, operator, shapes
from .._derivatives import below_autograd, differentiated, gradients, register
from .._group import group_of
from .._membership import Operations
from ..grouped import packed_matrices

__all__: list[str] = []

_OPS = torch.ops.crossdock


def _matrices(weight: Tensor) -> Tensor | None:
    """As products take them; a rank without experts has none."""
    return packed_matrices(weight) if weight.numel() else None


def _operations(parts: int, *numbers: int) -> Operations:
    return Operations("moe", [number for number in numbers for _ in range(max(parts, 1))])


def forward_operations(parts: int) -> Operations:
    """The group's operations in a forward pass of a schedule."""
    return _operations(parts, constants.DISPATCH, constants.COMBINE)


def _backward_operations(parts: int) -> Operations:
    return _operations(parts, constants.COMBINE_BWD, constants.DISPATCH_BWD)


@operator(
    "moe_forward(Tensor plan, Tensor offsets, Tensor tokens, Tensor? topk_weights, Tensor w_in, "
    "Tensor w_out, Tensor order, int group, int activation, int parts, int num_sms) "
    "-> (Tensor, Tensor?, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *args: forward_operations(args[9]),
)
def _moe_forward(
    plan: Tensor,
    offsets: Tensor,
    tokens: Tensor,
    topk_weights: Tensor | None,
    w_in: Tensor,
    w_out: Tensor,
    order: Tensor | None,
    group: int,
    activation: int,
    parts: int,
    num_sms: int,
) -> tuple[Tensor | None, ...]:
    """-> recv_tokens, recv_weights, expert_out, inner, activated, out, order."""
    ep, operations = group_of(group), forward_operations(parts)
    check(ep, operations, "tokens", tokens, 2, SUMMABLE)
    check(ep, operations, "topk_weights", topk_weights, 2, (torch.float32,))
    for name, weight in (("w_in", w_in), ("w_out", w_out)):
        check(ep, operations, name, weight, 3, (tokens.dtype,), strided=True)
    made = _outputs.make(_outputs.moe_forward(ep, tokens, topk_weights, w_out), ep.comm.pool, plan)
    results = (*made.values(), None if order is None else torch.zeros_like(order))
    made |= {
        "plan": plan,
        "offsets": offsets,
        "tokens": as_rows(tokens),
        "topk_weights": as_packed(topk_weights),
        "w_in": _matrices(w_in),
        "w_out": _matrices(w_out),
    }
    fields = {"activation": activation, "parts": parts, "num_sms": num_sms}
    _calls.run(ep.core, "moe_forward", plan, made, **fields)
    return results


@shapes("moe_forward")
def _moe_forward_shapes(
    plan, offsets, tokens, topk_weights, w_in, w_out, order, group, activation, parts, num_sms
):
    outputs = _outputs.moe_forward(group_of(group), tokens, topk_weights, w_out)
    return _outputs.traced(outputs, order)


@operator(
    "moe_backward(Tensor plan, Tensor offsets, Tensor grad_out, Tensor w_in, Tensor w_out, "
    "Tensor recv_tokens, Tensor? recv_weights, Tensor inner, Tensor activated, "
    "Tensor? expert_out, Tensor order, int group, SymInt topk, bool[] wanted, int activation, "
    "int parts, int num_sms) -> (Tensor, Tensor?, Tensor?, Tensor?, Tensor)",
    lambda *args: _backward_operations(args[15]),
)
def _moe_backward(
    plan: Tensor,
    offsets: Tensor,
    grad_out: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    recv_tokens: Tensor,
    recv_weights: Tensor | None,
    inner: Tensor,
    activated: Tensor,
    expert_out: Tensor | None,
    order: Tensor,
    group: int,
    topk: int,
    wanted: list[bool],
    activation: int,
    parts: int,
    num_sms: int,
) -> tuple[Tensor | None, ...]:
    """-> grad_tokens, grad_topk_weights (given expert_out), grad_w_in, grad_w_out, order.

    `wanted`: which matrices have gradients.
    """
    ep = group_of(group)
    outputs = _backward_outputs(grad_out, w_in, w_out, expert_out, topk, wanted)
    made = _outputs.make(outputs, ep.comm.pool, order)
    results = (*made.values(), torch.zeros_like(order))
    way = _outputs.moe_way(ep, grad_out, w_out.shape[1], expert_out is not None)
    made |= _outputs.make(way, ep.comm.pool, order)
    for name in ("grad_w_in", "grad_w_out"):
        if made[name] is not None and not made[name].numel():
            made[name] = None
    made |= {
        "plan": plan,
        "offsets": offsets,
        "grad_out": as_rows(grad_out),
        "w_in": _matrices(w_in),
        "w_out": _matrices(w_out),
        "recv_tokens": recv_tokens,
        "recv_weights": recv_weights,
        "inner": inner,
        "activated": activated,
        "expert_out": expert_out,
    }
    fields = {"activation": activation, "parts": parts, "num_sms": num_sms}
    _calls.run(ep.core, "moe_backward", plan, made, **fields)
    return results


def _backward_outputs(
    grad_out: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_out: Tensor | None,
    topk: int,
    wanted: list[bool],
) -> _outputs.Outputs:
    choices = None if expert_out is None else (grad_out.shape[0], topk)
    in_wanted, out_wanted = wanted
    matrices = (w_in if in_wanted else None, w_out if out_wanted else None)
    return _outputs.moe_backward(grad_out, *matrices, choices)


@shapes("moe_backward")
def _moe_backward_shapes(
    plan,
    offsets,
    grad_out,
    w_in,
    w_out,
    recv_tokens,
    recv_weights,
    inner,
    activated,
    expert_out,
    order,
    group,
    topk,
    wanted,
    activation,
    parts,
    num_sms,
):
    outputs = _backward_outputs(grad_out, w_in, w_out, expert_out, topk, wanted)
    return _outputs.traced(outputs, order)


class _Moe(torch.autograd.Function):
    """One node: gradients of what it keeps are none, and a missing one is zero."""

    @staticmethod
    def forward(ctx, plan, offsets, tokens, topk_weights, w_in, w_out, order, group, *schedule):
        with below_autograd():
            outputs = _OPS.moe_forward.default(
                plan, offsets, tokens, topk_weights, w_in, w_out, order, group, *schedule
            )
        recv_tokens, recv_weights, expert_out, inner, activated, out, _ = outputs
        ctx.group, ctx.schedule = group_of(group), schedule
        ctx.shape, ctx.topk = tuple(out.shape), 0
        if topk_weights is not None:
            ctx.topk = topk_weights.shape[1]
        weights_need = topk_weights is not None and ctx.needs_input_grad[3]
        kept = (recv_tokens, recv_weights, inner, activated)
        ctx.save_for_backward(
            plan, offsets, w_in, w_out, *kept, expert_out if weights_need else None
        )
        ctx.mark_non_differentiable(*(one for one in (*kept, expert_out) if one is not None))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        *_, grad_out, grad_order = grads
        plan, offsets, w_in, w_out, *kept, expert_out = ctx.saved_tensors
        if grad_order is None:
            grad_order = torch.zeros(1, dtype=torch.float32, device=plan.device)
        _, _, tokens_need, weights_need, in_needs, out_needs, *_ = ctx.needs_input_grad
        if not (tokens_need or weights_need or in_needs or out_needs):
            return gradients(_OPS.moe_forward.default, order=grad_order.clone())
        if grad_out is None:
            grad_out = kept[0].new_zeros(ctx.shape)
        grad_tokens, grad_weights, grad_in, grad_out_matrices, order = differentiated(
            _OPS.moe_backward.default,
            plan,
            offsets,
            grad_out,
            w_in,
            w_out,
            *kept,
            expert_out,
            grad_order,
            ctx.group.handle,
            ctx.topk,
            [in_needs, out_needs],
            *ctx.schedule,
        )
        return gradients(
            _OPS.moe_forward.default,
            tokens=grad_tokens if tokens_need else None,
            topk_weights=grad_weights,
            w_in=grad_in,
            w_out=grad_out_matrices,
            order=order,
        )


register("moe_forward", _Moe)
