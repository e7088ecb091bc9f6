"""Features of GPUs alone, for products of spread matrices: CUDA graphs, streams, status."""

from __future__ import annotations

import pytest
import torch

import crossdock.torch as xd
from crossdock.torch import tp
from support import Rank, run_ranks
from test_tp_compile import HIDDEN, INNER, Block, block_of
from tp_support import context, equal, settle, whole

pytestmark = pytest.mark.gpu

# Ranks to test with.
RANKS = max((ranks for ranks in (1, 2, 4) if ranks <= torch.cuda.device_count()), default=1)


def run(fn, *args) -> None:
    run_ranks(RANKS, on_gpu, fn, *args, timeout=120)


def on_gpu(me: Rank, fn, *args) -> None:
    torch.cuda.set_device(me.rank)
    torch.set_default_device(torch.device("cuda", me.rank))
    try:
        with xd.init() as comm:
            assert comm.device == torch.device("cuda", me.rank)
            fn(me, *args)
    finally:
        torch.set_default_device(None)


def captured(me: Rank) -> None:
    """A training step as a CUDA graph: replayed with other data, and eager calls between."""
    tokens = (16, 8, 4, 0)[: me.num_ranks]
    where = context(tokens, INNER, torch.float32)
    block = Block(me, tokens, 1)
    step = block_of(where)
    leaves = block.leaves

    def run_step() -> torch.Tensor:
        out = step(*leaves, tokens)
        out.sum().backward()
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_step()
    torch.cuda.current_stream().wait_stream(side)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_step()
    grads = [leaf.grad for leaf in leaves]
    for seed in range(2, 12):
        fresh = Block(me, tokens, 10 * seed)
        with torch.no_grad():
            for leaf, new in zip(leaves, fresh.leaves):
                leaf.copy_(new)
        for leaf, grad in zip(leaves, grads):
            leaf.grad = grad.zero_()
        graph.replay()
        settle(where)
        for mine, leaf in zip(fresh.leaves, leaves):
            mine.grad = leaf.grad.clone()
        fresh.check(out)
        eager = Block(me, tokens, 10 * seed)
        result = step(*eager.leaves, tokens)
        result.sum().backward()
        settle(where)
        eager.check(result)


def test_a_training_step_is_captured_in_a_graph() -> None:
    run(captured)


def other_stream(me: Rank) -> None:
    where = context((8,), INNER, torch.bfloat16)
    x, weight = whole(1, 8, HIDDEN).bfloat16(), whole(2, INNER, HIDDEN).bfloat16()
    want = torch.cat([x] * me.num_ranks) @ weight.t()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            out = tp.all_gather_matmul(x, weight.t(), where)
    torch.cuda.current_stream().wait_stream(stream)
    settle(where)
    equal("result", out, want)


def test_operations_run_on_the_current_stream() -> None:
    run(other_stream)
