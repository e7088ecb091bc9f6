"""Dispatches of an ElasticBuffer through the low-latency operations: without a prepare.

Rows, and all that comes beside them, are those of the operations of many tokens, in every bit. A
dispatch along a routing sends the choices again, as these operations know no other. T tokens of
this rank, K choices of each, N received rows, L experts of this rank, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from crossdock._core import constants
from crossdock.torch._calls import SUMMABLE

from ._agreement import Request
from ._arguments import Checks, Choices, Tokens, topk_idx_t
from ._batch import Batch, GiveUp
from ._dispatch import (
    Dispatched,
    Events,
    Received,
    Sums,
    dispatch_cached,
    rows_without_host,
    turns_of_new,
)
from ._handle import Routing
from ._session import Session
from ._stream_work import StreamWork
from .utils import EventOverlap

_HALF = 16  # bits of a weight that a float32 holds as a whole number


def takes_few(session: Session, tokens: Tokens, most_tokens: int, few_tokens: int) -> bool:
    """Whether a dispatch goes this way; all ranks give the same numbers and types of rows."""
    return (
        most_tokens <= few_tokens
        and tokens.scales is None
        and tokens.rows.dtype in SUMMABLE
        and session.num_ranks <= constants.LL_MAX_RANKS
        and session.num_hosts == 1
        and not session.apart
    )


def require_rows(checks: Checks, tokens: Tokens) -> None:
    """Refuses rows along a routing of few tokens that its operations do not move."""
    if tokens.scales is not None or tokens.rows.dtype not in SUMMABLE:
        pair = "" if tokens.scales is None else " with scales"
        got = str(tokens.rows.dtype).removeprefix("torch.") + pair
        expected = "rows of bfloat16, float16 or float32, as the handle is one of few tokens"
        checks.fail("x", expected, got)


class _Places(NamedTuple):
    """The outputs of an operation; rows behind the real ones are zero unless the host waits."""

    received: Received
    counts: torch.Tensor  # [L] int32
    offsets: torch.Tensor  # [L+1] or by rank [W+1], int64
    plan: torch.Tensor


def dispatch_few(
    batch: Batch,
    tokens: Tokens,
    choices: Choices,
    request: Request,
    alignment: int,
    worst_tokens: int,
    events: Events,
    give_up: GiveUp | None,
    keep: bool,
) -> Dispatched:
    """As `dispatch_new`, in one turn of a group of few tokens.

    Args:
        request: this rank's.
        keep: whether the routing has a copy of the choices; else the caller's, who leaves them.
    """
    session, topk_idx, most_tokens = batch.session, choices.topk_idx, request.most_tokens
    assert topk_idx is not None
    topk, local = topk_idx.shape[1], choices.experts // session.num_ranks
    host_waits, num_rows = worst_tokens == 0, 0
    if not host_waits:
        num_rows = rows_without_host(choices, worst_tokens, local)
    columns = 0 if choices.zones else topk, topk
    with turns_of_new(batch, 0, host_waits, give_up), StreamWork(session, *events) as work:
        with work.allocating():
            kept = torch.empty_like(topk_idx) if keep else topk_idx
            places = _allocate(batch, tokens, most_tokens, num_rows, columns)
        if keep:
            with work.running():
                kept.copy_(topk_idx)
        given = tokens, topk_idx, choices.topk_weights
        _send(work, batch, given, most_tokens, places)
        per_expert = list[int]()
        if host_waits:
            num_rows, per_expert = _await_numbers(work, batch, places)
        inputs = tokens.rows, topk_idx, choices.topk_weights
        event = work.finish(inputs, (*places.received, *places[1:], kept))
    sizes = len(topk_idx), num_rows, topk
    routing = Routing(batch, places.plan, *sizes, kept, most_tokens, exact=host_waits)
    sums = Sums(counts=places.counts, offsets=places.offsets)
    if not choices.zones:
        sums = Sums(counts=places.counts, ends=places.offsets[1:])
    aligned = [-(-count // alignment) * alignment for count in per_expert]
    return Dispatched(_first_rows(places.received, num_rows), routing, aligned, sums, event)


def dispatch_along(
    tokens: Tokens,
    routing: Routing,
    events: Events,
    topk_weights: torch.Tensor | None = None,
    with_choices: bool = False,
) -> tuple[Received, EventOverlap]:
    """As `dispatch_cached`, along any routing; of few tokens rows of bytes travel as floats."""
    if not routing.few:
        return dispatch_cached(tokens, routing, events, topk_weights, with_choices)
    batch = routing.batch
    columns = routing.topk * with_choices, routing.topk * (topk_weights is not None)
    with StreamWork(batch.session, *events) as work:
        with work.allocating():
            num_rows = 0 if routing.exact else routing.num_rows
            places = _allocate(batch, tokens, routing.most_tokens, num_rows, columns)
        given = tokens, _told(work, routing), topk_weights
        _send(work, batch, given, routing.most_tokens, places)
        inputs = tokens.rows, routing.topk_idx, topk_weights
        event = work.finish(inputs, (*places.received, *places[1:]))
    return _first_rows(places.received, routing.num_rows), event


def weights_home(
    work: StreamWork, routing: Routing, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """out, [T,K], = the weights of rows by expert, each for its choice; 0 where there is no row.

    In two turns. First each row hears which choice it is; then halves of weights travel as rows,
    as whole numbers, which sums with zeros leave as they are.
    """
    topk, device = routing.topk, weights.device
    with work.running():
        choice = torch.arange(topk, dtype=torch.float32, device=device)
        choice = choice.expand(routing.num_tokens, -1).contiguous()
        nothing = torch.zeros(
            (routing.num_tokens, constants.ROW_ALIGNMENT), dtype=torch.float32, device=device
        )
        places = _allocate(
            routing.batch, Tokens(nothing, None), routing.most_tokens, routing.num_rows, (0, topk)
        )
        given = Tokens(nothing, None), _told(work, routing), choice
        _send(work, routing.batch, given, routing.most_tokens, places)
        assert places.received.topk_weights is not None
        mine = places.received.topk_weights[: routing.num_rows].long().clamp(0, topk - 1)
        bits = weights.view(torch.int32)
        halves = torch.stack([bits >> _HALF, bits & ((1 << _HALF) - 1)], 1).float()
        columns = -(-topk // 2) * 2  # of 16 bytes with both halves
        rows = halves.new_zeros(len(weights), columns, 2)
        rows[torch.arange(len(weights), device=device), mine] = halves
        # Padding stands for no row, and is not read.
        total = out.new_empty(routing.num_tokens, 2 * columns)
        fields: dict[str, object] = {
            "plan": routing.plan,
            "expert_out": rows.view(len(weights), 2 * columns),
            "out": total,
            "stream": work.stream(),
        }
        routing.batch.run("combine", fields)
        high, low = total.view(-1, columns, 2)[:, :topk].to(torch.int32).unbind(2)
        out.copy_(torch.bitwise_or(high << _HALF, low).view(torch.float32))


def _told(work: StreamWork, routing: Routing) -> torch.Tensor:
    """The choices of a routing, without ids that are no experts: their error has been told once."""
    ids = routing.topk_idx
    assert ids is not None
    with work.running():
        return ids.masked_fill((ids < 0) | (ids >= routing.batch.sizes.experts), -1)


def _allocate(
    batch: Batch, tokens: Tokens, most_tokens: int, zeroed: int, columns: tuple[int, int]
) -> _Places:
    """Outputs with as many rows as are needed at most.

    Args:
        zeroed: rows to return that the operation may leave as they are; 0 = the host knows how many
            it writes.
        columns: of recv_topk_idx and of recv_topk_weights; 0 = not wanted.
    """
    session, device = batch.session, batch.session.device
    zones, (choices, weights) = batch.sizes.zones, columns
    num_rows = max(batch.bounds(most_tokens), zeroed)
    empty = torch.zeros if zeroed else torch.empty
    local = batch.sizes.experts // session.num_ranks
    shape = (num_rows,) if zones else (num_rows, weights)
    received = Received(
        empty(num_rows, tokens.rows.shape[1], dtype=tokens.rows.dtype, device=device),
        None,
        torch.empty(num_rows, choices, dtype=topk_idx_t, device=device) if choices else None,
        empty(shape, dtype=torch.float32, device=device) if weights else None,
    )
    ends = (local if zones else session.num_ranks) + 1
    return _Places(
        received,
        torch.empty(local, dtype=torch.int32, device=device),
        torch.empty(ends, dtype=torch.int64, device=device),
        torch.empty(batch.plan_bytes, dtype=torch.uint8, device=device),
    )


def _send(
    work: StreamWork,
    batch: Batch,
    given: tuple[Tokens, torch.Tensor | None, torch.Tensor | None],
    most_tokens: int,
    places: _Places,
) -> None:
    """Runs the dispatch."""
    tokens, topk_idx, topk_weights = given
    received = places.received
    fields: dict[str, object] = {
        "tokens": _as_floats(tokens.rows),
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "plan": places.plan,
        "recv_tokens": _as_floats(received.rows),
        "counts": places.counts,
        "row_offsets": places.offsets,
        "recv_weights": received.topk_weights,
        "recv_topk_idx": received.topk_idx,
        "max_tokens": most_tokens,
        "stream": work.stream(),
    }
    batch.run("dispatch", fields)


def _as_floats(rows: torch.Tensor) -> torch.Tensor:
    """Rows of bytes, which the operations do not know, as the floats that they would be."""
    return rows if rows.dtype in SUMMABLE else rows.view(torch.float32)


def _await_numbers(work: StreamWork, batch: Batch, places: _Places) -> tuple[int, list[int]]:
    """Rows that this rank has received, and its rows per local expert."""
    session = batch.session
    numbers = session.host_numbers(len(places.counts))
    with work.running():
        numbers.counts.copy_(places.counts, non_blocking=True)
        # The lower half of the last number.
        numbers.total.copy_(places.offsets.view(torch.int32)[-2:-1], non_blocking=True)
    session.wait_for_host_data()
    failure = batch.failure()
    if failure is not None:
        raise failure  # all ranks have it; one of earlier work perhaps this rank alone
    return numbers.read()


def _first_rows(received: Received, num_rows: int) -> Received:
    rows, _, topk_idx, weights = received
    return Received(
        rows[:num_rows],
        None,
        None if topk_idx is None else topk_idx[:num_rows],
        None if weights is None else weights[:num_rows],
    )
