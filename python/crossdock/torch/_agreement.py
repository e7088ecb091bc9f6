"""Small agreements between a communicator's ranks, through the operations of one of its groups.

They need no torch.distributed, are bounded by the communicator's timeout, and fail on all ranks
with an error that names the rank that is missing.
"""

from __future__ import annotations

import torch

from ._group import EpGroup, Plan
from ._ops import dispatch

__all__ = ["TOKEN_BYTES", "from_rank_0", "ranks_where"]

TOKEN_BYTES = 16  # the least that a row has


@torch.no_grad()
def ranks_where(group: EpGroup, holds: bool) -> list[int]:
    """The ranks that call it with True; the same list on all. Collective, blocking."""
    # Such a rank sends itself a row: all ranks learn from prepare how much each one sends.
    rows = _send(group, group.comm.rank if holds else None).rank_rows.tolist()
    return [rank for rank, sent in enumerate(rows) if any(sent)]


@torch.no_grad()
def from_rank_0(group: EpGroup, value: bytes) -> bytes:
    """Rank 0's `value`, `TOKEN_BYTES` long, on every rank. Collective, blocking."""
    rank, num_ranks = group.comm.rank, group.comm.num_ranks
    known = 1  # ranks from 0 on that have it; each of them tells one more
    while known < num_ranks:
        peer = rank + known
        plan = _send(group, peer if rank < known and peer < num_ranks else None)
        row = torch.tensor(list(value), dtype=torch.uint8, device="cpu")
        row = row.expand(plan.num_tokens, -1)
        received = dispatch(plan, row.contiguous().to(group.comm.device)).tokens
        if known <= rank < 2 * known:
            value = bytes(received[0].tolist())
        known *= 2
    return value


def _send(group: EpGroup, peer: int | None) -> Plan:
    """The plan by which this rank sends one row to `peer`, or none."""
    idx = [] if peer is None else [peer * group.num_local_experts]
    device = group.comm.device
    plan = group.prepare(torch.tensor(idx, dtype=torch.int64, device=device).reshape(-1, 1))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        group.check()
    return plan
