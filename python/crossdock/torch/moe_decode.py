"""A layer's few tokens, as in decoding: rows travel by the low-latency operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from crossdock._core import constants

from ._group import EpGroup, Plan, order_after
from ._low_latency import LowLatencyGroup
from ._low_latency_ops import ll_combine, ll_dispatch
from .moe_router import Routing

__all__ = ["DecodePlan", "decode", "decode_group", "refuse_for_decoding"]

# By group, then by tokens and alignment: layers that share a group share these as well.
_groups: weakref.WeakKeyDictionary[EpGroup, dict[tuple[int, int], LowLatencyGroup]]
_groups = weakref.WeakKeyDictionary()


class DecodePlan:
    """A batch of few tokens, as experts are called with it in place of a `Plan`.

    Attributes:
        group: the layer's EpGroup.
        offsets: ``[L + 1]`` int32: first row of each expert's zone, and the end of the last.
    """

    def __init__(self, group: EpGroup, offsets: torch.Tensor, rows: int) -> None:
        self.group = group
        self.offsets = offsets
        self._rows = rows

    def row_experts(self, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """``[R]``: the local expert of each row, padding included; -1 behind the last zone."""
        ends = torch.ops.crossdock.zone_ends.default(self.offsets)
        rows = torch.arange(self._rows, dtype=torch.int32, device=ends.device)
        experts = torch.searchsorted(ends, rows, right=True, out_int32=dtype == torch.int32)
        return experts.masked_fill(experts == self.group.num_local_experts, -1)


def decode_group(group: EpGroup, max_tokens: int, alignment: int) -> LowLatencyGroup:
    """The low-latency group beside an EpGroup; collective where it has to be made first."""
    beside = _groups.setdefault(group, {})
    found = beside.get((max_tokens, alignment))
    if found is None:
        found = beside[max_tokens, alignment] = LowLatencyGroup(
            num_experts=group.num_experts,
            max_topk=group.max_topk,
            max_tokens_per_rank=max_tokens,
            hidden=group.hidden,
            dtype=group.dtype,
            duplicate_ids=group.duplicate_ids,
            on_error=group.on_error,
            receive="by_expert",
            alignment=alignment,
            comm=group.comm,
        )
    return found


def refuse_for_decoding(few: LowLatencyGroup, num_tokens: int) -> None:
    """Refuses a call that records gradients, or has too many tokens; the peers get Mismatch."""
    if torch.is_grad_enabled():
        problem = (
            "decode: expected torch.no_grad() or torch.inference_mode(), as the low-latency "
            "operations have no gradients; got a call that records them"
        )
    elif num_tokens > few.max_tokens_per_rank:
        problem = f"x: expected at most decode_tokens = {few.max_tokens_per_rank}, got {num_tokens}"
    else:
        return
    few.refuse(constants.LL_DISPATCH, ValueError, problem)


def decode(
    few: LowLatencyGroup,
    group: EpGroup,
    rows: torch.Tensor,
    routing: Routing,
    experts: Callable[[torch.Tensor, Any], torch.Tensor],
    after: Plan | torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends rows ``[T, H]`` through their experts and back: the sums, and their order. Collective.

    Rows, zones and sums have the bits of prepare, dispatch and combine.
    """
    order = order_after(few, constants.LL_DISPATCH, after)
    traced = torch.compiler.is_compiling()
    topk_idx = routing.topk_idx
    if traced and order is not None:
        # Data says to a compiler what comes first; in eager mode the calls do.
        topk_idx = topk_idx + order.to(topk_idx.dtype)
    received = ll_dispatch(few, rows, topk_idx)
    tokens, offsets = received.tokens, received.row_offsets
    assert offsets is not None
    if tokens.device.type == "cpu" and not traced:
        tokens = tokens[: int(offsets[-1])]
    plan = DecodePlan(group, offsets.to(torch.int32), tokens.shape[0])
    out = ll_combine(received.plan, experts(tokens, plan), routing.topk_weights)
    return out, few.order.clone() if traced else few.order
