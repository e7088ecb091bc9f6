"""The two ways of a Buffer's dispatch: with a routing that is new, and with one that is known."""

from __future__ import annotations

from typing import NamedTuple

import torch

from crossdock._core import constants
from crossdock._quantise import widest_scale_bytes

from ._agreement import Request, mismatch
from ._arguments import Choices, Tokens, as_payload, require_layout, topk_idx_t
from ._batch import Batch, GiveUp, Turns
from ._handle import Routing
from ._memory import Wanted
from ._session import HostNumbers, Session
from ._stream_work import StreamWork
from .utils import EventOverlap

Events = tuple[EventOverlap | None, bool]  # previous_event, async_finish

_FAILED = b"\xff\xff\xff\xff"  # in place of each count


class Received(NamedTuple):
    """The results of dispatch. N = rows."""

    rows: torch.Tensor  # [N,H]
    scales: torch.Tensor | None  # [N,S] or [N]
    topk_idx: torch.Tensor | None  # [N,K]; None for rows by expert
    topk_weights: torch.Tensor | None  # [N,K]; [N] for rows by expert

    @property
    def x(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rows, or rows and scales, as the x of dispatch was."""
        return self.rows if self.scales is None else (self.rows, self.scales)


class Sums(NamedTuple):
    """The numbers of a new routing, as far as they are asked for. L experts are here.

    They are int32; of few tokens those without counts are int64.
    """

    counts: torch.Tensor | None = None  # [L]: (token, expert) pairs of each expert
    offsets: torch.Tensor | None = None  # [L+1], of rows by expert: where zones begin and end
    ends: torch.Tensor | None = None  # [W], of few tokens by rank: rows of ranks up to each
    rank_rows: torch.Tensor | None = None  # [W,W], of rows by rank: rows of each rank for each
    prefix: torch.Tensor | None = None  # [W,W]: the sums of those up to each, as of `Handle`


class Dispatched(NamedTuple):
    """An uncached dispatch."""

    received: Received
    routing: Routing
    per_expert: list[int]  # of local experts, rounded up; empty with ``num_worst_tokens``
    sums: Sums
    event: EventOverlap


def request_of(
    tokens: Tokens,
    choices: Choices,
    worst_tokens: int,
    num_sms: int,
    most_tokens: int = 0,
    few: bool = False,
) -> Request:
    """The request that this rank sends the others before it dispatches."""
    hidden = tokens.rows.shape[1]
    weights = (8 if few else 4) * constants.MAX_TOPK
    return Request(
        tokens=tokens.rows.shape[0],
        most_tokens=most_tokens,
        # There is room for all forms of a batch, since any of them may come first: fp8 rows, and
        # rows of 4-bit numbers in bytes, are combined as 16-bit rows, their scales may come in a
        # later, cached dispatch, and weights travel as rows: of few tokens in two pieces each.
        row_bytes=max(tokens.row_bytes, 2 * hidden * tokens.packed, weights),
        scale_bytes=max(4 * tokens.scale_columns, widest_scale_bytes(hidden)),
        topk=0 if choices.topk_idx is None else choices.topk_idx.shape[1],
        experts=choices.experts,
        worst_tokens=worst_tokens,
        zones=choices.zones,
        few=int(few),
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
        with_choices: whether the local experts of rows by rank are wanted; equal on all ranks.
    """
    columns = routing.topk * with_choices, routing.topk * (topk_weights is not None)
    with StreamWork(routing.batch.session, *events) as work:
        with work.allocating():
            received = _allocate(routing.batch, tokens, routing.num_rows, *columns)
        _send(work, routing.batch, routing.plan, tokens, topk_weights, received)
        event = work.finish((tokens.rows, tokens.scales, topk_weights, routing.plan), received)
    return _shaped(tokens, received), event


def dispatch_new(
    batch: Batch,
    tokens: Tokens,
    choices: Choices,
    alignment: int,
    worst_tokens: int,
    events: Events,
    give_up: GiveUp | None = None,
    counted: bool = False,
) -> Dispatched:
    """Exchanges counts, then dispatches. The host waits for them, unless there are `worst_tokens`.

    Args:
        alignment: of the rows per expert that it returns.
        worst_tokens: rows to return, or those that may become rows by expert; 0 = as many as there
            are.
        give_up: as of `Batch.turns`.
        counted: whether `Sums.counts` of rows by rank is wanted. `Sums.prefix` is not, and neither
            where the host waits: it can be made of `Sums.rank_rows` then at any time.
    """
    session, topk = batch.session, 0 if choices.topk_idx is None else choices.topk_idx.shape[1]
    host_waits = worst_tokens == 0
    with (
        turns_of_new(batch, 0 if topk else choices.experts, host_waits, give_up),
        StreamWork(session, *events) as work,
    ):
        if tokens.rows.shape[0] > batch.sizes.tokens:  # only num_worst_tokens can have said so few
            needed = f"at least W * T = {session.num_ranks * tokens.rows.shape[0]}"
            session.checks.fail("num_worst_tokens", needed, worst_tokens)
        with work.allocating():
            sums = _empty_sums(session, choices, counted, host_waits)
            plan = torch.empty(batch.plan_bytes, dtype=torch.uint8, device=session.device)
        # The total, then the counts per expert: of local experts, or without top-k of all.
        counts = choices.experts // (session.num_ranks if topk else 1)
        numbers = session.host_numbers(counts) if host_waits else None
        _prepare(work, batch, choices, plan, sums, numbers)
        if sums.rank_rows is not None and sums.prefix is not None:
            with work.running():
                torch.cumsum(sums.rank_rows, 0, dtype=torch.int32, out=sums.prefix)
        num_rows, per_expert = worst_tokens, list[int]()
        if numbers is not None:
            num_rows, per_expert = _await_numbers(batch, choices, numbers)
        else:
            num_rows = rows_without_host(choices, worst_tokens, counts)
        with work.allocating():
            received = _allocate(batch, tokens, num_rows, 0 if choices.zones else topk, topk)
        _send(work, batch, plan, tokens, choices.topk_weights, received)
        inputs = (
            tokens.rows,
            tokens.scales,
            choices.topk_idx,
            choices.topk_weights,
            choices.in_rank,
            choices.per_expert,
        )
        event = work.finish(inputs, (*received, *sums, plan))
    routing = Routing(batch, plan, tokens.rows.shape[0], num_rows, topk)
    aligned = per_expert
    if alignment > 1:
        aligned = [-(-count // alignment) * alignment for count in per_expert]
    return Dispatched(_shaped(tokens, received), routing, aligned, sums, event)


def rows_without_host(choices: Choices, worst_tokens: int, local: int) -> int:
    """Rows to return where the host does not wait for their number; local: experts here."""
    if not choices.zones or choices.topk_idx is None:
        return worst_tokens
    return worst_tokens * min(choices.topk_idx.shape[1], local) + (choices.zones - 1) * local


def turns_of_new(
    batch: Batch, alone: int, host_waits: bool, give_up: GiveUp | None = None
) -> Turns:
    """The turns of `dispatch_new`.

    Args:
        alone: experts of a routing by is_token_in_rank alone; 0 = another routing.
        host_waits, give_up: as of `Batch.turns`.
    """
    if batch.sizes.few:
        return batch.turns(constants.DISPATCH, host_waits=host_waits, give_up=give_up)
    # Ranks may hear of an earlier operation's failure at different times, while they wait for the
    # numbers. A rank that does takes part in all later steps: also in the sum of counts.
    host = batch.session.host
    between = (lambda: host.all_gather(_FAILED * alone),) if alone else ()
    turns = constants.PREPARE, *between, constants.DISPATCH
    return batch.turns(*turns, host_waits=host_waits, give_up=give_up)


def _empty_sums(session: Session, choices: Choices, counted: bool, host_waits: bool) -> Sums:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=session.device)

    ranks, local = session.num_ranks, choices.experts // session.num_ranks
    if choices.zones:
        return Sums(counts=numbers(local), offsets=numbers(local + 1))
    if counted:
        return Sums(counts=numbers(local), rank_rows=numbers(ranks, ranks))
    prefix = None if host_waits else numbers(ranks, ranks)
    return Sums(rank_rows=numbers(ranks, ranks), prefix=prefix)


def _prepare(
    work: StreamWork,
    batch: Batch,
    choices: Choices,
    plan: torch.Tensor,
    sums: Sums,
    numbers: HostNumbers | None,
) -> None:
    """Writes the plan, the sums that there are, and `numbers`."""
    topk_idx, for_host = choices.topk_idx, None if numbers is None else numbers.counts
    if topk_idx is None:
        assert choices.in_rank is not None and choices.per_expert is not None
        with work.running():
            # Each rank stands for one expert.
            ranks = torch.arange(
                batch.session.num_ranks, dtype=torch.int32, device=batch.session.device
            )
            topk_idx = torch.where(choices.in_rank, ranks, -1)
            if for_host is not None:
                for_host.copy_(choices.per_expert, non_blocking=True)
                for_host = None
    fields: dict[str, object] = {
        "topk_idx": topk_idx,
        "plan": plan,
        "alignment": choices.zones,
        "counts": sums.counts,
        "padded_counts": for_host,  # of rows by rank without padding
        "offsets": sums.offsets,
        "total": None if numbers is None else numbers.total,
        "rank_rows": sums.rank_rows,
        "stream": work.stream(),
    }
    batch.run("prepare", fields)
    if sums.rank_rows is not None and not batch.session.cuda:
        require_layout(batch.session.checks, choices, sums.rank_rows[batch.session.rank])


def _await_numbers(batch: Batch, choices: Choices, numbers: HostNumbers) -> tuple[int, list[int]]:
    """Rows that this rank receives, and its rows per local expert."""
    session = batch.session
    session.wait_for_host_data()
    failure = batch.failure()
    if failure is not None:
        raise failure  # all ranks have it; one of earlier work perhaps this rank alone
    if choices.topk_idx is None:
        batch.begin()
        gathered = session.host.all_gather(numbers.counts.numpy().tobytes())
        for peer, row in enumerate(gathered):
            if row.startswith(_FAILED):
                raise mismatch("dispatch", f"rank {peer} failed", session.rank, peer)
        all_counts = torch.frombuffer(bytearray(b"".join(gathered)), dtype=torch.int32)
        counts = all_counts.view(session.num_ranks, session.num_ranks, -1).sum(0)[session.rank]
        return int(numbers.total), counts.tolist()
    return numbers.read()


def _allocate(batch: Batch, tokens: Tokens, num_rows: int, choices: int, weights: int) -> Received:
    """Receive tensors, in symmetric memory as long as there is some.

    Args:
        choices, weights: columns of recv_topk_idx and of recv_topk_weights; 0 = not wanted.
    """
    rows, columns = tokens.rows, tokens.scale_columns
    shape = (num_rows,) if batch.sizes.zones else (num_rows, weights)
    # The rows last: small tensors that live on do not lie in the way of the next rows.
    wanted: tuple[Wanted, ...] = (
        ((num_rows, choices), topk_idx_t) if choices else None,
        (shape, torch.float32) if weights else None,
        ((num_rows, columns), torch.float32) if columns else None,
        ((num_rows, rows.shape[1]), rows.dtype),
    )
    topk_idx, topk_weights, scales, received = batch.session.memory.tensors(wanted)
    return Received(received, scales, topk_idx, topk_weights)


def _send(
    work: StreamWork,
    batch: Batch,
    plan: torch.Tensor,
    tokens: Tokens,
    topk_weights: torch.Tensor | None,
    received: Received,
) -> None:
    """Runs the dispatch."""
    scales = tokens.scales
    if scales is not None:
        # The library moves scales without reading them: integers travel as float32.
        if scales.dtype != torch.float32:
            scales = scales.view(torch.float32)
        if scales.ndim == 1:
            scales = scales[:, None]
    fields: dict[str, object] = {
        "plan": plan,
        "tokens": as_payload(tokens.rows),
        "scales": scales,
        "topk_weights": topk_weights,
        "recv_tokens": as_payload(received.rows),
        "recv_scales": received.scales,
        "recv_weights": received.topk_weights,
        "recv_topk_idx": received.topk_idx,
        "stream": work.stream(),
    }
    batch.run("dispatch", fields)


def _shaped(tokens: Tokens, received: Received) -> Received:
    """The scales in the type and the dimensions that came in."""
    if tokens.scales is None or received.scales is None:
        return received
    scales = received.scales
    if tokens.scales.dtype != scales.dtype:
        scales = scales.view(tokens.scales.dtype)
    return received._replace(scales=scales.flatten() if tokens.scales.ndim == 1 else scales)
