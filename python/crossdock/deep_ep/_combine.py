"""A Buffer's combine: the sum of each token's rows over the ranks."""

from __future__ import annotations

import torch

from crossdock.torch import _calls

from ._groups import Sequence
from ._lane import Turn
from ._runtime import Handle, Runtime
from .utils import EventOverlap

_HALVES = 2  # float32 rows are twice as long as 16-bit ones, and so travel in two pieces


def operations_of(x: object, topk_weights: object, bias: object) -> list[int]:
    """The operations that a combine with such arguments consists of."""
    biased = any(one is not None for one in (bias if isinstance(bias, tuple) else (bias,)))
    sums = _HALVES if biased and getattr(x, "dtype", None) != torch.float32 else 1
    return [_calls.COMBINE] * sums + [_calls.DISPATCH_BWD] * (topk_weights is not None)


def combine(runtime: Runtime, sequence: Sequence, x: torch.Tensor, handle: Handle,
            topk_weights: torch.Tensor | None, bias: list[torch.Tensor], turn: Turn
            ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
    """Sums rows, and weights if they are given. Nothing waits for the host."""
    routing = handle.routing
    with turn.allocating():
        out = torch.empty(routing.num_tokens, x.shape[1], dtype=x.dtype, device=x.device)
        weights = None
        if topk_weights is not None:
            weights = torch.empty(routing.num_tokens, routing.topk, dtype=torch.float32,
                                  device=x.device)
    with turn.running():
        if bias:
            _sum_with_bias(runtime, sequence, x, handle.plan, bias, out)
        else:
            sequence.run(_calls.combine, handle.plan, x, out)
        if topk_weights is not None:
            sequence.run(_calls.dispatch_bwd, handle.plan, grad_recv_weights=topk_weights,
                         grad_topk_weights=weights)
    event = turn.finish((x, topk_weights, *bias, handle.plan), (out, weights))
    return out, weights, event


def _sum_with_bias(runtime: Runtime, sequence: Sequence, x: torch.Tensor, plan: torch.Tensor,
                   bias: list[torch.Tensor], out: torch.Tensor) -> None:
    """out = the ranks' sum + bias in float32, rounded once.

    The library rounds a sum to the type of its rows. So rows travel as float32, in pieces that are
    no longer than a row of x, the length that the group is made for.
    """
    pieces = _HALVES if x.element_size() == 2 else 1
    width = x.shape[1] // pieces
    for piece in range(pieces):
        columns = slice(piece * width, (piece + 1) * width)
        rows = x
        if pieces > 1:
            rows = runtime.pool.empty((x.shape[0], width), torch.float32)
            rows.copy_(x[:, columns])
        total = torch.empty(out.shape[0], width, dtype=torch.float32, device=x.device)
        sequence.run(_calls.combine, plan, rows, total)
        for one in bias:
            total += one[:, columns]
        out[:, columns] = total
