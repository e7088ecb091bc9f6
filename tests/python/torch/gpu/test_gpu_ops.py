"""Features of GPUs alone, for dispatch and combine: streams, reuse of memory, CUDA graphs, status.

As many ranks as there are GPUs (4, 2 or 1), whose processes serve all tests of this file. Cases
that GPUs and the CPU have in common, mistakes among them, are in the files test_gpu_cases_*.
"""

from __future__ import annotations

import pytest
import torch

import crossdock.torch as xd
import test_torch_low_latency as low_latency
from crossdock.errors import PeerLost
from slots import factors
from support import Rank, on_ranks
from torch_ranks import gpu_ranks
from torch_support import Batch, assert_equal, experts, layer, poison, reported

pytestmark = pytest.mark.gpu

SEED = 2026
LAYOUTS = ("expert_major", "rank_major")
DTYPE = torch.bfloat16


on_gpus = on_ranks(gpu_ranks()[-1], timeout=120)


def case(num_ranks: int, even: bool = False) -> tuple:
    """Sizes of a batch; `even`: no rank without tokens, for shapes that stay between batches."""
    tokens = (33, 7, 64, 1) if even else (33, 0, 64, 1)
    return tokens[:num_ranks], 8, 3, 128


def join(me: Rank, **options) -> xd.Comm:
    torch.cuda.set_device(me.rank)
    comm = xd.init(**options)
    assert comm.device == torch.device("cuda", me.rank), comm.device
    return comm


@on_gpus
def test_operations_use_the_current_stream(me: Rank) -> None:
    batch = Batch(SEED + 2, case(me.num_ranks))
    with join(me):
        group = batch.group(DTYPE)
        main = torch.cuda.current_stream()
        for _ in range(3):  # the group's operations go to and fro between streams
            side = torch.cuda.Stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                topk_idx, x, weights, grad_out = batch.local(me.rank, DTYPE, "cuda")
                torch.cuda._sleep(10_000_000)
                out = layer(group.prepare(topk_idx), x, weights)
                out.backward(grad_out)
            main.wait_stream(side)
            batch.check(me.rank, out, x, weights)
            topk_idx, x, weights, grad_out = batch.local(me.rank, DTYPE, "cuda")
            out = layer(group.prepare(topk_idx), x, weights)
            out.backward(grad_out)
            batch.check(me.rank, out, x, weights)


@pytest.mark.parametrize("told", [True, False], ids=["recorded", "seen"])
@on_gpus
def test_memory_in_use_by_another_stream_is_not_reused(me: Rank, told: bool) -> None:
    """A block that another stream still reads is not reused, whether told or seen at its death."""
    size = 1 << 20
    with join(me, heap_bytes=32 << 20) as comm:
        side = torch.cuda.Stream()
        copy = torch.empty(size, device="cuda")
        tensor = comm.empty_symmetric((size,), torch.float32).fill_(1)
        address = tensor.data_ptr()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)
            copy.copy_(tensor)
            if not told:
                del tensor
        if told:
            comm.record_stream(tensor, side)
            del tensor
        other = comm.empty_symmetric((size,), torch.float32).fill_(2)
        assert not side.query(), "the other stream was done too early to tell anything"
        assert other.data_ptr() != address
        torch.cuda.synchronize()
        assert bool((copy == 1).all())
        assert comm.empty_symmetric((size,), torch.float32).data_ptr() == address


@on_gpus
def test_inputs_may_be_dropped_at_once(me: Rank) -> None:
    """Inputs may die, and their memory be written again, as soon as a call has returned."""
    batch = Batch(SEED + 3, case(me.num_ranks))
    with join(me), torch.no_grad():
        group = batch.group(DTYPE)
        topk_idx, x, weights, _ = batch.local(me.rank, DTYPE, "cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)

        def overwrite(like: torch.Tensor) -> None:
            torch.full_like(like, 7)

        idx_like, x_like = torch.empty_like(topk_idx), torch.empty_like(x)
        plan = group.prepare(topk_idx.clone())
        overwrite(idx_like)
        received = xd.dispatch(plan, x.clone(), weights.clone())
        overwrite(x_like)
        out = xd.combine(plan, experts(plan, received).clone(), received.weights.clone())
        overwrite(received.tokens)
        assert_equal("out", out, batch.expected(me.rank)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@on_gpus
def test_graph_of_a_layer_replays_with_other_routing(me: Rank, layout: str) -> None:
    batches = [Batch(SEED + 10 + i, case(me.num_ranks, even=True), layout) for i in range(4)]
    with join(me) as comm:
        group = batches[0].group(DTYPE, symmetric_tensors=12)
        topk_idx, x, weights, grad_out = batches[0].local(me.rank, DTYPE, "cuda")
        in_place = []

        def step() -> torch.Tensor:
            x.grad = weights.grad = None
            plan = group.prepare(topk_idx)
            received = xd.dispatch(plan, x, weights)
            in_place.append(comm.pool.owns(received.tokens))
            beside = None if layout == "rank_major" else received.weights
            out = xd.combine(plan, experts(plan, received), beside)
            out.backward(grad_out)
            return out

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        poison(comm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        assert all(in_place)
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match="exact"):
            xd.dispatch(group.prepare(topk_idx), x, exact=True)
        for batch in batches:
            with torch.no_grad():
                for static, new in zip(
                    (topk_idx, x, weights, grad_out), batch.local(me.rank, DTYPE, "cuda")
                ):
                    static.copy_(new)
            graph.replay()
            batch.check(me.rank, out, x, weights)
            # Work beside the graph takes other memory than the graph has.
            eager = batch.local(me.rank, DTYPE, "cuda")
            got = layer(group.prepare(eager[0]), eager[1], eager[2])
            got.backward(eager[3])
            batch.check(me.rank, got, eager[1], eager[2])
            batch.check(me.rank, out, x, weights)
        torch.cuda.synchronize()
        group.check()


@pytest.mark.skipif(gpu_ranks()[-1] < 2, reason="peers need a second GPU")
@on_gpus
def test_a_captured_step_finds_the_loss_that_has_spoiled_it(me: Rank) -> None:
    """It compares the group's word behind its operations with what it was in front of them."""
    batch, late = low_latency.Batch(SEED, me.num_ranks), me.num_ranks - 1
    with join(me) as comm, torch.no_grad():
        group = low_latency.make_group(
            dtype=torch.float32, on_peer_loss="mask", wait_timeout_ms=2000
        )
        local = [part.cuda() for part in batch.local(me.rank)]
        gains = torch.from_numpy(factors(group.num_local_experts)).to("cuda", torch.float32)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            before = group.faults.clone()
            slots = xd.ll_dispatch(group, *local)
            out = xd.ll_combine(slots.plan, slots.tokens * gains)
            return out, group.faults == before

        step()
        torch.cuda.synchronize()
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, whole = step()
        for _ in range(3):
            graph.replay()
            batch.check_sums(me.rank, out)
            assert whole.item()
        comm.barrier()
        if me.rank != late:
            with reported(group, PeerLost, f"rank {late}"):
                graph.replay()
            assert not whole.item()
            graph.replay()
            assert whole.item()
        comm.barrier()
        del graph
