"""A Buffer from its making to its end, and what it costs in between."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import deep_ep_cases as cases
import spread
from crossdock.deep_ep import Buffer, Config
from crossdock.errors import Mismatch, PeerLost
from deep_ep_cases import on_buffers
from deep_ep_reference import Batch, make_batch
from support import Apart, Rank, on_ranks, run_threads

SEED = 30


@on_ranks(2)
def test_arguments_are_kept_and_local_memory_is_the_callers(me: Rank) -> None:
    rdma_bytes = 4096 + me.rank  # of one host any number
    options = {"num_nvl_bytes": 1 << 20, "num_rdma_bytes": rdma_bytes}
    with (
        cases.process_group(),
        cases.new_buffer(**options, use_fabric=True, allow_mnnvl=True) as buffer,
    ):
        assert buffer.group is dist.group.WORLD
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 20, rdma_bytes)
        assert buffer.explicitly_destroy and not buffer.enable_shrink
        assert buffer.low_latency_mode is False
        assert buffer.clean_low_latency_buffer(128, 7168, 256) is None
        cases.everything(buffer, SEED)
        local = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([3, 5]), offset=32)
        assert local.shape == (3, 5) and local.dtype == torch.bfloat16
        local.fill_(me.rank + 1)
        whole = buffer.get_local_buffer_tensor(torch.bfloat16)
        assert whole.numel() == 1 << 19
        assert (whole[16:31] == me.rank + 1).all() and whole[:16].eq(0).all()
        cases.everything(buffer, SEED)
        assert (whole[16:31] == me.rank + 1).all()
        for arguments, text in (
            ((torch.int8, (1 << 20,), 1), "size: expected at most 1048575"),
            ((torch.int32, None, 2), "offset: expected a multiple of 4"),
            ((torch.int8, (1,), 0, True), "size: expected at most 0 elements"),
            ((torch.int8, None, 1, True), "offset: .* from 0 to bytes for other hosts = 0"),
        ):
            with pytest.raises(ValueError, match=text):
                buffer.get_local_buffer_tensor(*arguments)
        # As vLLM clears that memory: none of it is the caller's.
        assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_().numel() == 0
        del local, whole
        buffer._local = None
        buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
        assert buffer._local is None, "a view of nothing has allocated all"


@on_ranks(3, Apart(3))
def test_tensors_outlive_a_buffer(me: Rank) -> None:
    with cases.process_group(), cases.new_buffer() as other:
        buffer = Buffer(dist.group.WORLD)
        with pytest.raises(ValueError, match="explicitly_destroy: expected True"):
            buffer.destroy()
        caller = cases.Caller(buffer, make_batch(SEED, me.num_ranks))
        received, *_, handle, _ = caller.dispatch(**caller.topk())
        kept = received.clone()
        gone = weakref.ref(buffer)
        del buffer, caller
        gc.collect()
        assert gone() is None
        cases.same("a tensor after its Buffer", received, kept)
        del handle, received
        cases.everything(other, SEED)
        caller = cases.Caller(other, make_batch(SEED, me.num_ranks))
        handle = caller.dispatch_checked()
    group = handle.routing.batch.group
    assert not group.closed  # a handle serves as long as it lives
    del handle
    assert group.closed and group.comm.closed
    for call in (other.destroy, other.get_comm_stream):
        with pytest.raises(ValueError, match="one in use, got one that is destroyed"):
            call()


@on_buffers(2, Apart(2))
def test_peers_learn_that_a_rank_has_left(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size))
    handle = caller.dispatch_checked()
    if buffer.rank > 0:
        with pytest.raises(PeerLost) as lost:
            while True:
                caller.cached_checked(handle)
        assert lost.value.peer == 0


@on_buffers(2, Apart(2))
def test_agreements_cost_what_the_page_says(buffer: Buffer) -> None:
    session = buffer._live()
    rounds: list[int] = []
    session.host = cases.CountedRounds(session.host, rounds)

    def cost(call: Callable[..., Any], *arguments: Any, **options: Any) -> int:
        rounds.clear()
        call(*arguments, **options)
        return len(rounds)

    hosts = len(set(spread.hosts(buffer.group_size)))
    between = hosts - 1  # agreements that only ranks of several hosts need
    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size))
    assert cost(caller.dispatch, **caller.topk()) == 1
    assert cost(caller.dispatch, **caller.topk()) == between
    fewer = cases.Caller(buffer, make_batch(SEED, buffer.group_size, tokens=3))
    assert cost(fewer.dispatch, **fewer.topk()) == between
    handle = caller.dispatch_checked()
    assert cost(caller.cached_checked, handle) == 0
    assert cost(caller.combine_checked, handle, SEED, 2, weights=3) == between
    # As many as were agreed on; more, once; and fewer again.
    bound = 17 * buffer.group_size
    for worst, agreements in ((bound, 0), (5 * bound, 1), (5 * bound, 0), (bound, 0)):
        assert cost(caller.dispatch, **caller.topk(), num_worst_tokens=worst) == max(
            agreements, between
        )
    assert cost(caller.dispatch) == 2  # with the counts per expert
    assert cost(caller.dispatch) == 1 + between
    other = {"config": Config(6), **caller.topk(), "num_worst_tokens": bound}
    assert cost(caller.dispatch, **other) == 1  # another group
    assert cost(caller.dispatch, **other) == between


@on_buffers(3)
def test_a_rank_that_outgrows_the_group_alone_takes_all_along(buffer: Buffer) -> None:
    """One rank after the other, whichever comes first; peers go along with fewer tokens."""
    cases.everything(buffer, SEED)
    outgrow_in_turn(buffer)


@on_buffers(3)
@pytest.mark.parametrize("calls", [(1 << 21) - 2, (1 << 22) - 2, (1 << 32) - 2])
def test_a_rank_takes_all_along_however_many_calls_there_were(buffer: Buffer, calls: int) -> None:
    """Words of decisions are written in each call, those of asks have not been for long."""
    cases.everything(buffer, SEED)
    requests = buffer._live_groups()._first_requests
    assert requests is not None
    dist.barrier()
    if buffer.rank == 0:
        kept = ctypes.cast(requests._values._words, ctypes.POINTER(ctypes.c_uint64))
        for slot in range(1024):
            kept[slot] = calls % (1 << 22) << 42
    requests.calls = calls
    dist.barrier()
    outgrow_in_turn(buffer)


def outgrow_in_turn(buffer: Buffer) -> None:
    for number in range(9):
        tokens = [5 + rank for rank in range(3)]
        tokens[number % 3] = 40 << number // 3
        caller = cases.Caller(buffer, make_batch(SEED + number, 3, tokens=tokens))
        if number % 2 == buffer.rank % 2:
            time.sleep(0.02)  # not the first
        caller.dispatch_checked()
        groups = [caller.dispatch_checked().routing.batch for _ in range(2)]
        assert groups[0] is groups[1]


def outgrowing(number: int) -> int:
    """Tokens beyond a group that has grown for the number before: by half, or to as many."""
    return 60 * 8**number // 5**number


@on_buffers(3)
def test_a_mistake_beside_a_rank_that_outgrows_the_group_is_told_to_all(buffer: Buffer) -> None:
    """In any order, and the next dispatch works; so are numbers that are not equal."""
    cases.everything(buffer, SEED)
    for number, (late, wrong) in enumerate(itertools.product(range(3), (None, "x", "hidden"))):
        tokens = [outgrowing(number) if rank == 2 else 4 for rank in range(3)]
        sizes = {"hidden": 1024} if wrong == "hidden" and buffer.rank == 0 else {}
        caller = cases.Caller(buffer, make_batch(SEED, 3, tokens=tokens, **sizes))
        if buffer.rank == late:
            time.sleep(0.05)
        if wrong is None:
            caller.dispatch_checked()
            continue
        x = caller.x[0] if wrong == "x" and buffer.rank == 0 else caller.x
        kind = ValueError if x is not caller.x else Mismatch
        texts = {"x": r"x: expected \[T,H\]", "hidden": "bytes of a row of x = 2048 on rank 0 and"}
        with pytest.raises(kind, match=texts[wrong]):
            caller.dispatch(x, **caller.topk())


@on_buffers(3)
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt("stop")])
@pytest.mark.parametrize("topk", [True, False])
def test_an_error_before_the_turns_of_a_dispatch_is_told_to_all(
    buffer: Buffer, error: BaseException, topk: bool
) -> None:
    """Where all go along, and where one outgrows the group; in any order."""
    session, failing = buffer._live(), 0
    for number, (late, outgrows) in enumerate(itertools.product(range(3), (False, True))):
        known, large = (
            cases.Caller(buffer, make_batch(SEED, 3, tokens=[4, 4, most]))
            for most in (4, outgrowing(number))
        )
        known.dispatch(**(known.topk() if topk else {}))
        caller = large if outgrows else known
        began = time.monotonic()
        if buffer.rank == late:
            time.sleep(0.05)
        with pytest.MonkeyPatch.context() as patch:
            if buffer.rank == failing:
                patch.setattr(session, "host_numbers", fail_with(error))
            kind = type(error) if buffer.rank == failing else Mismatch
            says = re.escape(f"dispatch: rank 0 failed: {str(error) or 'MemoryError()'}")
            if outgrows:  # perhaps they have agreed by then, and hear it in prepare
                says += "|ranks disagree; rank 0: its call failed"
            with pytest.raises(kind, match="" if buffer.rank == failing else says):
                caller.dispatch(**(caller.topk() if topk else {}))
        assert time.monotonic() - began < cases.SECONDS
    cases.everything(buffer, SEED)


def fail_with(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: Any) -> NoReturn:
        raise error

    return fail


@on_buffers(2)
def test_growing_batches_make_few_groups(buffer: Buffer) -> None:
    groups = []
    for tokens in range(1, 200):
        x = torch.zeros(0 if buffer.rank else tokens, 64, dtype=torch.bfloat16)
        topk_idx = torch.zeros(len(x), 1, dtype=torch.int64)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        *_, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=torch.ones(topk_idx.shape),
        )
        groups.append(handle.routing.batch)
    assert len(set(map(id, groups))) < 15


@on_buffers(2)
def test_a_group_serves_all_that_came_before(buffer: Buffer) -> None:
    kinds = [
        make_batch(SEED, buffer.group_size, **sizes)
        for sizes in ({"topk": 4}, {"topk": 2, "hidden": 128}, {"tokens": 30}, {"hidden": 32})
    ]

    def group_of(batch: Batch) -> Any:
        caller = cases.Caller(buffer, batch)
        return caller.dispatch(**caller.topk())[4].routing.batch

    *_, grown = [group_of(batch) for batch in kinds]
    assert all(group_of(batch) is grown for batch in kinds)


class ThreadsComm:
    """The part of mpi4py's communicator that a Buffer uses, between threads.

    Args:
        rank: this thread's rank.
        slots: one item per rank, shared by all.
        barrier: of all ranks.
    """

    def __init__(self, rank: int, slots: list[bytes], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._slots = slots
        self._barrier = barrier

    def Get_rank(self) -> int:  # noqa: N802 (mpi4py's name)
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return len(self._slots)

    def allgather(self, sent: bytes) -> list[bytes]:
        self._slots[self._rank] = sent
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered


def be_many(me: Rank, batch: Batch, slots: list[bytes], barrier: threading.Barrier) -> None:
    buffer = Buffer(None, explicitly_destroy=True, comm=ThreadsComm(me.rank, slots, barrier))
    caller = cases.Caller(buffer, batch)
    handle = caller.dispatch_checked()
    caller.cached_checked(handle)
    caller.combine_checked(handle, SEED, 1, weights=3)
    with pytest.raises(ValueError, match="topk_idx: expected a tensor, as there are more than 32"):
        buffer.dispatch(caller.x, **caller.layout())
    buffer.destroy()


def test_more_ranks_than_a_token_has_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that meet through mpi4py, as well."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the ranks are threads of this process
    ranks = 33
    batch = make_batch(SEED, ranks, tokens=[1] * ranks, local_experts=1, topk=4)
    run_threads(ranks, be_many, batch, [b""] * ranks, threading.Barrier(ranks), timeout=300)
