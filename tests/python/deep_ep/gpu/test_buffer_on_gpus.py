"""The Buffer on GPUs, one rank per GPU: modes, streams, overlap, graphs, errors of the device."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_ep_cases as cases
from crossdock.deep_ep import Buffer
from crossdock.errors import CrossdockError, Mismatch
from deep_ep_reference import make_batch
from support import run_ranks

pytestmark = pytest.mark.gpu

SEED = 50
MODES = [
    "everything",
    "by_rank_alone",
    "worst_case",
    "fp8_pairs",
    "plain_bytes",
    "repeated_ids",
    "slices",
    "outgrown",
]
ASYNC = {"previous": True, "async_finish": True}
SLEEP_CYCLES = 1_000_000_000  # about half a second


# Ranks to test with, ascending; all tests run with the most, and one of the modes with all of them.
RANKS = [ranks for ranks in (2, 4) if ranks <= torch.cuda.device_count()] or [1]


def on_ranks(fn: Callable[..., None], *args: Any, ranks: int = RANKS[-1]) -> None:
    """Runs ``fn`` on as many GPUs."""
    run_ranks(ranks, fn, *args, timeout=180)


def on_gpu(me: Any) -> Any:
    """A Buffer on this rank's GPU."""
    torch.cuda.set_device(me.rank)
    return cases.buffer_of(me, "nccl")


def run_mode(me: Any, name: str, streams: dict[str, bool]) -> None:
    with on_gpu(me) as buffer:
        getattr(cases, name)(buffer, SEED, **streams)


@pytest.mark.parametrize(
    "streams",
    [
        {},
        {"async_finish": True},
        {"previous": True},
        ASYNC,
        {**ASYNC, "allocate_on_comm_stream": True},
    ],
    ids=lambda streams: "+".join(streams) or "waiting",
)
@pytest.mark.parametrize("name", MODES)
def test_mode_equals_reference(name: str, streams: dict[str, bool]) -> None:
    print(f"seed {SEED}")
    on_ranks(run_mode, name, streams)


@pytest.mark.parametrize("ranks", RANKS[:-1])
def test_modes_equal_reference_with_fewer_ranks(ranks: int) -> None:
    print(f"seed {SEED}")
    on_ranks(run_mode, "everything", {}, ranks=ranks)


def run_between_hosts(me: Any, names: list[str]) -> None:
    with on_gpu(me) as buffer:
        assert buffer.num_rdma_ranks == 2
        for name in names:
            getattr(cases, name)(buffer, SEED, async_finish=True)


@pytest.mark.skipif(RANKS == [1], reason="hosts of one rank need two GPUs")
def test_modes_equal_reference_between_hosts() -> None:
    print(f"seed {SEED}")
    run_ranks(RANKS[-1], run_between_hosts, MODES, timeout=180, apart=True)


def run_beside_work(me: Any) -> None:
    with on_gpu(me) as buffer:
        caller = cases.Caller(buffer, make_batch(SEED, me.num_ranks))
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
        outputs = [caller.batch.received(rank, caller.batch.x) for rank in range(me.num_ranks)]
        cases.same("combined_x", combined, caller.batch.combined(me.rank, outputs))


def test_operations_run_beside_the_callers_work() -> None:
    on_ranks(run_beside_work)


def drop_at_once(me: Any) -> None:
    """Tensors die as soon as work with them is enqueued."""
    rounds = 20
    with on_gpu(me) as buffer:
        batch = make_batch(SEED, me.num_ranks, tokens=500, hidden=2048)
        caller = cases.Caller(buffer, batch)
        handle = caller.dispatch_checked()
        outputs = [batch.received(rank, batch.x) for rank in range(me.num_ranks)]
        want = caller.on_device(batch.combined(me.rank, outputs))
        received = caller.on_device(outputs[me.rank])
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


def test_memory_of_dropped_tensors_is_not_reused_too_soon() -> None:
    print(f"seed {SEED}")
    on_ranks(drop_at_once)


def capture_graph(me: Any) -> None:
    with on_gpu(me) as buffer:
        batches = [
            make_batch(SEED + n, me.num_ranks, tokens=[17 - r for r in range(me.num_ranks)])
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
                num_worst_tokens=17 * me.num_ranks,
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
            outputs = [batch.received(rank, batch.x) for rank in range(me.num_ranks)]
            cases.same("replayed", out, batch.combined(me.rank, outputs))
        del out, graph
        cases.everything(buffer, SEED)


def test_graph_of_a_layer_follows_new_routing() -> None:
    on_ranks(capture_graph)


def err_on_device(me: Any) -> None:
    """The next dispatch raises errors that peers can know only later, on all ranks, once."""
    with on_gpu(me) as buffer:
        batch = make_batch(SEED, me.num_ranks, tokens=[17, 9, 5, 0][: me.num_ranks])
        caller = cases.Caller(buffer, batch)
        handle = caller.dispatch_checked()
        layout, topk = caller.layout(), caller.topk()
        rows = caller.on_device(batch.received(me.rank, batch.x))
        row_weights = caller.on_device(batch.received_topk(me.rank)[1])
        worst = 17 * me.num_ranks
        buffer.dispatch(caller.x, **layout, **topk, num_worst_tokens=worst)
        bad_ids = {**topk, "topk_idx": torch.full_like(caller.topk_idx, batch.num_experts)}
        first = me.rank == 0
        bias = torch.zeros_like(caller.x)

        def bad_ids_unseen() -> None:
            buffer.dispatch(
                caller.x, **layout, **(bad_ids if first else topk), num_worst_tokens=worst
            )

        def in_cached() -> None:
            x = caller.x[1:] if first else caller.x
            buffer.dispatch(x, handle)

        def in_worst() -> None:
            x = caller.x[0] if first else caller.x
            buffer.dispatch(x, **layout, **topk, num_worst_tokens=worst)

        def in_combine() -> None:
            x = rows[0] if first else rows
            buffer.combine(x, handle, row_weights, (bias, bias))

        began = datetime.datetime.now()
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
        assert datetime.datetime.now() - began < datetime.timedelta(seconds=30)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="peers need a second GPU")
def test_errors_of_the_device_reach_all_ranks() -> None:
    on_ranks(err_on_device)


def disagree_in_worst_tokens(me: Any) -> None:
    with on_gpu(me) as buffer:
        caller = cases.Caller(buffer, make_batch(SEED, me.num_ranks))
        known = 17 * me.num_ranks
        caller.dispatch(**caller.topk(), num_worst_tokens=known)
        began = datetime.datetime.now()
        for odd in range(me.num_ranks):
            if me.rank == odd:
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
        assert datetime.datetime.now() - began < datetime.timedelta(seconds=30)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="peers need a second GPU")
def test_unequal_num_worst_tokens_leave_nobody_waiting() -> None:
    on_ranks(disagree_in_worst_tokens)


def be_on_gpu(me: Any) -> None:
    with on_gpu(me) as buffer:
        assert Buffer.is_sm90_compiled()
        assert isinstance(buffer.get_comm_stream(), torch.cuda.Stream)
        assert buffer.get_comm_stream().device.index == me.rank
        assert buffer.get_local_buffer_tensor(torch.uint8).device.index == me.rank
        batch = make_batch(SEED, me.num_ranks)
        with pytest.raises(ValueError, match=f"topk_idx: expected a tensor on cuda:{me.rank}"):
            buffer.get_dispatch_layout(batch.topk_idx[0], batch.num_experts)


def test_buffer_is_on_the_current_device() -> None:
    on_ranks(be_on_gpu)
