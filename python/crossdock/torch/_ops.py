"""dispatch and combine for users: optional outputs as None, the chain of orders in the plan."""

from __future__ import annotations

from typing import NamedTuple

import torch

from crossdock._core import constants
from crossdock._quantise import QuantiseWay, quantise_way
from crossdock._wire import Wire, wire_of_rows

from ._calls import is_capturing
from ._derivatives import call, requires_grad
from ._direct import FUNCTIONS, shown, unobserved
from ._group import EpGroup, Plan
from ._parts import Portion

__all__ = [
    "Dispatched",
    "combine",
    "dequantise",
    "dispatch",
    "incoming_order",
    "leave_order",
    "require_plan",
]

_DISPATCH = torch.ops.crossdock.dispatch.default
_COMBINE = torch.ops.crossdock.combine.default


class Dispatched(NamedTuple):
    """The rows that a rank receives: R = ``EpGroup.rows``, or as many as are real with ``exact``.

    Attributes:
        tokens: ``[R, H]`` in the dtype of those sent, or float8_e4m3fn when quantised.
        weights: float32 ``[R]`` (expert_major) or ``[R, K]`` (rank_major); None unless given.
        topk_idx: ``[R, K]`` int32 local expert of each choice, else -1; None in expert_major.
        scales: ``[R, S]`` beside the tokens; None without scales.
        link: what `dequantise` needs to send gradients back; None unless quantised.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None
    topk_idx: torch.Tensor | None
    scales: torch.Tensor | None
    link: torch.Tensor | None = None


def dispatch(
    plan: Plan,
    tokens: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    quantise: bool | str = False,
    exact: bool = False,
    part: int = 0,
    num_sms: int = 0,
    out: Dispatched | None = None,
) -> Dispatched:
    """Copies every token's row to the ranks that hold its experts. Collective.

    Differentiable in tokens (bfloat16, float16, float32) and topk_weights. Every rank of the group
    calls this, and its backward pass, also with T = 0: give a tensor that requires grad where the
    other ranks do. Rows past the last real one are zero in groups with ``zero_tail``.

    Args:
        plan: from `EpGroup.prepare`.
        tokens: ``[T, H]``, contiguous; bfloat16, float16, float32, fp8, 8-bit integers or
            float4_e2m1fn_x2. A row has a multiple of 16 bytes.
        topk_weights: ``[T, K]`` float32, contiguous.
        scales: ``[T, S]`` float32, float8_e8m0fnu, float8_e4m3fn or uint8 that travels beside the
            rows, as for fp8 tokens; of any strides. Neither gets a gradient then unless tokens are
            of a wider type.
        quantise: send bfloat16 rows as float8_e4m3fn with scales, H a multiple of what shares one.
            "fp8_block128" (or True): a float32 per 128 columns; "fp8_block128_pow2": these are
            powers of two; "fp8_block128_e8m0": as float8_e8m0fnu; "mxfp8": likewise, per 32
            columns. `dequantise` gives the rows back; their gradient reaches tokens as it is, in
            bfloat16 (straight-through).
        exact: trim the results to the rows that this batch has, after waiting for the device. Not
            under ``torch.compile`` or in CUDA graphs, nor in parts.
        part: 0 = the whole operation; p = its p-th part, for a plan that was prepared with
            ``parts``: when it has ended, the rows of the experts of parts up to p are there. Call
            parts 1 to P in order, later ones with ``out=`` what the first has returned. Calls with
            `part`, `num_sms` or `out` have no derivative, and are not for ``torch.compile`` and
            whatever else of torch looks at operators (docs/torch_rules.md).
        num_sms: CUDA: multiprocessors of this call, at most the group's; 0 = as the group.
        out: the results to write into, not trimmed. A backward pass that still needs what they
            held raises RuntimeError.

    Raises:
        TypeError, ValueError: a bad argument; no row has moved, and the peers get Mismatch.
        Mismatch: the ranks' arguments disagree, or another rank's are bad.
        CapacityOverflow: the plan needs more rows than some rank's capacity.
        CrossdockError: the others of ``crossdock.errors``. On CUDA, all but bad arguments are
            raised by `EpGroup.check` or by a later call.
    """
    group = require_plan(plan)
    if not (group.has(tokens) and group.has_or_none(topk_weights) and group.has_or_none(scales)):
        named = {"tokens": tokens, "topk_weights": topk_weights, "scales": scales}
        group.require_tensors(constants.DISPATCH, **named)
    way = None if quantise is False else _quantise_way(group, quantise)
    if exact:
        _require_host(plan)
    order = incoming_order(plan, tokens, topk_weights)
    recorded = requires_grad((tokens, topk_weights, order))
    given = (plan.data, tokens, topk_weights, scales)
    routing = (group.handle, plan.num_tokens, plan.topk, 0 if way is None else way.code)
    if portion := Portion(part, num_sms, out):
        if exact:
            problem = "exact: expected False beside part, num_sms or out; got True"
            group.refuse(constants.DISPATCH, ValueError, problem)
        named = {"tokens": tokens, "topk_weights": topk_weights, "scales": scales}
        portion.check(group, constants.DISPATCH, recorded, plan=plan.data, **named)
        with shown("crossdock::dispatch"):
            *made, _ = FUNCTIONS["dispatch"](*given, None, *routing, portion)
        portion.tell_graphs()
        return Dispatched(*made)
    if not recorded and unobserved(*given):
        *made, _ = FUNCTIONS["dispatch"](*given, None, *routing)
        plan.order = order.detach() if order.requires_grad else order
    else:
        *made, order = call(_DISPATCH, recorded, *given, order, *routing)
        leave_order(plan, order)
    received = Dispatched(*made)
    return _trimmed(received, plan) if exact else received


def combine(
    plan: Plan,
    expert_out: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    wire: Wire = "same",
    part: int = 0,
    num_sms: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Brings the experts' results back and sums them per token. Collective.

    Differentiable in expert_out and weights. Sums are in float32 in a fixed order: equal inputs
    give equal bits.

    Args:
        plan: from `EpGroup.prepare`.
        expert_out: ``[R, H]`` bfloat16, float16 or float32, contiguous: a result for each row that
            `dispatch` gave. In symmetric memory (`empty_symmetric`) it is read in place.
        weights: float32 ``[R]``, usually ``Dispatched.weights``: the sum is weighted. expert_major
            only: in rank_major a row stands for several experts, whose results are summed already.
        wire: the form in which each rank's sum of a token's rows crosses, one of the group's
            ``wire_formats``: ``"same"``: rounded to the dtype of expert_out; ``"float32"``: not
            rounded; ``"fp8"``, which is ``"fp8_block128"``, ``"fp8_block128_pow2"`` or
            ``"fp8_block128_e8m0"``: as float8_e4m3fn with a scale per 128 columns, H a multiple of
            them. ``crossdock/quantise.h`` (xd_ep_wire) defines every bit. The gradient is
            straight-through: that of the sum in the rows' own dtype, as with "same", and its rows
            are not quantised.
        part: 0 = the whole operation; p = its p-th part, as in `dispatch`: it reads the rows of the
            experts of parts up to p, and the last part writes the result. Between parts 1 and P the
            group runs nothing but prepare.
        num_sms: as in `dispatch`.
        out: the result to write.

    Returns:
        ``[T, H]``, dtype of expert_out; zero for a token without rows.

    Raises:
        As `dispatch`.
    """
    group = require_plan(plan)
    if not (group.has(expert_out) and group.has_or_none(weights)):
        group.require_tensors(constants.COMBINE, expert_out=expert_out, weights=weights)
    order = plan.order
    recorded = requires_grad((expert_out, weights, order))
    given = (plan.data, expert_out, weights)
    try:
        number = wire_of_rows(wire, group.wire_formats, expert_out.shape, "group")
    except ValueError as error:
        group.refuse(constants.COMBINE, ValueError, str(error))
    routing = (group.handle, plan.num_tokens, number)
    if portion := Portion(part, num_sms, None if out is None else (out,)):
        named = {"expert_out": expert_out, "weights": weights}
        portion.check(group, constants.COMBINE, recorded, plan=plan.data, **named)
        with shown("crossdock::combine"):
            out, _ = FUNCTIONS["combine"](*given, None, *routing, portion)
        portion.tell_graphs()
        return out
    if not recorded and unobserved(*given):
        out, _ = FUNCTIONS["combine"](*given, None, *routing)
        plan.order = order.detach() if order.requires_grad else order
    else:
        out, order = call(_COMBINE, recorded, *given, order, *routing)
        leave_order(plan, order)
    return out


