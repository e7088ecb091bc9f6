"""A Buffer's combine: the sum of each token's rows over the ranks."""

from __future__ import annotations

import torch

from crossdock._core import constants
from crossdock.errors import Mismatch
from crossdock.torch import _calls

from ._arguments import Checks
from ._call import Call, Events
from ._handle import Routing
from ._memory import ReceiveMemory
from .utils import EventOverlap

_HALVES = 2  # float32 rows are twice as long as 16-bit ones
_WIDE = 4  # bytes of a float32
_BAD_COLUMNS = constants.MAX_TOPK + 1  # of weights that no rank takes


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
    return _HALVES if x.shape[-1] * _WIDE > row_bytes else 1


def check_columns(checks: Checks, x: torch.Tensor, pieces: int, row_bytes: int) -> None:
    """Refuses columns that the group does not take in so many pieces."""
    size = _WIDE if pieces > 1 else x.element_size()
    unit, most = constants.ROW_ALIGNMENT * pieces // size, row_bytes * pieces // size
    columns = x.shape[1]
    if columns % unit != 0 or not 0 < columns <= most:
        checks.fail(
            "x",
            f"a positive multiple of {unit} columns and, as the handle was made for, "
            f"at most {most}",
            columns,
        )


def operations_of(pieces: int, weight_columns: int) -> list[int]:
    """The operations that a combine consists of, with so many columns of weights (0 = none)."""
    return [constants.COMBINE] * (pieces + (weight_columns > 0))


def columns_of_weights(topk_weights: object) -> int:
    """K of topk_weights, not checked yet: 0 = not given, `_BAD_COLUMNS` = they are refused."""
    if topk_weights is None:
        return 0
    if not isinstance(topk_weights, torch.Tensor) or topk_weights.ndim != 2:
        return _BAD_COLUMNS
    columns = topk_weights.shape[1]
    return columns if 1 <= columns < _BAD_COLUMNS else _BAD_COLUMNS


def check_columns_of_weights(rank: int, columns: int, first: int, peer: int) -> None:
    """Refuses topk_weights of other columns than the first rank of this combine has given.

    Args:
        rank: this rank.
        columns: its number, as `columns_of_weights` counts.
        first: that of the first rank, `peer`. Where that refuses its weights, it tells so itself.
    """
    if first == columns or (columns > 0 and first == _BAD_COLUMNS):
        return
    given = "other ones" if first == _BAD_COLUMNS else first
    raise Mismatch(
        f"combine: columns of topk_weights (0 = not given) = {columns} on rank {rank} and {given} "
        f"on rank {peer}, expected equal values (rank {rank})",
        status="XD_ERROR_MISMATCH",
        rank=rank,
        peer=peer,
        operation="combine",
    )


def combine(
    call: Call,
    x: torch.Tensor,
    routing: Routing,
    topk_weights: torch.Tensor | None,
    bias: list[torch.Tensor],
    pieces: int,
    events: Events,
) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
    """Sums rows, and weights if they are given. Nothing waits for the host."""
    memory = routing.lease.home.memory
    with call.in_scope(*events) as work:
        with work.allocating():
            out = torch.empty(routing.num_tokens, x.shape[1], dtype=x.dtype, device=x.device)
            weights = None
            if topk_weights is not None:
                weights = torch.empty(
                    routing.num_tokens, topk_weights.shape[1], dtype=torch.float32, device=x.device
                )
        with work.running():
            if bias or pieces > 1:
                _sum_wide(memory, call, x, routing.plan, bias, pieces, out)
            else:
                sums = {"plan": routing.plan, "expert_out": x, "out": out}
                call.run(_calls.run, "combine", x, sums)
            if topk_weights is not None and weights is not None:
                _sum_weights(call, topk_weights, routing.plan, weights)
        event = work.finish((x, topk_weights, *bias, routing.plan), (out, weights))
    return out, weights, event


def _sum_weights(call: Call, weights: torch.Tensor, plan: torch.Tensor, out: torch.Tensor) -> None:
    """out = the ranks' sum of each token's weights: they travel as rows."""
    unit = constants.ROW_ALIGNMENT // _WIDE
    missing = -weights.shape[1] % unit
    rows, total = weights, out
    if missing or weights.data_ptr() % constants.ROW_ALIGNMENT:
        rows = torch.nn.functional.pad(weights, (0, missing)) if missing else weights.clone()
    if missing:
        total = out.new_empty(out.shape[0], rows.shape[1])
    call.run(_calls.run, "combine", rows, {"plan": plan, "expert_out": rows, "out": total})
    if missing:
        out.copy_(total[:, : out.shape[1]])


def _sum_wide(
    memory: ReceiveMemory,
    call: Call,
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
            rows = memory.empty((x.shape[0], width), torch.float32)
            rows.copy_(x[:, columns])
        total = torch.empty(out.shape[0], width, dtype=torch.float32, device=x.device)
        call.run(_calls.run, "combine", rows, {"plan": plan, "expert_out": rows, "out": total})
        if bias:
            first, *others = (one[:, columns].float() for one in bias)
            total += sum(others, first)
        out[:, columns] = total
