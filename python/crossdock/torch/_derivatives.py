"""Derivatives of the operators.

Whether an operation runs in the backward pass must be the same on all ranks. It follows from the
inputs that require grad, never from the gradients that happen to arrive: missing ones are zeros.
There are no second derivatives: asking for them raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._custom_ops import LIBRARY
from ._group import group_of
from ._unseen import unseen

__all__ = [
    "below_autograd",
    "call",
    "differentiated",
    "gradients",
    "register",
    "requires_grad",
]

_DIFFERENTIABLE = (torch.bfloat16, torch.float16, torch.float32)

_OPS = torch.ops.crossdock
below_autograd = torch._C._AutoDispatchBelowAutograd


class _Last(torch.autograd.Function):
    """An operator of the backward pass in a graph of its own (``create_graph=True``)."""

    @staticmethod
    def forward(ctx, operator, *args):
        ctx.operator = operator
        return operator(*args)

    @staticmethod
    def backward(ctx, *grads):
        # once_differentiable misses inputs that the forward pass saved, and that require grad.
        raise RuntimeError(
            f"{ctx.operator}: expected first derivatives only, got a second derivative of one of "
            "crossdock.torch's operations (create_graph=True)"
        )


def differentiated(operator: Any, *args: Any) -> Any:
    """Runs an operator of the backward pass."""
    return _Last.apply(operator, *args) if torch.is_grad_enabled() else operator(*args)


def gradients(operator: Any, **of: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of an operator's arguments, by their names in its schema; None for the others."""
    return tuple(of.get(argument.name) for argument in operator._schema.arguments)


class _Prepare(torch.autograd.Function):
    """Integers have no gradient; the order of what comes before and after has to get through."""

    @staticmethod
    def forward(ctx, topk_idx, order, group, alignment, parts=1):
        with below_autograd():
            return _OPS.prepare.default(topk_idx, order, group, alignment, parts)

    @staticmethod
    def backward(ctx, grad_plan, grad_info, grad_offsets, grad_order):
        return gradients(_OPS.prepare.default, order=grad_order.clone())


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, x, topk_weights, scales, order, group, num_tokens, topk, quantise):
        with below_autograd():
            outputs = _OPS.dispatch.default(
                plan, x, topk_weights, scales, order, group, num_tokens, topk, quantise
            )
        tokens, weights, topk_idx, recv_scales, link, _ = outputs
        ctx.group = group_of(group)  # lives until the backward pass
        ctx.num_tokens, ctx.topk, ctx.quantise = num_tokens, topk, quantise
        ctx.save_for_backward(plan)
        plain = x.dtype in _DIFFERENTIABLE and not quantise
        ctx.rows_differentiable = plain or quantise
        fixed = [topk_idx, recv_scales]
        fixed += [] if plain else [tokens]
        fixed += [] if quantise else [link]
        fixed += [weights] if topk_weights is None else []
        ctx.mark_non_differentiable(*(tensor for tensor in fixed if tensor is not None))
        return outputs

    @staticmethod
    def backward(ctx, grad_tokens, grad_weights, grad_idx, grad_scales, grad_link, grad_order):
        (plan,) = ctx.saved_tensors
        _, x_needs, weights_need, *_ = ctx.needs_input_grad
        x_needs = x_needs and ctx.rows_differentiable
        grad_x = grad_topk_weights = None
        if x_needs or weights_need:
            grad_rows = grad_link if ctx.quantise else grad_tokens
            grad_x, grad_topk_weights, order = differentiated(
                _OPS.dispatch_bwd.default,
                plan,
                grad_rows if x_needs else None,
                grad_weights if weights_need else None,
                grad_order,
                ctx.group.handle,
                ctx.num_tokens,
                ctx.topk,
            )
        else:
            order = grad_order.clone()
        return gradients(
            _OPS.dispatch.default,
            tokens=grad_x if x_needs else None,
            topk_weights=grad_topk_weights if weights_need else None,
            order=order,
        )


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, expert_out, weights, order, group, num_tokens, wire=0):
        given = (plan, expert_out, weights, order, group, num_tokens, wire)
        with below_autograd():
            outputs = _OPS.combine.default(*given)
        ctx.group = group_of(group)
        ctx.rows = expert_out.shape[0]
        weights_need = ctx.needs_input_grad[2]
        ctx.save_for_backward(plan, expert_out if weights_need else None, weights)
        return outputs

    @staticmethod
    def backward(ctx, grad_out, grad_order):
        plan, expert_out, weights = ctx.saved_tensors
        _, out_needs, weights_need, *_ = ctx.needs_input_grad
        if not (out_needs or weights_need):
            return gradients(_OPS.combine.default, order=grad_order.clone())
        grad_expert_out, grad_weights, order = differentiated(
            _OPS.combine_bwd.default,
            plan,
            grad_out,
            expert_out,
            weights,
            grad_order,
            ctx.group.handle,
            ctx.rows,
        )
        return gradients(
            _OPS.combine.default,
            expert_out=grad_expert_out,
            weights=grad_weights if weights_need else None,
            order=order,
        )


def register(name: str, function: type[torch.autograd.Function]) -> None:
    """Gives an operator a derivative."""
    operator = getattr(_OPS, name).default

    def differentiable(*args: Any) -> Any:
        if requires_grad(args):
            return function.apply(*args)
        with below_autograd():
            return operator(*args)

    LIBRARY.impl(name, unseen(differentiable), "Autograd")


def requires_grad(given: Iterable[Any]) -> bool:
    """Whether an operator of these arguments is recorded for a backward pass."""
    if torch.is_grad_enabled():
        for one in given:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                return True
    return False


def call(operator: Any, recorded: bool, *args: Any) -> Any:
    """Runs an operator; unless it is recorded, past its derivative, which takes time.

    Args:
        recorded: what `requires_grad` says of the arguments.
    """
    if recorded or torch.compiler.is_compiling():
        return operator(*args)
    with below_autograd():
        return operator(*args)


register("prepare", _Prepare)
register("dispatch", _Dispatch)
register("combine", _Combine)
