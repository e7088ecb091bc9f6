"""A Buffer's combine: the sum of each token's rows over the ranks."""

from __future__ import annotations

import torch

from crossdock._core import constants

from ._few import weights_home
from ._handle import Routing
from ._stream_work import StreamWork
from .utils import EventOverlap

_HALVES = 2  # float32 rows are twice as long as 16-bit ones
WIDE = 4  # bytes of a float32
BAD_COLUMNS = constants.MAX_TOPK + 1  # of weights that no rank takes


def pieces_of(x: object, bias: object, row_bytes: int, wide: bool = False) -> int:
    """In how many operations, each with as many columns, the rows of x travel.

    Float32 rows that are longer than the group's rows travel in halves. Groups are made for 16-bit
    rows, since groups for float32 would take twice the memory.

    Args:
        x, bias: of combine, not checked yet.
        row_bytes: the longest row that the group takes.
        wide: whether rows travel as float32 in any case.
    """
    biased = any(one is not None for one in (bias if isinstance(bias, tuple) else (bias,))) or wide
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
    wide: bool = False,
    wire: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
    """Sums rows, and weights if they are given, in turns of the group. Nothing waits for the host.

    Weights of rows by expert go home to their choices, beside the first rows; of few tokens behind
    all.

    Args:
        events: previous_event, async_finish.
        wide: whether rows travel as float32 in any case.
        wire: of bfloat16 rows that come without weights, which are gradients, and without bias.
    """
    with StreamWork(routing.batch.session, *events) as work:
        with work.allocating():
            out = x.new_empty(routing.num_tokens, x.shape[1])
            weights = None
            if topk_weights is not None:
                columns = routing.topk if routing.by_expert else topk_weights.shape[1]
                weights = topk_weights.new_empty(routing.num_tokens, columns)
        home: dict[str, torch.Tensor | None] = {}
        if routing.by_expert and not routing.few and topk_weights is not None:
            home = {"grad_recv_weights": topk_weights, "grad_topk_weights": weights}
        if bias or wide or pieces > 1:
            with work.running():
                _sum_wide(work, routing, x, bias, pieces, out, home)
        else:
            plain = topk_weights is None and x.dtype == torch.bfloat16
            _sum(work, routing, x, out, home, wire if plain else 0)
        if not home and topk_weights is not None and weights is not None:
            bring = weights_home if routing.by_expert else _sum_weights
            bring(work, routing, topk_weights, weights)
        event = work.finish((x, topk_weights, *bias, routing.plan), (out, weights))
    return out, weights, event


def _sum(
    work: StreamWork,
    routing: Routing,
    rows: torch.Tensor,
    out: torch.Tensor,
    home: dict[str, torch.Tensor | None] | None = None,
    wire: int = 0,
) -> None:
    """out = the ranks' sum of each token's rows; weights go home with them."""
    fields: dict[str, object] = {"plan": routing.plan, "stream": work.stream()}
    if home:  # the derivative of dispatch sums in combine's order
        fields |= {"grad_recv_tokens": rows, "grad_tokens": out, **home}
        routing.batch.run("dispatch_bwd", fields)
        return
    fields |= {"expert_out": rows, "out": out, "wire": wire}
    routing.batch.run("combine", fields)


def _sum_weights(
    work: StreamWork, routing: Routing, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """out = the ranks' sum of each token's weights: they travel as rows."""
    unit = constants.ROW_ALIGNMENT // WIDE
    missing = -weights.shape[1] % unit
    if not missing and weights.data_ptr() % constants.ROW_ALIGNMENT == 0:
        _sum(work, routing, weights, out)
        return
    with work.running():
        rows = torch.nn.functional.pad(weights, (0, missing)) if missing else weights.clone()
        total = out.new_empty(out.shape[0], rows.shape[1])
        _sum(work, routing, rows, total)
        out.copy_(total[:, : out.shape[1]])


def _sum_wide(
    work: StreamWork,
    routing: Routing,
    x: torch.Tensor,
    bias: list[torch.Tensor],
    pieces: int,
    out: torch.Tensor,
    home: dict[str, torch.Tensor | None],
) -> None:
    """out = the ranks' sum + bias in float32, rounded once; runs within ``work.running()``.

    The library rounds a sum to the type of its rows. So rows travel as float32.
    """
    width = x.shape[1] // pieces
    for piece in range(pieces):
        columns = slice(piece * width, (piece + 1) * width)
        rows = x
        if pieces > 1 or x.dtype != torch.float32:
            rows = routing.batch.session.memory.empty((x.shape[0], width), torch.float32)
            rows.copy_(x[:, columns])
        total = x.new_empty(out.shape[0], width, dtype=torch.float32)
        _sum(work, routing, rows, total, home if piece == 0 else None)
        if bias:
            first, *others = (one[:, columns].float() for one in bias)
            total += sum(others, first)
        out[:, columns] = total
