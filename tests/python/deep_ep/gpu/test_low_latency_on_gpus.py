"""The Buffer's low-latency calls on GPUs, one rank per GPU: the CPU's cases, streams, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import low_latency_cases as cases
from crossdock.errors import InvalidArgument
from support import run_ranks

pytestmark = pytest.mark.gpu

SEED = 130
RANKS = [ranks for ranks in (1, 2, 4) if ranks <= torch.cuda.device_count()] or [1]
CASES = ["plain", "fp8", "as_vllm_calls", "as_sglang_calls", "copies", "both_modes", "shapes"]


def run_case(me: Any, name: str, options: dict[str, Any]) -> None:
    torch.cuda.set_device(me.rank)
    with cases.low_latency_buffer(me, "nccl", **options) as buffer:
        getattr(cases, name)(buffer, SEED)
        torch.cuda.synchronize()
        cases.plain(buffer, SEED)  # raises what has been met


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_calls_equal_reference(name: str, ranks: int) -> None:
    print(f"seed {SEED}")
    run_ranks(ranks, run_case, name, {}, timeout=180)


@pytest.mark.skipif(RANKS[-1] < 2, reason="peers need a second GPU")
def test_a_rank_is_left_out_and_comes_back() -> None:
    print(f"seed {SEED}")
    run_ranks(RANKS[-1], run_case, "left_out", {"enable_shrink": True}, timeout=180)


def other_streams(me: Any) -> None:
    """Hooks on other streams than their calls; async operations between them; tensors that die."""
    torch.cuda.set_device(me.rank)
    with cases.low_latency_buffer(me, "nccl") as buffer:
        streams = [torch.cuda.Stream() for _ in range(2)]
        for number in range(10):
            batches = [cases.Batch(SEED + 2 * number + i, buffer) for i in range(2)]
            torch.cuda.synchronize()
            sent = []
            for batch, stream in zip(batches, streams):
                with torch.cuda.stream(stream):
                    sent.append(batch.dispatch(buffer, return_recv_hook=True))
            for batch, (x, count, handle, _, hook) in zip(batches, sent):
                with torch.cuda.stream(streams[number % 2]):
                    hook()
                    results = batch.experts_of(x)
                    out, event, _ = batch.combine(buffer, results, handle, async_finish=True)
                    del results
                    torch.full((1 << 22,), float("nan"), device=batch.device)
                    event.current_stream_wait()
                    batch.check_rows(x, count, handle)
                    batch.check_sums(out)


def test_operations_on_several_streams_run_in_order() -> None:
    run_ranks(RANKS[-1], other_streams, timeout=180)


def capture(me: Any) -> None:
    """Two micro-batches with hooks in one graph, replayed with other routing and eager between."""
    torch.cuda.set_device(me.rank)
    with cases.low_latency_buffer(me, "nccl") as buffer:
        batches = [cases.Batch(SEED + i, buffer) for i in range(4)]
        inputs = [
            tuple(part.clone() for part in (batch.x, batch.topk_idx, batch.topk_weights))
            for batch in batches[:2]
        ]

        def step() -> list[torch.Tensor]:
            sent = [
                buffer.low_latency_dispatch(
                    x, idx, cases.MOST, batches[0].experts, use_fp8=False, return_recv_hook=True
                )
                for x, idx, _ in inputs
            ]
            returning = []
            for (x, _, handle, _, hook), (_, idx, weights) in zip(sent, inputs):
                hook()
                rows = batches[0].experts_of(x)
                returning.append(
                    buffer.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True)
                )
            for _, _, hook in returning:
                hook()
            return [out for out, _, _ in returning]

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = step()
        for number in range(100):
            now = [batches[(number + i) % 4] for i in range(2)]
            for given, batch in zip(inputs, now):
                for part, value in zip(given, (batch.x, batch.topk_idx, batch.topk_weights)):
                    part.copy_(value)
            graph.replay()
            for batch, out in zip(now, outs):
                batch.check_sums(out)
            if number % 10 == 0:
                cases.plain(buffer, SEED + number)


def test_graph_with_hooks_follows_new_routing() -> None:
    print(f"seed {SEED}")
    run_ranks(RANKS[-1], capture, timeout=180)


def refused_in_a_capture(me: Any) -> None:
    torch.cuda.set_device(me.rank)
    with cases.low_latency_buffer(me, "nccl") as buffer:
        batch = cases.Batch(SEED, buffer)
        with pytest.raises(ValueError, match="expected sizes that have been used before"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                batch.dispatch(buffer)
        torch.cuda.synchronize()
        cases.plain(buffer, SEED)


def test_new_sizes_are_refused_in_a_capture() -> None:
    run_ranks(RANKS[-1], refused_in_a_capture)


def bad_ids(me: Any) -> None:
    """What a kernel finds is raised once, by a later call, which has been enqueued all the same."""
    torch.cuda.set_device(me.rank)
    with cases.low_latency_buffer(me, "nccl") as buffer:
        batch = cases.Batch(SEED, buffer)
        batch.dispatch(buffer)
        idx = batch.topk_idx.clone()
        if me.rank == 0:
            idx[0, 0] = batch.experts
        buffer.low_latency_dispatch(batch.x, idx, cases.MOST, batch.experts, use_fp8=False)
        torch.cuda.synchronize()
        with pytest.raises(InvalidArgument):
            batch.dispatch(buffer)
        cases.plain(buffer, SEED)


def test_errors_of_kernels_are_raised_by_a_later_call() -> None:
    run_ranks(RANKS[-1], bad_ids)
