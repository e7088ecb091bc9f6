"""Runs a test's body on two of the four processes that the other tests of this folder have."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from crossdock import _core
from support import Rank, run_ranks


def run_pair(body: Callable[[Rank], None]) -> None:
    """Runs ``body(Rank)`` on two ranks, which have torch's process group while it runs."""
    run_ranks(4, _run, body, timeout=200)


def _run(me: Rank, body: Callable[[Rank], None]) -> None:
    _core.default_timeout_ms()  # reads the job's secret, which ranks must do in the same job
    if me.rank >= 2:
        return
    dist.init_process_group("gloo", rank=me.rank, world_size=2)
    try:
        body(Rank(me.rank, 2, me.unique_id))
    finally:
        dist.destroy_process_group()
