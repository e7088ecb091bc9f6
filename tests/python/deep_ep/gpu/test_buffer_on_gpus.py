"""The Buffer on GPUs, one rank per GPU: modes, streams, overlap, graphs, errors of the device."""

from __future__ import annotations

import contextlib
import time
from typing import NoReturn

import pytest
import torch

import deep_ep_cases as cases
import test_wire as wire
from crossdock.deep_ep import Buffer
from crossdock.errors import CrossdockError, Mismatch
from deep_ep_cases import on_gpus
from deep_ep_reference import make_batch
from support import Apart
from torch_ranks import gpu_ranks

SEED = 50
SLEEP_CYCLES = 1_000_000_000  # about half a second
SECONDS = 30  # much less than the timeout, which peers must not sit out

RANKS = gpu_ranks()  # all tests run with the most, and one of the modes with others

pytestmark = pytest.mark.gpu
needs_peers = pytest.mark.skipif(RANKS == [1], reason="peers need a second GPU")


@pytest.mark.parametrize("streams", [{}, *cases.STREAMS], ids=cases.name_of)
@pytest.mark.parametrize("name", cases.MODES)
@on_gpus()
def test_mode_equals_reference(buffer: Buffer, name: str, streams: dict[str, bool]) -> None:
    getattr(cases, name)(buffer, SEED, **streams)


@on_gpus(*RANKS[:-1] or RANKS)
def test_modes_equal_reference_with_fewer_ranks(buffer: Buffer) -> None:
    cases.everything(buffer, SEED)


test_wire_of_many_tokens = on_gpus(*RANKS)(wire.test_many_tokens)


@needs_peers
@on_gpus(Apart(RANKS[-1]))
def test_modes_equal_reference_between_hosts(buffer: Buffer) -> None:
    assert buffer.num_rdma_ranks == 2
    for name in cases.MODES:
        getattr(cases, name)(buffer, SEED, async_finish=True)


@on_gpus()
def test_operations_run_beside_the_callers_work(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size))
    handle = caller.dispatch_checked()
    torch.cuda.synchronize()
    before, busy = buffer.capture(), torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    busy.record()
    x, *_, event = buffer.dispatch(
        caller.x, handle, previous_event=before, async_finish=True, allocate_on_comm_stream=True
    )
    combined, _, done = buffer.combine(
        x, handle, previous_event=event, async_finish=True, allocate_on_comm_stream=True
    )
    done.event.event.synchronize()
    assert not busy.query(), "the operations waited for the caller's stream"
    with done:
        pass
    caller.check_rows(x)
    outputs = [caller.batch.received(rank, caller.batch.x) for rank in range(buffer.group_size)]
    cases.same("combined_x", combined, caller.batch.combined(buffer.rank, outputs))


@on_gpus()
def test_memory_of_dropped_tensors_is_not_reused_too_soon(buffer: Buffer) -> None:
    """Tensors die as soon as work with them is enqueued."""
    rounds = 20
    batch = make_batch(SEED, buffer.group_size, tokens=500, hidden=2048)
    caller = cases.Caller(buffer, batch)
    handle = caller.dispatch_checked()
    outputs = [batch.received(rank, batch.x) for rank in range(buffer.group_size)]
    want = caller.on_device(batch.combined(buffer.rank, outputs))
    received = caller.on_device(outputs[buffer.rank])
    wrong = torch.zeros(2, dtype=torch.int64, device=caller.device)
    for number in range(rounds):
        scale = 2.0**number  # exact
        rows, *_, event = buffer.dispatch(
            caller.x * scale, handle, async_finish=True, previous_event=buffer.capture()
        )
        event.current_stream_wait()
        wrong[0] += (rows != received * scale).sum()
        rows = rows * 2  # in ordinary memory
        out, _, event = buffer.combine(
            rows, handle, async_finish=True, previous_event=buffer.capture()
        )
        del rows
        torch.full((4000, 2048), float("nan"), dtype=torch.bfloat16, device=caller.device)
        event.current_stream_wait()
        wrong[1] += (out != want * (2 * scale)).sum()
        del out
    assert wrong.tolist() == [0, 0]


@on_gpus()
def test_graph_of_a_layer_follows_new_routing(buffer: Buffer) -> None:
    batches = [
        make_batch(SEED + n, buffer.group_size, tokens=[17 - r for r in range(buffer.group_size)])
        for n in range(3)
    ]
    callers = [cases.Caller(buffer, batch) for batch in batches]
    x, idx = callers[0].x.clone(), callers[0].topk_idx.clone()
    weights = callers[0].topk_weights.clone()

    def step() -> torch.Tensor:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            idx, batches[0].num_experts
        )
        rows, *_, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
            topk_idx=idx,
            topk_weights=weights,
            num_worst_tokens=17 * buffer.group_size,
        )
        return buffer.combine(rows, handle)[0]

    step()  # sizes are known from here on
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for batch, caller in zip(batches * 3, callers * 3):
        x.copy_(caller.x)
        idx.copy_(caller.topk_idx)
        weights.copy_(caller.topk_weights)
        graph.replay()
        outputs = [batch.received(rank, batch.x) for rank in range(buffer.group_size)]
        cases.same("replayed", out, batch.combined(buffer.rank, outputs))
    del out, graph
    cases.everything(buffer, SEED)


