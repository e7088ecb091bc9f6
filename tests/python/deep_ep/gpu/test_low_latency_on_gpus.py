"""The Buffer's low-latency calls on GPUs, one rank per GPU: the CPU's cases, streams, graphs."""

from __future__ import annotations

import pytest
import torch

import low_latency_cases as cases
import test_wire as wire
from crossdock.deep_ep import Buffer
from crossdock.errors import InvalidArgument
from deep_ep_cases import on_gpus
from support import Apart
from torch_ranks import gpu_ranks

SEED = 130
RANKS = gpu_ranks()

pytestmark = pytest.mark.gpu
needs_peers = pytest.mark.skipif(RANKS == [1], reason="peers need a second GPU")


@on_gpus(*RANKS, **cases.LOW_LATENCY)
@pytest.mark.parametrize("name", cases.CASES)
def test_calls_equal_reference(buffer: Buffer, name: str) -> None:
    getattr(cases, name)(buffer, SEED)
    torch.cuda.synchronize()
    cases.plain(buffer, SEED)  # raises what has been met


test_wires_of_few_tokens = on_gpus(*RANKS, **cases.LOW_LATENCY)(wire.test_few_tokens)


@needs_peers
@on_gpus(Apart(RANKS[-1]), **cases.LOW_LATENCY)
def test_calls_equal_reference_between_hosts(buffer: Buffer) -> None:
    assert buffer.num_rdma_ranks == 2
    for name in cases.CASES:
        getattr(cases, name)(buffer, SEED)
    torch.cuda.synchronize()
    cases.plain(buffer, SEED)  # raises what has been met
    buffer.combine_wire = "fp8"
    with pytest.raises(ValueError, match="expected 'same' on cuda:. of several machines"):
        cases.plain(buffer, SEED)


@needs_peers
@on_gpus(**cases.SHRINKING)
def test_a_rank_is_left_out_and_comes_back(buffer: Buffer) -> None:
    cases.left_out(buffer, SEED)
    torch.cuda.synchronize()
    cases.plain(buffer, SEED)  # raises what has been met


@on_gpus(**cases.LOW_LATENCY)
def test_operations_on_several_streams_run_in_order(buffer: Buffer) -> None:
    """Hooks on other streams than their calls; async operations between them; tensors that die."""
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


@on_gpus(**cases.LOW_LATENCY)
def test_graph_with_hooks_follows_new_routing(buffer: Buffer) -> None:
    """Two micro-batches with hooks in one graph, replayed with other routing and eager between."""
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


@on_gpus(**cases.LOW_LATENCY)
def test_profilers_find_kernels_by_the_names_of_operations(buffer: Buffer) -> None:
    """As DeepEP's own tests look for them: two for each call with a hook."""
    batch = cases.Batch(SEED, buffer)
    batch.dispatch(buffer)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        x, _, handle, _, hook = batch.dispatch(buffer, return_recv_hook=True)
        hook()
        _, _, hook = batch.combine(buffer, batch.experts_of(x), handle, return_recv_hook=True)
        hook()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    for operation in ("dispatch", "combine"):
        assert sum(f"::{operation}" in name for name in names) == 2, names


@on_gpus(**cases.LOW_LATENCY)
def test_new_sizes_are_refused_in_a_capture(buffer: Buffer) -> None:
    batch = cases.Batch(SEED, buffer)
    with pytest.raises(ValueError, match="expected sizes that have been used before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            batch.dispatch(buffer)
    torch.cuda.synchronize()
    cases.plain(buffer, SEED)


@on_gpus(**cases.LOW_LATENCY)
def test_errors_of_kernels_are_raised_by_a_later_call(buffer: Buffer) -> None:
    """A kernel's error is raised once, by a later call, which has been enqueued all the same."""
    batch = cases.Batch(SEED, buffer)
    batch.dispatch(buffer)
    idx = batch.topk_idx.clone()
    if buffer.rank == 0:
        idx[0, 0] = batch.experts
    buffer.low_latency_dispatch(batch.x, idx, cases.MOST, batch.experts, use_fp8=False)
    torch.cuda.synchronize()
    with pytest.raises(InvalidArgument):
        batch.dispatch(buffer)
    cases.plain(buffer, SEED)
