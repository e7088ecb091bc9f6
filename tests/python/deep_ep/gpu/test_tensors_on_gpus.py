"""A Buffer on GPUs returns torch's own tensors, in symmetric memory."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist

import deep_ep_cases as cases
from crossdock.deep_ep import Buffer, _memory
from deep_ep_cases import on_gpus
from deep_ep_reference import Batch, make_batch
from torch_defaults import OtherDefaults

SEED = 90
SLEEP_CYCLES = 100_000_000  # about 50 ms

pytestmark = pytest.mark.gpu


def large_batch(buffer: Buffer) -> Batch:
    ranks = buffer.group_size
    return make_batch(SEED, ranks, tokens=[500 - 3 * rank for rank in range(ranks)], hidden=2048)


@on_gpus()
def test_results_lie_in_symmetric_memory(buffer: Buffer) -> None:
    memory = buffer._live().memory
    caller = cases.Caller(buffer, large_batch(buffer))
    pair = caller.x.to(torch.float8_e4m3fn), torch.rand(len(caller.x), 16, device="cuda")
    (x, scales), idx, weights, *_ = caller.dispatch(pair, **caller.topk())
    for name, tensor in {"x": x, "scales": scales, "idx": idx, "weights": weights}.items():
        assert memory.owns(tensor), name
        assert tensor._base is None and tensor.storage_offset() == 0
    # A cached dispatch takes the place of rows that died, with what it needs and no more.
    handle = caller.dispatch_checked()
    del x, scales, idx, weights, tensor
    rows, *_ = buffer.dispatch(caller.x, handle)
    places = set()
    for _ in range(6):
        assert memory.owns(rows)
        places.add(rows.data_ptr())
        rows, *_ = buffer.dispatch(caller.x, handle)
        caller.check_rows(rows)
    assert len(places) <= 2


@pytest.mark.parametrize("streams", [{}, *cases.STREAMS[2:]], ids=cases.name_of)
@on_gpus()
def test_record_stream_keeps_memory_for_another_stream(
    buffer: Buffer, streams: dict[str, bool]
) -> None:
    """Another stream still copies rows, after a while, when they are dropped."""
    memory = buffer._live().memory
    batch = large_batch(buffer)
    caller = cases.Caller(buffer, batch, **streams)
    handle = caller.dispatch_checked()
    want = caller.on_device(batch.received(buffer.rank, batch.x))
    side = torch.cuda.Stream()
    owned, copies = [], []
    for number in range(8):
        rows, *_, event = buffer.dispatch(caller.x * 2.0**number, handle, **caller.events())
        caller.wait(event)
        owned.append(memory.owns(rows))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            copies.append(rows.clone())
        rows.record_stream(side)
        del rows
    torch.cuda.synchronize()
    assert owned[0], "no row lay in symmetric memory"
    wrong = [int((copy != want * 2.0**number).sum()) for number, copy in enumerate(copies)]
    assert wrong == [0] * len(copies)


@on_gpus()
def test_memory_of_a_storage_that_is_resized_to_nothing_serves_the_next(buffer: Buffer) -> None:
    memory = buffer._live().memory
    caller = cases.Caller(buffer, large_batch(buffer))
    x, idx, weights, _, handle, _ = caller.dispatch(**caller.topk())
    before = x.data_ptr()
    x.untyped_storage().resize_(0)
    again, *_ = buffer.dispatch(caller.x, handle)
    assert again.data_ptr() == before and memory.owns(again)
    caller.check_rows(again)
    cases.same("recv_topk_idx", idx, caller.batch.received_topk(buffer.rank)[0])
    cases.same("recv_topk_weights", weights, caller.batch.received_topk(buffer.rank)[1])
    x.untyped_storage().resize_(2 * x.numel())
    x.copy_(again)
    caller.check_rows(x)


@on_gpus()
def test_more_than_symmetric_memory_holds_is_ordinary_memory(buffer: Buffer) -> None:
    memory = buffer._live().memory
    caller = cases.Caller(buffer, large_batch(buffer))
    handle = caller.dispatch_checked()
    for _ in range(2):
        kept = [buffer.dispatch(caller.x, handle)[0]]
        while memory.owns(kept[-1]):
            assert len(kept) < 64
            kept.append(buffer.dispatch(caller.x, handle)[0])
        assert len(kept) > 2
        for rows in kept:
            caller.check_rows(rows)
        del kept, rows
    with torch.cuda.stream(torch.cuda.Stream()):
        caller.cached_checked(handle)  # on a stream that finds no symmetric memory left
        caller.combine_checked(handle, SEED, 1, weights=3)
        torch.cuda.current_stream().synchronize()
    cases.everything(buffer, SEED)


@on_gpus()
def test_tensors_outlive_a_buffer(buffer: Buffer) -> None:
    first = Buffer(dist.group.WORLD, explicitly_destroy=True)
    caller = cases.Caller(first, large_batch(buffer))
    x, *_, handle, _ = caller.dispatch(**caller.topk())
    session = handle.routing.batch.session
    assert session.memory.owns(x)
    first.destroy()
    del handle
    cases.everything(buffer, SEED)
    caller.check_rows(x)
    assert not session.comm.closed
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        copy = x.clone()
    x.record_stream(side)
    del x
    _memory.leave_unused()
    assert session.comm.closed
    caller.check_rows(copy)
    cases.everything(buffer, SEED)


@on_gpus(1)
def test_results_are_not_sent_to_other_processes(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, large_batch(buffer))
    x, *_ = caller.dispatch(**caller.topk())
    with pytest.raises(RuntimeError, match=r"symmetric memory .* send tensor.clone\(\)"):
        ForkingPickler.dumps(x[3:])
    ForkingPickler.dumps(x.clone())


@on_gpus()
def test_buffer_runs_under_another_default_device(buffer: Buffer) -> None:
    defaults = OtherDefaults(f"cuda:{buffer.rank}", torch.float64)
    with defaults, cases.new_buffer() as other:
        cases.everything(other, SEED)