@needs_peers
@on_gpus()
def test_a_rank_that_outgrows_the_group_alone_takes_all_along(buffer: Buffer) -> None:
    """Its peers have enqueued prepare when they hear of it; beside it, a mistake is told to all."""
    cases.everything(buffer, SEED)
    for number in range(4):
        tokens = [5 + rank for rank in range(buffer.group_size)]
        tokens[number % buffer.group_size] = 40 << number
        caller = cases.Caller(buffer, make_batch(SEED + number, buffer.group_size, tokens=tokens))
        caller.dispatch_checked()
        first = buffer.rank == 0
        with pytest.raises(ValueError if first else Mismatch):
            caller.dispatch(caller.x[0] if first else caller.x, **caller.topk())
    cases.everything(buffer, SEED)


@needs_peers
@on_gpus()
@pytest.mark.parametrize("topk", [True, False])
def test_an_error_before_the_turns_of_a_dispatch_is_told_to_all(buffer: Buffer, topk: bool) -> None:
    """Peers have enqueued prepare, and hear over the host why it has failed."""

    def no_memory(count: int) -> NoReturn:
        raise MemoryError("no memory")

    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size))
    arguments = caller.topk() if topk else {}
    for _ in range(2):
        caller.dispatch(**arguments)
        began, first = time.monotonic(), buffer.rank == 0
        with pytest.MonkeyPatch.context() as patch:
            if first:
                patch.setattr(buffer._live(), "host_numbers", no_memory)
            text = "no memory" if first else "dispatch: rank 0 failed: no memory"
            with pytest.raises(MemoryError if first else Mismatch, match=text):
                caller.dispatch(**arguments)
        assert time.monotonic() - began < SECONDS
    cases.everything(buffer, SEED)


@needs_peers
@on_gpus()
def test_errors_of_the_device_reach_all_ranks(buffer: Buffer) -> None:
    """The next dispatch raises errors that peers can know only later, on all ranks, once."""
    batch = make_batch(SEED, buffer.group_size, tokens=[17, 9, 5, 0][: buffer.group_size])
    caller = cases.Caller(buffer, batch)
    handle = caller.dispatch_checked()
    layout, topk = caller.layout(), caller.topk()
    rows = caller.on_device(batch.received(buffer.rank, batch.x))
    row_weights = caller.on_device(batch.received_topk(buffer.rank)[1])
    worst = 17 * buffer.group_size
    buffer.dispatch(caller.x, **layout, **topk, num_worst_tokens=worst)
    bad_ids = {**topk, "topk_idx": torch.full_like(caller.topk_idx, batch.num_experts)}
    first = buffer.rank == 0
    bias = torch.zeros_like(caller.x)

    def bad_ids_unseen() -> None:
        buffer.dispatch(caller.x, **layout, **(bad_ids if first else topk), num_worst_tokens=worst)

    def in_cached() -> None:
        x = caller.x[1:] if first else caller.x
        buffer.dispatch(x, handle)

    def in_worst() -> None:
        x = caller.x[0] if first else caller.x
        buffer.dispatch(x, **layout, **topk, num_worst_tokens=worst)

    def in_combine() -> None:
        x = rows[0] if first else rows
        buffer.combine(x, handle, row_weights, (bias, bias))

    began = time.monotonic()
    for mistake in (bad_ids_unseen, in_cached, in_worst, in_combine):
        if first and mistake is not bad_ids_unseen:
            with pytest.raises(ValueError):
                mistake()
        else:
            mistake()
        torch.cuda.synchronize()
        with pytest.raises(CrossdockError) as found:
            caller.dispatch(**topk)
        assert not found.value.fatal
        cases.everything(buffer, SEED)
    with pytest.raises(CrossdockError, match="lowest rank with some is 0"):
        buffer.dispatch(caller.x, **layout, **(bad_ids if first else topk))
    cases.everything(buffer, SEED)
    assert time.monotonic() - began < SECONDS


@needs_peers
@on_gpus()
def test_unequal_num_worst_tokens_leave_nobody_waiting(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size))
    known = 17 * buffer.group_size
    caller.dispatch(**caller.topk(), num_worst_tokens=known)
    began = time.monotonic()
    for odd in range(buffer.group_size):
        if buffer.rank == odd:
            with pytest.raises(Mismatch):
                caller.dispatch(**caller.topk())
        else:
            # A rank that comes after the odd one hears of it now, and others from the next
            # dispatch that waits for the host.
            with contextlib.suppress(Mismatch):
                caller.dispatch(**caller.topk(), num_worst_tokens=known)
        torch.cuda.synchronize()
        with contextlib.suppress(Mismatch):
            caller.dispatch(**caller.topk())
        cases.everything(buffer, SEED)
    assert time.monotonic() - began < SECONDS


@on_gpus()
def test_buffer_is_on_the_current_device(buffer: Buffer) -> None:
    assert Buffer.is_sm90_compiled()
    assert isinstance(buffer.get_comm_stream(), torch.cuda.Stream)
    assert buffer.get_comm_stream().device.index == buffer.rank
    assert buffer.get_local_buffer_tensor(torch.uint8).device.index == buffer.rank
    batch = make_batch(SEED, buffer.group_size)
    with pytest.raises(ValueError, match=f"topk_idx: expected a tensor on cuda:{buffer.rank}"):
        buffer.get_dispatch_layout(batch.topk_idx[0], batch.num_experts)
