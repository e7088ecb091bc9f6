"""The two ways of a Buffer's dispatch: with a routing that is new, and with one that is known."""

from __future__ import annotations

from typing import NamedTuple

import torch

from crossdock._core import constants
from crossdock._quantise import widest_scale_bytes
from crossdock.torch import _calls

from ._agreement import Request, mismatch
from ._arguments import Choices, Tokens, as_payload, topk_idx_t
from ._batch import Batch
from ._handle import Handle, Routing
from ._memory import ReceiveMemory
from ._stream_work import StreamWork
from .utils import EventOverlap

Events = tuple[EventOverlap | None, bool]  # previous_event, async_finish

_COUNTS_AT = 4  # place of the counts in the numbers for the host: 16-byte aligned, behind the total
_FAILED = b"\xff\xff\xff\xff"  # in place of each count


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


def request_of(tokens: Tokens, choices: Choices, worst_tokens: int, num_sms: int) -> Request:
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
        worst_tokens=worst_tokens,
        num_sms=num_sms,
    )


def dispatch_cached(
    tokens: Tokens,
    routing: Routing,
    events: Events,
    topk_weights: torch.Tensor | None = None,
    with_choices: bool = False,
) -> tuple[Received, EventOverlap]:
    """Dispatches along a routing, in a turn of its group. Nothing waits for the host.

    Args:
        topk_weights: [T,K], on all ranks or on none, to travel with the rows.
        with_choices: whether the rows' local experts are wanted; equal on all ranks.
    """
    session = routing.batch.session
    columns = routing.topk * with_choices, routing.topk * (topk_weights is not None)
    with StreamWork(session, *events) as work:
        with work.allocating():
            received = _allocate(session.memory, tokens, routing.num_rows, *columns)
        with work.running():
            _send(routing.batch, routing.plan, tokens, topk_weights, received)
        event = work.finish((tokens.rows, tokens.scales, topk_weights, routing.plan), received)
    return _shaped(tokens, received), event


def dispatch_new(
    batch: Batch,
    tokens: Tokens,
    choices: Choices,
    alignment: int,
    worst_tokens: int,
    events: Events,
) -> tuple[Received, list[int], Handle, EventOverlap]:
    """Exchanges counts, then dispatches. The host waits for them, unless there are `worst_tokens`.

    Args:
        alignment: of the rows per expert that it returns.
        worst_tokens: rows to return; 0 = as many as there are.
    """
    session, topk = batch.session, 0 if choices.topk_idx is None else choices.topk_idx.shape[1]
    ranks, device = session.num_ranks, session.device
    # Ranks may hear of an earlier operation's failure at different times, while they wait for the
    # numbers. A rank that does takes part in all later steps: also in the sum of counts.
    between = () if topk else (lambda: session.host.all_gather(_FAILED * choices.experts),)
    host_waits = worst_tokens == 0
    with (
        batch.turns(constants.PREPARE, *between, constants.DISPATCH, host_waits=host_waits),
        StreamWork(session, *events) as work,
    ):
        if len(tokens.rows) > batch.sizes.tokens:  # only num_worst_tokens can have said so few
            needed = f"at least W * T = {ranks * len(tokens.rows)}"
            session.checks.fail("num_worst_tokens", needed, worst_tokens)
        with work.allocating():
            prefix = torch.empty(ranks, ranks, dtype=torch.int32, device=device)
            plan = torch.empty(batch.plan_bytes, dtype=torch.uint8, device=device)
        # The total, then the counts per expert: of local experts, or without top-k of all.
        counts = choices.experts // (ranks if topk else 1)
        numbers = session.host_numbers(_COUNTS_AT + counts) if host_waits else None
        with work.running():
            _prepare(batch, choices, plan, prefix, numbers)
        num_rows, per_expert = worst_tokens, list[int]()
        if numbers is not None:
            num_rows, per_expert = _await_numbers(batch, choices, numbers)
        with work.allocating():
            received = _allocate(session.memory, tokens, num_rows, topk, topk)
        with work.running():
            _send(batch, plan, tokens, choices.topk_weights, received)
        inputs = (
            tokens.rows,
            tokens.scales,
            choices.topk_idx,
            choices.topk_weights,
            choices.in_rank,
            choices.per_expert,
        )
        event = work.finish(inputs, (*received, prefix, plan))
    routing = Routing(batch, plan, tokens.rows.shape[0], num_rows, topk)
    handle = Handle.of(prefix, choices.in_rank, routing)
    aligned = [-(-count // alignment) * alignment for count in per_expert]
    return _shaped(tokens, received), aligned, handle, event


def _prepare(
    batch: Batch,
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
    batch.run(_calls.run, "prepare", plan, {"topk_idx": topk_idx, **outputs})
    torch.cumsum(rank_rows, 0, dtype=torch.int32, out=prefix)


def _await_numbers(batch: Batch, choices: Choices, numbers: torch.Tensor) -> tuple[int, list[int]]:
    """Rows that this rank receives, and its rows per local expert."""
    session = batch.session
    session.wait_for_host_data()
    failure = batch.failure()
    if failure is not None:
        raise failure  # all ranks have it; one of earlier work perhaps this rank alone
    counts = numbers[_COUNTS_AT:]
    if choices.topk_idx is None:
        batch.begin()
        gathered = session.host.all_gather(counts.numpy().tobytes())
        for peer, row in enumerate(gathered):
            if row.startswith(_FAILED):
                raise mismatch("dispatch", f"rank {peer} failed", session.rank, peer)
        all_counts = torch.frombuffer(bytearray(b"".join(gathered)), dtype=torch.int32)
        counts = all_counts.view(session.num_ranks, session.num_ranks, -1).sum(0)[session.rank]
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
    batch: Batch,
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
    batch.run(_calls.run, "dispatch", plan, given)


def _shaped(tokens: Tokens, received: Received) -> Received:
    """The scales in the type and the dimensions that came in."""
    if tokens.scales is None or received.scales is None:
        return received
    scales = received.scales
    if tokens.scales.dtype != scales.dtype:
        scales = scales.view(tokens.scales.dtype)
    return received._replace(scales=scales.flatten() if tokens.scales.ndim == 1 else scales)
