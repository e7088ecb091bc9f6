"""The routed experts of a layer in one call, whose transfers and products may run side by side."""

from __future__ import annotations

import functools
from typing import Any

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock._overlap import Overlap, OverlapOption, check_overlap, schedule_of, sms_of

from .._autocast import autocast
from .._derivatives import call, requires_grad
from .._direct import FUNCTIONS, unobserved
from .._group import EpGroup, Plan
from .._ops import incoming_order, leave_order, require_plan
from .._sharding import local_tensor
from ..gated import FUSED
from . import _ops  # noqa: F401, defines the operators

__all__ = ["moe", "resolve"]

_FORWARD = torch.ops.crossdock.moe_forward.default
_ROW_ALIGNMENT = constants.ROW_ALIGNMENT


def resolve(overlap: OverlapOption, group: EpGroup, topk: int, ffn: int) -> Overlap | None:
    """The schedule of a layer, the same on all ranks; None = serial.

    Args:
        overlap: as of `schedule_of`; "auto" = as ``xd_moe_schedule`` chooses for full batches.
        group: the layer's.
        topk: K.
        ffn: F.

    Raises:
        TypeError: another type.
        ValueError: more parts than a rank has experts, or rows that the products do not take.
    """
    check_overlap(overlap)
    if overlap is not False and ffn * group.dtype.itemsize % _ROW_ALIGNMENT:
        raise ValueError(
            f"ffn: expected rows of a multiple of {_ROW_ALIGNMENT} bytes beside overlap, got "
            f"{ffn} elements of {group.dtype}"
        )
    automatic = functools.partial(_automatic, group, topk, ffn)
    return schedule_of(overlap, _fewest_experts(group), group.config["num_sms"], automatic)


def _automatic(group: EpGroup, topk: int, ffn: int) -> dict[str, Any]:
    """The choice of the library, which goes by the sizes alone."""
    sizes = group.config | {
        "num_ranks": group.comm.num_ranks,
        "max_topk": topk,
        "device_type": group.comm.core.device_type,
    }
    return _core.moe_schedule(ffn, 0, **sizes)


def _fewest_experts(group: EpGroup) -> int:
    ranks = group.comm.num_ranks
    if group.expert_ranks is None:
        return group.num_experts // ranks
    return min(group.expert_ranks.count(rank) for rank in range(ranks))


def moe(
    plan: Plan,
    tokens: torch.Tensor,
    topk_weights: torch.Tensor | None,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    *,
    activation: str = "silu",
    overlap: OverlapOption = False,
) -> torch.Tensor:
    """dispatch, the experts ``act(gate) * up @ w_out`` and combine as one operator. Collective.

    ``[gate, up] = x @ w_in``. Differentiable once in tokens, topk_weights, w_in and w_out; works
    under ``torch.compile``, which sees one node. Every rank calls it, and its backward pass, also
    with T = 0. The bits are those of `dispatch`, ``xd_grouped_product``, ``xd_gated`` and `combine`
    with any `overlap`; on the CPU these are the ones of `grouped_mm`.

    Args:
        plan: from `EpGroup.prepare` of an expert_major group, with ``parts`` for overlap.
        tokens: ``[T, H]``, contiguous; bfloat16, float16 or float32 (not on GPUs). Under
            ``torch.autocast`` they and the matrices are cast to its dtype.
        topk_weights: ``[T, K]`` float32, factors of the experts' results; None = 1.
        w_in: ``[L, H, 2F]``, dtype of tokens; any strides. Of a DTensor, this rank's slices.
        w_out: ``[L, F, H]``, likewise. A row of F elements has a multiple of 16 bytes.
        activation: "silu", "gelu_tanh", "relu" or "relu2".
        overlap: as of `MoELayer`, but the plan says how many parts there are: False = one after
            another; True = in the plan's parts, on GPUs with transfers beside products; "auto" = so
            where ``xd_moe_schedule`` predicts for full batches that parts pay, else one after
            another; or an `Overlap` of as many parts as the plan has. With True and "auto" the plan
            has 2 or more, unless some rank has no second expert.

    Returns:
        ``[T, H]``, dtype of tokens; zero for a token without rows.

    Raises:
        TypeError, ValueError: a bad argument; no row has moved, and the peers get Mismatch.
        CrossdockError: as `dispatch` and `combine`. If a rank fails in between, the peers get
            Mismatch in the operation that comes next.
    """
    group = require_plan(plan)
    operations = _ops.forward_operations(plan.parts if overlap else 0)
    w_in, w_out = local_tensor(w_in), local_tensor(w_out)
    for name, value in (("tokens", tokens), ("w_in", w_in), ("w_out", w_out)):
        if not group.has(value):
            group.require_tensors(operations, **{name: value})
    if not group.has_or_none(topk_weights):
        group.require_tensors(operations, tokens=tokens, topk_weights=topk_weights)
    tokens, w_in = autocast(tokens, w_in)
    tokens, w_out = autocast(tokens, w_out)
    given = {"tokens": tokens, "topk_weights": topk_weights, "w_in": w_in, "w_out": w_out}
    if activation not in FUSED:
        problem = f"activation: expected one of {sorted(FUSED)}, got {activation!r}"
        group.refuse(operations, ValueError, problem)
    try:
        parts, sms = _schedule(plan, overlap, w_out)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        group.refuse(operations, kind, str(error))
    order = incoming_order(plan, *given.values())
    recorded = requires_grad((*given.values(), order))
    tensors = (plan.offsets, *given.values())
    args = (plan.data, *tensors)
    schedule = (group.handle, FUSED[activation], parts, sms)
    if not recorded and unobserved(plan.data, *tensors):
        *_, out, _ = FUNCTIONS["moe_forward"](*args, None, *schedule)
        plan.order = order.detach() if order.requires_grad else order
        return out
    *_, out, order = call(_FORWARD, recorded, *args, order, *schedule)
    leave_order(plan, order)
    return out


def _schedule(plan: Plan, overlap: OverlapOption, w_out: torch.Tensor) -> tuple[int, int]:
    """`parts` and `num_sms` of the C call.

    Raises:
        TypeError, ValueError: a bad option.
    """
    if overlap is False:
        return 0, 0
    check_overlap(overlap)
    group, parts = plan.group, plan.parts
    if isinstance(overlap, Overlap):
        if overlap.parts != parts:
            raise ValueError(f"overlap: expected the plan's parts = {parts}, got {overlap}")
        return parts, sms_of(overlap.sms, group.config["num_sms"])
    if parts == 1 and _fewest_experts(group) > 1:
        raise ValueError(
            "overlap: expected False or Overlap(1) with a plan of one part, as prepare makes it "
            f"without parts=, got {overlap!r}"
        )
    if overlap is True:
        return parts, sms_of(None, group.config["num_sms"])
    if w_out.dim() != 3:
        return parts, 0  # the operator refuses it
    chosen = _automatic(group, plan.topk, w_out.shape[1])
    return (parts, chosen["num_sms"]) if chosen["parts"] else (0, 0)
