"""Features of GPUs alone, for products of spread matrices: CUDA graphs, streams, status."""

from __future__ import annotations

import pytest
import torch

import crossdock.torch as xd
from crossdock.torch import tp
from support import Rank, on_ranks
from test_tp_compile import HIDDEN, INNER, Block, block_of
from torch_ranks import gpu_ranks, run_on_gpus
from torch_support import settle
from tp_support import context, equal, whole

pytestmark = pytest.mark.gpu

on_gpus = on_ranks(gpu_ranks()[-1], run=run_on_gpus, timeout=120)


@on_gpus
def test_a_training_step_is_captured_in_a_graph(me: Rank) -> None:
    """A training step as a CUDA graph: replayed with other data, and eager calls between."""
    with xd.init() as comm:
        assert comm.device == torch.device("cuda", me.rank)
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


@on_gpus
def test_operations_run_on_the_current_stream(me: Rank) -> None:
    with xd.init() as comm:
        assert comm.device == torch.device("cuda", me.rank)
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