def dequantise(received: Dispatched, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``[R, H]`` rows of quantised tokens: element times the scale of its block of columns.

    Differentiable: the gradient goes to dispatch's tokens unchanged, but for rounding to bfloat16.

    Raises:
        ValueError: the tokens were not quantised by `dispatch`.
    """
    if received.link is None or received.scales is None:
        raise ValueError("received: expected what dispatch(..., quantise=True) returned")
    tokens, scales = received.tokens, received.scales
    factors = scales.to(torch.float32)[:, :, None]
    blocks = tokens.to(torch.float32).view(*scales.shape, -1) * factors
    return _StraightThrough.apply(blocks.view(tokens.shape).to(dtype), received.link)


def require_plan(plan: Plan) -> EpGroup:
    """The group of an operation. Without one no peer can be told of the mistake."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    return plan.group


def _quantise_way(group: EpGroup, quantise: bool | str) -> QuantiseWay | None:
    """As `quantise_way`, with a failure that the peers hear of."""
    try:
        return quantise_way(quantise)
    except (TypeError, ValueError) as error:
        return group.refuse(constants.DISPATCH, type(error), str(error))


class _StraightThrough(torch.autograd.Function):
    """Passes rows on, and their gradient to the link.

    No other input gets a gradient: torch 2.11 compiles a function with 8-bit inputs to one without.
    """

    @staticmethod
    def forward(ctx, rows, link):
        ctx.link_dtype = link.dtype
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        return None, grad.to(ctx.link_dtype)


def incoming_order(plan: Plan, *given: torch.Tensor | None) -> torch.Tensor:
    """The plan's order; for a rank without tokens, an order that requires a gradient.

    Results without elements are constants to a compiler, which would leave out what computes them:
    also operations that the peers wait for. A gradient for a leaf is a result that it must compute.
    """
    wants_grad = any(one is not None and one.requires_grad for one in given)
    if plan.num_tokens == 0 and wants_grad and not plan.order.requires_grad:
        return plan.group.order_leaf
    return plan.order


def leave_order(plan: Plan, order: torch.Tensor) -> None:
    """Makes `order` the plan's, and for a rank without tokens a result that compilers must keep."""
    plan.order = order
    if plan.num_tokens == 0 and torch.compiler.is_compiling():
        plan.group.anchor = plan.group.anchor + order.detach()


def _require_host(plan: Plan) -> None:
    """Refuses ``exact`` where the host cannot read the number of rows."""
    group = plan.group
    if torch.compiler.is_compiling():
        raise ValueError("exact: expected False under torch.compile, which has static shapes only")
    if is_capturing(group.comm.device):
        problem = "exact: expected False in a CUDA graph, whose shapes are static; got True"
        group.refuse(constants.DISPATCH, ValueError, problem)


def _trimmed(received: Dispatched, plan: Plan) -> Dispatched:
    rows = min(int(plan.total), plan.group.rows)
    if plan.data.is_cuda:  # prepare may have failed without raising: the number is wrong then
        plan.group.check()
    tokens, *beside = received
    return Dispatched(tokens[:rows], *(None if part is None else part[:rows] for part in beside))
