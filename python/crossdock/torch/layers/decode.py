"""A layer's few tokens, as in decoding: rows travel by the low-latency operations."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from crossdock._core import constants
from crossdock._wire import Wire

from .._group import EpGroup, Plan, order_after
from .._low_latency import LowLatencyGroup, Slots
from .._low_latency_ops import ll_combine, ll_dispatch
from .router import Routing

__all__ = [
    "DecodeCall",
    "DecodePlan",
    "decode",
    "decode_group",
    "refuse_decoding",
    "require_decodable",
]

# By group, then by tokens, alignment and wire: layers that share a group share these as well.
_groups: weakref.WeakKeyDictionary[EpGroup, dict[tuple[int, int, Wire], LowLatencyGroup]]
_groups = weakref.WeakKeyDictionary()


class DecodePlan:
    """A batch of few tokens, as experts are called with it in place of a `Plan`.

    On GPUs, and for compilers, rows behind the last zone hold anything.

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


def decode_group(
    group: EpGroup, max_tokens: int, alignment: int, wire: Wire = "same"
) -> LowLatencyGroup:
    """The low-latency group beside an EpGroup; collective where it has to be made first."""
    beside = _groups.setdefault(group, {})
    found = beside.get((max_tokens, alignment, wire))
    if found is not None and found.core.closed:
        raise ValueError("decode_tokens: expected the group's low-latency group, which was closed")
    if found is None:
        found = beside[max_tokens, alignment, wire] = LowLatencyGroup(
            num_experts=group.num_experts,
            num_logical_experts=group.num_logical_experts,
            max_topk=group.max_topk,
            max_tokens_per_rank=max_tokens,
            hidden=group.hidden,
            dtype=group.dtype,
            duplicate_ids=group.duplicate_ids,
            on_error=group.on_error,
            receive="by_expert",
            alignment=alignment,
            wire_formats=(wire,),
            comm=group.comm,
        )
        if group.has_moved and group.placement is not None:
            found.set_placement(group.placement, choices=group.choices)
    return found


def require_decodable(few: LowLatencyGroup, num_tokens: int) -> None:
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
    refuse_decoding(few, ValueError, problem)


def refuse_decoding(few: LowLatencyGroup, kind: type[Exception], problem: str) -> NoReturn:
    """Raises `kind`, after telling the peers' dispatch, and on GPUs their combine as well.

    There they have enqueued both before they can know; on the CPU their dispatch raises.
    """
    try:
        few.refuse(constants.LL_DISPATCH, kind, problem)
    finally:
        if few.comm.device.type == "cuda":
            _fail_combine(few, problem)


def _fail_combine(few: LowLatencyGroup, problem: str) -> None:
    """Takes this rank's turn in the combine that its peers call."""
    with contextlib.suppress(RuntimeError):
        few.refuse(constants.LL_COMBINE, RuntimeError, problem)


class DecodeCall(NamedTuple):
    """A pass of few tokens.

    Attributes:
        few: the group whose operations it runs.
        group: the layer's.
        rows: ``[T, H]``.
        routing: where they go.
        experts: called with what arrives, and a `DecodePlan`.
        after: as of ``MoELayer.forward``.
        wire: of the sums.
    """

    few: LowLatencyGroup
    group: EpGroup
    rows: torch.Tensor
    routing: Routing
    experts: Callable[[torch.Tensor, Any], torch.Tensor]
    after: Plan | torch.Tensor | None
    wire: Wire

    def through_experts(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The results of the experts for the rows that have come."""
        return self.experts(
            tokens, DecodePlan(self.group, offsets.to(torch.int32), tokens.shape[0])
        )

    def combined(self, received: Slots, results: torch.Tensor) -> torch.Tensor:
        """The sums."""
        weights = self.routing.topk_weights
        return ll_combine(received.plan, results, weights, wire=self.wire)


def decode(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends rows ``[T, H]`` through their experts and back: the sums, and their order. Collective.

    Rows, zones and sums have the bits of prepare, dispatch and combine. Peers hear of an error in
    the call, on whichever side of the experts.
    """
    if torch.compiler.is_compiling():
        return _traced(call)
    few, rows = call.few, call.rows
    try:
        order_after(few, constants.LL_DISPATCH, call.after)  # in eager mode calls are in order
        received = _dispatched(few, rows, call.routing.topk_idx)
    except Exception as error:
        if rows.is_cuda:
            _fail_combine(few, str(error))
        raise
    tokens, offsets = received.tokens, received.row_offsets
    assert offsets is not None
    if not tokens.is_cuda:
        tokens = tokens[: int(offsets[-1])]
    try:
        results = call.through_experts(tokens, offsets)
    except Exception as error:
        _fail_combine(few, f"experts: {type(error).__name__}: {error}")
        raise
    return call.combined(received, results), few.order


def _traced(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode` for a compiler, to which data says what comes first."""
    order = order_after(call.few, constants.LL_DISPATCH, call.after)
    topk_idx = call.routing.topk_idx
    if order is not None:
        topk_idx = topk_idx + order.to(topk_idx.dtype)
    received = _dispatched(call.few, call.rows, topk_idx)
    assert received.row_offsets is not None
    results = call.through_experts(received.tokens, received.row_offsets)
    return call.combined(received, results), call.few.order.clone()


def _dispatched(few: LowLatencyGroup, rows: torch.Tensor, topk_idx: torch.Tensor) -> Slots:
    if not rows.is_cuda or topk_idx.dim() != 2:  # where the latter is refused
        return ll_dispatch(few, rows, topk_idx)
    try:
        slots = few.slots(rows.shape[1], rows.dtype, topk=topk_idx.shape[1], weighted=False)
    except RuntimeError as error:  # no memory
        few.refuse(constants.LL_DISPATCH, type(error), str(error))
    assert slots.row_offsets is not None
    # On a GPU an operation may fail after its call. Its offsets are read nevertheless, and memory
    # of the plan may hold an older one.
    slots.row_offsets.zero_()
    slots.plan.data[: constants.ROW_ALIGNMENT].zero_()
    return ll_dispatch(few, rows, topk_idx, out=slots)
