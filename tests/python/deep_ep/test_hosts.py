"""A Buffer's ranks on several hosts: only what is there alone, as other files test on hosts, too.

The hosts are declared: ranks are processes of this machine that share no memory (spread.py).
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import deep_ep_cases as cases
from crossdock.deep_ep import Buffer
from crossdock.errors import Mismatch, Unsupported
from deep_ep_cases import SECONDS, on_buffers
from deep_ep_reference import make_batch
from support import Apart, Rank, on_ranks, run_ranks

SEED = 90


@on_buffers(2, Apart(2))
def test_internode_names_are_dispatch_and_combine(buffer: Buffer) -> None:
    batch = make_batch(SEED, buffer.group_size)
    caller = cases.Caller(buffer, batch)
    x, *_, handle, _ = buffer.internode_dispatch(caller.x, **caller.layout(), **caller.topk())
    caller.check_rows(x)
    outputs = [batch.received(rank, batch.x) for rank in range(buffer.group_size)]
    combined, *_ = buffer.internode_combine(x, handle)
    cases.same("combined_x", combined, batch.combined(buffer.rank, outputs))


@on_ranks(Apart(3))
def test_leaving_out_ranks_between_machines_is_refused_by_the_constructor(me: Rank) -> None:
    with cases.process_group():
        began = time.monotonic()
        text = (
            "enable_shrink = True, expected False, as the ranks are on several machines "
            rf"\({2 - me.rank // 2} of 3 on this one\).*\(rank {me.rank}\)"
        )
        with pytest.raises(Unsupported, match=text):
            Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)
        assert time.monotonic() - began < SECONDS
        with cases.new_buffer() as buffer:
            assert buffer.clean_low_latency_buffer(1, 64, 4) is None
            with pytest.raises(ValueError, match="low_latency_mode: expected True"):
                buffer.low_latency_dispatch(torch.zeros(1, 64), torch.zeros(1, 1), 1, 4)
            cases.everything(buffer, SEED)


@on_ranks(Apart(3))
def test_buffers_that_ranks_want_differently_are_refused_on_all_hosts(me: Rank) -> None:
    with cases.process_group():
        for options, peer, text in (
            ({"low_latency_mode": me.rank == 1}, 1, "low_latency_mode = False on rank 0 and True"),
            ({"num_rdma_bytes": me.rank // 2}, 2, "num_rdma_bytes = 0 on rank 0 and 1"),
        ):
            began = time.monotonic()
            with pytest.raises(Mismatch, match=f"Buffer: {text} on rank {peer}") as failed:
                Buffer(dist.group.WORLD, **options)
            assert (failed.value.rank, failed.value.peer) == (me.rank, peer)
            assert time.monotonic() - began < SECONDS
        with cases.new_buffer() as buffer:
            cases.everything(buffer, SEED)


@on_ranks(Apart(2))
def test_rdma_bytes_are_the_buffers_for_other_machines(me: Rank) -> None:
    """The rows for the other rank, of 8 KiB each, are more than 800 KiB."""
    puts = []
    with cases.process_group():
        for size in (1, 0, 1 << 30):  # pieces of 64, 256 and 512 KiB
            with cases.new_buffer(num_rdma_bytes=size) as buffer:
                caller = cases.Caller(buffer, make_batch(SEED, 2, tokens=[120, 120], hidden=4096))
                handle = caller.dispatch_checked()
                puts.append(handle.routing.batch.group.stats()["net_puts"])
    few, usual, many = puts
    assert few > usual + 8 and usual > many, puts


def name_hosts(me: Rank) -> None:
    os.environ["XD_HOST_ID"] = f"host {2 * me.rank // me.num_ranks}"
    with cases.process_group(), cases.new_buffer(low_latency_mode=True) as buffer:
        assert buffer.num_rdma_ranks == 2 and not buffer._live().apart
        cases.everything(buffer, SEED)
        cases.worst_case(buffer, SEED)


def test_ranks_of_one_machine_may_name_hosts() -> None:
    run_ranks(3, name_hosts, fresh=True)
