"""Handles: DeepEP's six tensors, and the routing behind them that outlives its Buffer."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist

import deep_ep_cases as cases
from crossdock.deep_ep import Buffer
from crossdock.errors import PeerLost
from deep_ep_cases import on_buffers
from deep_ep_reference import Batch, make_batch
from support import Apart, Rank, on_ranks

SEED = 70


def tensors_of(batch: Batch, rank: int) -> tuple[torch.Tensor, ...]:
    """The tensors of a handle, with one channel per rank."""
    per_rank, _, in_rank = batch.layout(rank)
    head = torch.full(in_rank.shape, -1, dtype=torch.int32)
    for peer in range(batch.num_ranks):
        mine = [token for token in range(len(in_rank)) if in_rank[token, peer]]
        for place, token in enumerate(mine):
            head[token, peer] = place
    unknown = torch.full((len(batch.rows(rank)),), -1, dtype=torch.int32)
    return (
        batch.prefix(),
        per_rank[:, None],
        torch.zeros_like(per_rank)[:, None],
        unknown,
        in_rank,
        head,
    )


@on_buffers(3)
def test_handle_unpacks_as_deep_eps_six_tensors(buffer: Buffer) -> None:
    batch = make_batch(SEED, buffer.group_size)
    caller = cases.Caller(buffer, batch)
    handle = caller.dispatch_checked()
    assert isinstance(handle, tuple) and len(handle) == 6
    names = (
        "rank_prefix_matrix",
        "channel_prefix_matrix",
        "recv_channel_prefix_matrix",
        "recv_src_idx",
        "is_token_in_rank",
        "send_head",
    )
    unpacked = (*handle,)
    for number, (name, want) in enumerate(zip(names, tensors_of(batch, buffer.rank))):
        cases.same(name, unpacked[number], want)
        cases.same(name, handle[number], want)
    cases.same("the last one", handle[-1], unpacked[5])
    assert len(handle[1:3]) == 2
    # Any tuple or list that callers make of the six is a handle.
    for again in (tuple(handle), list(handle), unpacked):
        caller.cached_checked(again)
        caller.combine_checked(again, SEED, 1, weights=3)
    for copied in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="in the process that made it only"):
            copied(handle)
    assert str(handle) == f"Handle({len(caller.x)} tokens, {len(batch.rows(buffer.rank))} rows)"


@on_ranks(3, Apart(3))
def test_handle_serves_with_another_buffer_when_its_own_is_gone(me: Rank) -> None:
    with cases.process_group():
        replace_buffer(me)


def replace_buffer(me: Rank) -> None:
    first = Buffer(dist.group.WORLD)
    caller = cases.Caller(first, make_batch(SEED, me.num_ranks))
    handle = caller.dispatch_checked()
    session = handle.routing.batch.session
    # Like a framework between forward and backward, when it meets larger rows.
    larger = Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20)
    del first
    caller.buffer = larger
    gc.collect()
    caller.cached_checked(handle)
    caller.combine_checked(handle, SEED, 1, weights=3)
    again = caller.dispatch_checked()
    caller.cached_checked(handle)
    caller.cached_checked(again)
    # One rank's mistake is told to the peers as ever.
    wrong = [({"x": caller.x[1:]}, "x: expected")]
    cases.one_rank_errs(me, larger.dispatch, {"x": caller.x, "handle": handle}, wrong)
    caller.cached_checked(handle)
    assert not session.comm.closed
    del handle
    gc.collect()
    assert session.comm.closed
    cases.everything(larger, SEED)


@on_buffers(2, Apart(2))
def test_handle_serves_after_its_buffer_is_destroyed(buffer: Buffer) -> None:
    first = Buffer(dist.group.WORLD, explicitly_destroy=True)
    caller = cases.Caller(first, make_batch(SEED, buffer.group_size))
    handle = caller.dispatch_checked()
    first.destroy()
    caller.buffer = buffer
    caller.cached_checked(handle)
    caller.combine_checked(handle, SEED)
    if buffer.rank == 0:
        del handle
        gc.collect()
    else:
        with pytest.raises(PeerLost):
            while True:
                caller.cached_checked(handle)
    cases.everything(buffer, SEED)


@on_buffers(2)
def test_handle_of_another_number_of_ranks_is_refused(buffer: Buffer) -> None:
    alone = [dist.new_group([rank]) for rank in range(buffer.group_size)][buffer.rank]
    small = Buffer(alone, explicitly_destroy=True)
    caller = cases.Caller(small, make_batch(SEED, 1))
    handle = caller.dispatch_checked()
    text = f"handle: expected one of rank {buffer.rank} of 2 on cpu, got one of rank 0 of 1 on cpu"
    for call in (buffer.dispatch, buffer.combine):
        with pytest.raises(ValueError, match=text):
            call(caller.x, handle)
    small.destroy()
    cases.everything(buffer, SEED)
