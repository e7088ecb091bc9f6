"""A rank whose process ends. These tests are the last, as they end processes that others share."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch.distributed as dist

import deep_ep_cases
import low_latency_cases as cases
from crossdock.deep_ep import Buffer
from crossdock.errors import PeerLost
from deep_ep_cases import SECONDS, on_buffers
from deep_ep_reference import make_batch
from slots import SlotRouting
from support import Apart, Rank, on_ranks
from test_low_latency import expect_last_left_out

SEED = 140


@on_ranks(Apart(4), loses=3)
def test_a_rank_that_dies_is_told_to_all_hosts(me: Rank) -> None:
    with deep_ep_cases.process_group():
        buffer = Buffer(dist.group.WORLD)
        caller = deep_ep_cases.Caller(buffer, make_batch(SEED, me.num_ranks))
        handle = caller.dispatch_checked()
        if me.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLost, match="rank 3") as lost:
            while True:
                caller.cached_checked(handle)
                caller.combine_checked(handle, SEED, weights=3)
        assert lost.value.peer == 3 and lost.value.fatal
        assert time.monotonic() - began < SECONDS
        for call in (caller.dispatch_checked, lambda: caller.combine_checked(handle, SEED)):
            with pytest.raises(PeerLost, match="rank 3"):
                call()


@on_buffers(3, **cases.SHRINKING, loses=2)
def test_a_rank_whose_process_ends_is_left_out(buffer: Buffer) -> None:
    """The others go on, and hear of it only if they ask."""
    batch = cases.Batch(SEED, buffer)
    x, _, handle, _, _ = batch.dispatch(buffer)
    batch.combine(buffer, batch.experts_of(x), handle)
    if buffer.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        x, count, handle, _, hook = batch.dispatch(buffer, return_recv_hook=True)
        hook()
        batch.combine(buffer, batch.experts_of(x), handle)
    mine = [np.where(ids // cases.LOCAL == 2, -1, ids) for ids in batch.ids[:2]]
    left = SlotRouting([*mine, batch.ids[2][:0]], batch.experts, cases.MOST)
    assert count.tolist() == left.counts(buffer.rank)
    expect_last_left_out(buffer)
