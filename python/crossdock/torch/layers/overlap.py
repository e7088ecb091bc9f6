"""The routed experts of a layer in one call, whose transfers and products may run side by side."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from crossdock import _core
from crossdock._core import constants

from .._autocast import autocast
from .._derivatives import call, requires_grad
from .._direct import FUNCTIONS, unobserved
from .._group import EpGroup, Plan
from .._ops import incoming_order, leave_order, require_plan
from .._sharding import local_tensor
from ..gated import FUSED
from . import _ops  # noqa: F401, defines the operators

__all__ = ["Overlap", "OverlapOption", "moe", "resolve"]

_FORWARD = torch.ops.crossdock.moe_forward.default
_ROW_ALIGNMENT = constants.ROW_ALIGNMENT
_DEFAULT_PARTS, _DEFAULT_SMS = 4, 16


@dataclasses.dataclass(frozen=True)
class Overlap:
    """A schedule: how many parts, and the multiprocessors of transfers beside products.

    Attributes:
        parts: P: the experts of every rank are dealt into that many parts, and the products of one
            run while rows of others travel. 1 to 16, at most the fewest experts of a rank; 1: in
            the backward pass alone something runs beside transfers, the gradients of matrices.
        sms: CUDA: multiprocessors of transfers that run beside products, at most the group's; 0 =
            as the group.
    """

    parts: int = _DEFAULT_PARTS
    sms: int = _DEFAULT_SMS

    def __post_init__(self) -> None:
        for name, value, least in (("parts", self.parts, 1), ("sms", self.sms, 0)):
            if type(value) is not int or not least <= value < 1 << 31:
                raise ValueError(f"{name}: expected an int of {least} or more, got {value!r}")


OverlapOption = bool | Literal["auto"] | Overlap


def resolve(overlap: OverlapOption, group: EpGroup, topk: int, ffn: int) -> Overlap | None:
    """The schedule of a layer, the same on all ranks; None = serial.

    Args:
        overlap: True = 4 parts, or as many as the ranks have experts; "auto" = as
            ``xd_moe_schedule`` chooses for full batches.
        group: the layer's.
        topk: K.
        ffn: F.

    Raises:
        TypeError: another type.
        ValueError: more parts than a rank has experts, or rows that the products do not take.
    """
    if overlap is False:
        return None
    if not (overlap is True or overlap == "auto" or isinstance(overlap, Overlap)):
        raise TypeError(f"overlap: expected a bool, 'auto' or an Overlap, got {overlap!r}")
    if ffn * group.dtype.itemsize % _ROW_ALIGNMENT:
        raise ValueError(
            f"ffn: expected rows of a multiple of {_ROW_ALIGNMENT} bytes beside overlap, got "
            f"{ffn} elements of {group.dtype}"
        )
    most = min(constants.MAX_PARTS, _fewest_experts(group))
    if isinstance(overlap, Overlap):
        if overlap.parts > most:
            raise ValueError(
                f"overlap: expected at most {most} parts, the experts of the rank with the "
                f"fewest, got {overlap}"
            )
        return overlap
    sms = min(_DEFAULT_SMS, group.config["num_sms"] or _DEFAULT_SMS)
    if overlap is True:
        return Overlap(max(1, min(_DEFAULT_PARTS, most)), sms)
    return _automatic(group, topk, ffn)


def _automatic(group: EpGroup, topk: int, ffn: int) -> Overlap | None:
    """The schedule that the library chooses by the sizes alone."""
    sizes = group.config | {
        "num_ranks": group.comm.num_ranks,
        "max_topk": topk,
        "device_type": group.comm.core.device_type,
    }
    chosen = _core.moe_schedule(ffn, 0, **sizes)
    return Overlap(chosen["parts"], chosen["num_sms"]) if chosen["parts"] else None


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
    overlap: bool | Overlap = False,
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
        overlap: False = one after another; True = in the plan's parts, on GPUs with transfers
            beside products; or an `Overlap` of as many parts as the plan has.

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
    parts, sms = _schedule(plan, overlap)
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


def _schedule(plan: Plan, overlap: bool | Overlap) -> tuple[int, int]:
    """`parts` and `num_sms` of the C call; a mistake the peers hear of."""
    if overlap is False:
        return 0, 0
    if overlap is True:
        return plan.parts, 0
    problem = ""
    if not isinstance(overlap, Overlap):
        problem = f"overlap: expected a bool or an Overlap, got {overlap!r}"
    elif overlap.parts != plan.parts:
        problem = f"overlap: expected the plan's parts = {plan.parts}, got {overlap}"
    if problem:
        operations = _ops.forward_operations(plan.parts)
        plan.group.refuse(operations, ValueError, problem)
    return overlap.parts, overlap.sms
