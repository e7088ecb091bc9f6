"""A Buffer's combine: the sum of each token's rows over the ranks."""

from __future__ import annotations

import torch

from crossdock._core import constants
from crossdock.torch import _calls

from ._batch import Batch
from ._handle import Routing
from ._stream_work import StreamWork
from .utils import EventOverlap

_HALVES = 2  # float32 rows are twice as long as 16-bit ones
WIDE = 4  # bytes of a float32
BAD_COLUMNS = constants.MAX_TOPK + 1  # of weights that no rank takes


def pieces_of(x: object, bias: object, row_bytes: int) -> int:
    """In how many operations, each with as many columns, the rows of x travel.

    Float32 rows that are longer than the group's rows travel in halves. Groups are made for 16-bit
    rows, since groups for float32 would take twice the memory.

    Args:
        x, bias: of combine, not checked yet.
        row_bytes: the longest row that the group takes.
    """
    biased = any(one is not None for one in (bias if isinstance(bias, tuple) else (bias,)))
    if not isinstance(x, torch.Tensor) or x.ndim == 0:
        return _HALVES if biased else 1  # usually the peers do the same
    if not biased and x.dtype != torch.float32:
        return 1
    return _HALVES if x.shape[-1] * WIDE > row_bytes else 1


def columns_of_weights(topk_weights: object) -> int:
    """K of topk_weights, not checked yet: 0 = not given, `BAD_COLUMNS` = they are refused."""
    if topk_weights is None:
        return 0
    if not isinstance(topk_weights, torch.Tensor) or topk_weights.ndim != 2:
        return BAD_COLUMNS
    columns = topk_weights.shape[1]
    return columns if 1 <= columns < BAD_COLUMNS else BAD_COLUMNS


def combine(
    x: torch.Tensor,
    routing: Routing,
    topk_weights: torch.Tensor | None,
    bias: list[torch.Tensor],
    pieces: int,
    events: tuple[EventOverlap | None, bool],
) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
    """Sums rows, and weights if they are given, in turns of the group. Nothing waits for the host.

    Args:
        events: previous_event, async_finish.
    """
    batch = routing.batch
    with StreamWork(batch.session, *events) as work:
        with work.allocating():
            out = x.new_empty(routing.num_tokens, x.shape[1])
            weights = None
            if topk_weights is not None:
                weights = topk_weights.new_empty(routing.num_tokens, topk_weights.shape[1])
        with work.running():
            if bias or pieces > 1:
                _sum_wide(batch, x, routing.plan, bias, pieces, out)
            else:
                sums = {"plan": routing.plan, "expert_out": x, "out": out}
                batch.run(_calls.run, "combine", x, sums)
            if topk_weights is not None and weights is not None:
                _sum_weights(batch, topk_weights, routing.plan, weights)
        event = work.finish((x, topk_weights, *bias, routing.plan), (out, weights))
    return out, weights, event


def _sum_weights(
    batch: Batch, weights: torch.Tensor, plan: torch.Tensor, out: torch.Tensor
) -> None:
    """out = the ranks' sum of each token's weights: they travel as rows."""
    unit = constants.ROW_ALIGNMENT // WIDE
    missing = -weights.shape[1] % unit
    rows, total = weights, out
    if missing or weights.data_ptr() % constants.ROW_ALIGNMENT:
        rows = torch.nn.functional.pad(weights, (0, missing)) if missing else weights.clone()
    if missing:
        total = out.new_empty(out.shape[0], rows.shape[1])
    batch.run(_calls.run, "combine", rows, {"plan": plan, "expert_out": rows, "out": total})
    if missing:
        out.copy_(total[:, : out.shape[1]])


def _sum_wide(
    batch: Batch,
    x: torch.Tensor,
    plan: torch.Tensor,
    bias: list[torch.Tensor],
    pieces: int,
    out: torch.Tensor,
) -> None:
    """out = the ranks' sum + bias in float32, rounded once.

    The library rounds a sum to the type of its rows. So rows travel as float32.
    """
    width = x.shape[1] // pieces
    for piece in range(pieces):
        columns = slice(piece * width, (piece + 1) * width)
        rows = x
        if pieces > 1 or x.dtype != torch.float32:
            rows = batch.session.memory.empty((x.shape[0], width), torch.float32)
            rows.copy_(x[:, columns])
        total = x.new_empty(out.shape[0], width, dtype=torch.float32)
        sums = {"plan": plan, "expert_out": rows, "out": total}
        batch.run(_calls.run, "combine", rows, sums)
        if bias:
            first, *others = (one[:, columns].float() for one in bias)
            total += sum(others, first)
        out[:, columns] = total
