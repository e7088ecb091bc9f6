"""The two ways of a Buffer's dispatch: with a routing that is new, and with one that is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from crossdock._core import constants
from crossdock._quantise import widest_scale_bytes
from crossdock.errors import Mismatch
from crossdock.torch import _calls

from ._agreement import Request
from ._arguments import Choices, Tokens, as_payload, topk_idx_t
from ._call import Call, Events
from ._groups import Lease
from ._handle import Handle, Routing
from ._memory import ReceiveMemory
from ._runtime import Runtime
from .utils import EventOverlap

_COUNTS_AT = 4  # place of the counts in the numbers for the host: 16-byte aligned, behind the total
_FAILED = -1  # in place of counts


class Received(NamedTuple):
    """The results of dispatch. N = rows."""

    rows: torch.Tensor  # [N,H]
    scales: torch.Tensor | None  # [N,S] or [N]
    topk_idx: torch.Tensor | None  # [N,K]
    topk_weights: torch.Tensor | None  # [N,K]

    @property
    def x(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rows, or rows and scales, as the x of dispatch was."""
        return self.rows if self.scales is None else (self.rows, self.scales)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Numbers among the arguments of an uncached dispatch."""

    expert_alignment: int
    worst_tokens: int  # num_worst_tokens
    num_sms: int


def request_of(tokens: Tokens, choices: Choices, limits: Limits) -> Request:
    """The request that this rank sends the others before it dispatches."""
    hidden = tokens.rows.shape[1]
    return Request(
        tokens=tokens.rows.shape[0],
        # There is room for all forms of a batch, since any of them may come first: fp8 rows, and
        # rows of 4-bit numbers in bytes, are combined as 16-bit rows, their scales may come in a
        # later, cached dispatch, and weights travel as rows.
        row_bytes=max(tokens.row_bytes, 2 * hidden * tokens.packed, 4 * constants.MAX_TOPK),
        scale_bytes=max(4 * tokens.scale_columns, widest_scale_bytes(hidden)),
        topk=0 if choices.topk_idx is None else choices.topk_idx.shape[1],
        experts=choices.experts,
        worst_tokens=limits.worst_tokens,
        num_sms=limits.num_sms,
    )


def dispatch_cached(
    call: Call,
    tokens: Tokens,
    routing: Routing,
    events: Events,
    topk_weights: torch.Tensor | None = None,
    with_choices: bool = False,
) -> tuple[Received, EventOverlap]:
    """Dispatches along a routing. Nothing waits for the host.

    Args:
        topk_weights: [T,K], on all ranks or on none, to travel with the rows.
        with_choices: whether the rows' local experts are wanted; equal on all ranks.
    """
    memory, num_rows = routing.lease.home.memory, routing.num_rows
    columns = routing.topk * with_choices, routing.topk * (topk_weights is not None)
    with call.in_scope(*events) as work:
        with work.allocating():
            received = _allocate(memory, tokens, num_rows, *columns)
        with work.running():
            _send(call, routing.plan, tokens, topk_weights, received)
        event = work.finish((tokens.rows, tokens.scales, topk_weights, routing.plan), received)
    return _shaped(tokens, received), event


def dispatch_new(
    runtime: Runtime, tokens: Tokens, choices: Choices, limits: Limits, lease: Lease, events: Events
) -> tuple[Received, list[int], Handle, EventOverlap]:
    """Exchanges counts, then dispatches. The host waits for them, unless `limits` has the rows."""
    topk = 0 if choices.topk_idx is None else choices.topk_idx.shape[1]
    ranks, device = runtime.num_ranks, runtime.device
    # Ranks may hear of an earlier operation's failure at different times, while they wait for the
    # numbers. A rank that does takes part in all later steps.
    between = _turns_for_counts(runtime, choices)
    with (
        Call(
            lease,
            constants.PREPARE,
            *between,
            constants.DISPATCH,
            host_waits=not limits.worst_tokens,
        ) as call,
        call.in_scope(*events) as work,
    ):
        _require_room(runtime, tokens, limits, lease)
        with work.allocating():
            prefix = torch.empty(ranks, ranks, dtype=torch.int32, device=device)
            plan = torch.empty(lease.plan_bytes, dtype=torch.uint8, device=device)
        numbers = None if limits.worst_tokens else _host_numbers(runtime, choices)
        with work.running():
            _prepare(call, choices, plan, prefix, numbers)
        num_rows = limits.worst_tokens
        per_expert: list[int] = []
        if numbers is not None:
            num_rows, per_expert = _await_numbers(runtime, call, choices, lease, numbers)
        with work.allocating():
            received = _allocate(runtime.memory, tokens, num_rows, topk, topk)
        with work.running():
            _send(call, plan, tokens, choices.topk_weights, received)
        inputs = (
            tokens.rows,
            tokens.scales,
            choices.topk_idx,
            choices.topk_weights,
            choices.in_rank,
            choices.per_expert,
        )
        event = work.finish(inputs, (*received, prefix, plan))
    routing = Routing(lease, plan, tokens.rows.shape[0], num_rows, topk)
    handle = Handle(prefix, choices.in_rank, routing)
    return _shaped(tokens, received), _aligned(per_expert, limits), handle, event


def _require_room(runtime: Runtime, tokens: Tokens, limits: Limits, lease: Lease) -> None:
    """Refuses more tokens than the group takes: only ``num_worst_tokens`` can have said so few."""
    count = len(tokens.rows)
    if count > lease.sizes.tokens:
        needed = f"at least W * T = {runtime.num_ranks * count}"
        runtime.checks.fail("num_worst_tokens", needed, limits.worst_tokens)


def _host_numbers(runtime: Runtime, choices: Choices) -> torch.Tensor:
    """Room for the total, then the counts per expert: of local experts, or without top-k of all."""
    counts = choices.experts // (1 if choices.topk_idx is None else runtime.num_ranks)
    return runtime.host_numbers(_COUNTS_AT + counts)


def _prepare(
    call: Call,
    choices: Choices,
    plan: torch.Tensor,
    prefix: torch.Tensor,
    numbers: torch.Tensor | None,
) -> None:
    """Writes the plan, the rows per rank, and `numbers`."""
    topk_idx, counts, total = choices.topk_idx, None, None
    if numbers is not None:
        total, counts = numbers[:1], numbers[_COUNTS_AT:]
    if topk_idx is None:
        # Each rank stands for one expert.
        ranks = torch.arange(len(prefix), dtype=torch.int32, device=prefix.device)
        topk_idx = torch.where(choices.in_rank, ranks, -1)
        if counts is not None:
            counts.copy_(choices.per_expert, non_blocking=True)
            counts = None
    rank_rows = torch.empty_like(prefix)
    outputs = {"plan": plan, "counts": counts, "total": total, "rank_rows": rank_rows}
    call.run(_calls.run, "prepare", plan, {"topk_idx": topk_idx, **outputs})
    torch.cumsum(rank_rows, 0, dtype=torch.int32, out=prefix)


def _turns_for_counts(runtime: Runtime, choices: Choices) -> list[Callable[[], object]]:
    """How a rank that has failed takes part in `_sum_counts`, if the peers come to it."""
    if choices.topk_idx is not None:
        return []
    failed = np.full(choices.experts, _FAILED, dtype=np.int32).tobytes()
    return [lambda: runtime.host.all_gather(failed)]


def _sum_counts(runtime: Runtime, counts: torch.Tensor) -> torch.Tensor:
    """[E] rows per expert from all ranks. Collective."""
    total = torch.zeros_like(counts)
    for peer, row in enumerate(runtime.host.all_gather(counts.numpy().tobytes())):
        found = torch.frombuffer(bytearray(row), dtype=torch.int32)
        if int(found[0]) == _FAILED:
            raise Mismatch(
                f"dispatch: rank {peer} failed (rank {runtime.rank})",
                status="XD_ERROR_MISMATCH",
                rank=runtime.rank,
                peer=peer,
                operation="prepare",
            )
        total += found
    return total


def _await_numbers(
    runtime: Runtime, call: Call, choices: Choices, lease: Lease, numbers: torch.Tensor
) -> tuple[int, list[int]]:
    """Rows that this rank receives, and its rows per local expert."""
    runtime.scope.wait_for_host_data()
    failure = lease.failure()
    if failure is not None:
        raise failure  # all ranks have it; one of earlier work perhaps this rank alone
    counts = numbers[_COUNTS_AT:]
    if choices.topk_idx is None:
        local = choices.experts // runtime.num_ranks
        call.begin()
        counts = _sum_counts(runtime, counts)[runtime.rank * local : (runtime.rank + 1) * local]
    return int(numbers[0]), counts.tolist()


def _allocate(
    memory: ReceiveMemory, tokens: Tokens, num_rows: int, choices: int, weights: int
) -> Received:
    """Receive tensors, in symmetric memory as long as there is some.

    Args:
        choices, weights: columns of recv_topk_idx and of recv_topk_weights; 0 = not wanted.
    """
    empty = memory.empty
    rows, columns = tokens.rows, tokens.scale_columns
    # The rows last: small tensors that live on do not lie in the way of the next rows.
    topk_idx = empty((num_rows, choices), topk_idx_t) if choices else None
    topk_weights = empty((num_rows, weights), torch.float32) if weights else None
    scales = empty((num_rows, columns), torch.float32) if columns else None
    return Received(empty((num_rows, rows.shape[1]), rows.dtype), scales, topk_idx, topk_weights)


def _send(
    call: Call,
    plan: torch.Tensor,
    tokens: Tokens,
    topk_weights: torch.Tensor | None,
    received: Received,
) -> None:
    """Runs the dispatch on the current stream."""
    scales = tokens.scales
    if scales is not None:
        # The library moves scales without reading them: integers travel as float32.
        scales = scales.view(torch.float32)
        if scales.ndim == 1:
            scales = scales[:, None]
    given = {
        "plan": plan,
        "tokens": as_payload(tokens.rows),
        "scales": scales,
        "topk_weights": topk_weights,
        "recv_tokens": as_payload(received.rows),
        "recv_scales": received.scales,
        "recv_weights": received.topk_weights,
        "recv_topk_idx": received.topk_idx,
    }
    call.run(_calls.run, "dispatch", plan, given)


def _shaped(tokens: Tokens, received: Received) -> Received:
    """The scales in the type and the dimensions that came in."""
    if tokens.scales is None or received.scales is None:
        return received
    scales = received.scales
    if tokens.scales.dtype != scales.dtype:
        scales = scales.view(tokens.scales.dtype)
    return received._replace(scales=scales.flatten() if tokens.scales.ndim == 1 else scales)


def _aligned(counts: list[int], limits: Limits) -> list[int]:
    alignment = limits.expert_alignment
    return [-(-count // alignment) * alignment for count in counts]
