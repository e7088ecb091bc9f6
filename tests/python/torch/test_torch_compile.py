"""torch.compile(fullgraph=True) of a block: forward and backward, with any number of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import Mismatch
from crossdock.torch import tp
from support import Rank, on_ranks
from torch_support import Batch, assert_equal, layer, recording, reported, settle

SEED = 17
CASE = ((6, 0), 8, 3, 32)


# 0 and 1 are special to the compiler, and a second number makes it compile for any.
STEPS = [(5, 0), (4, 3), (1, 7), (0, 1), (6, 9)]


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
@on_ranks(2, timeout=200)
def test_block_compiles_for_any_tokens(me: Rank, layout: str) -> None:
    torch._dynamo.reset()
    batches = [
        Batch(SEED + number, (tokens, 8, 3, 32), layout) for number, tokens in enumerate(STEPS)
    ]
    with xd.init() as comm:
        group = batches[0].group(max_tokens_per_rank=16)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def block(topk_idx, x, weights):
            plan = group.prepare(topk_idx)
            # Arithmetic around the operations, for the compiler to move if it could.
            return layer(plan, x * 2, weights) + x

        for batch in batches:
            topk_idx, x, weights, grad_out = batch.local(me.rank)
            got = block(topk_idx, x, weights)
            got.backward(grad_out)
            out, grad_x, grad_weights = batch.expected(me.rank)
            assert_equal("out", got, 2 * out + batch.x[me.rank])
            assert_equal("gradient of x", x.grad, 2 * grad_x + batch.grad_out[me.rank])
            assert_equal("gradient of weights", weights.grad, 2 * grad_weights)
        comm.barrier()


@on_ranks(2, timeout=200)
def test_operations_of_a_graph_are_one_chain(me: Rank) -> None:
    """Also between branches, and in the backward pass: by data, not by their place in the graph."""
    torch._dynamo.reset()
    chains: list[list[str]] = []
    batches = Batch(SEED + 20, CASE), Batch(SEED + 21, CASE)
    with xd.init():
        group = batches[0].group()

        @torch.compile(fullgraph=True, backend=recording(chains))
        def block(one, other):
            plan = group.prepare(one[0])
            out = layer(plan, one[1], one[2])
            later = group.prepare(other[0], after=plan)
            return out, layer(later, other[1], other[2])

        inputs = [batch.local(me.rank) for batch in batches]
        outs = block(inputs[0][:3], inputs[1][:3])
        torch.autograd.backward(outs, [local[3] for local in inputs])
        for batch, out, (_, x, weights, _) in zip(batches, outs, inputs):
            batch.check(me.rank, out, x, weights)
    assert chains == [["prepare", "dispatch", "combine"] * 2, ["combine_bwd", "dispatch_bwd"] * 2]


@on_ranks(2, timeout=200)
def test_quantised_rows_and_their_gradient(me: Rank) -> None:
    torch._dynamo.reset()
    batch = Batch(SEED + 60, ((6, 0), 8, 3, 128))
    with xd.init():
        group = batch.group(torch.bfloat16)

        def block(topk_idx, x):
            received = xd.dispatch(group.prepare(topk_idx), x, quantise=True)
            return xd.dequantise(received, torch.float32) * 2

        topk_idx, x, _, _ = batch.local(me.rank, torch.bfloat16)
        eager = block(topk_idx, x)
        (expected,) = torch.autograd.grad(eager.sum(), x)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(topk_idx, x)
        (got,) = torch.autograd.grad(compiled.sum(), x)
        assert torch.equal(compiled, eager)
        assert torch.equal(got, expected)
        assert me.rank == 1 or float(got.abs().sum()) > 0


@on_ranks(2, timeout=200)
def test_plan_from_outside(me: Rank) -> None:
    """A plan made outside, used and moved on inside a compiled function."""
    torch._dynamo.reset()
    batch = Batch(SEED + 30, CASE)
    with xd.init():
        topk_idx, x, weights, grad_out = batch.local(me.rank)
        plan = batch.group().prepare(topk_idx)
        before = plan.order
        out = torch.compile(layer, fullgraph=True, backend="aot_eager")(plan, x, weights)
        assert plan.order is not before
        out.backward(grad_out)
        batch.check(me.rank, out, x, weights)


def test_exact_shapes_are_refused():
    batch = Batch(SEED + 40, ((4,), 8, 3, 32))
    with xd.init():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(0)

        @torch.compile(fullgraph=True, backend="eager")
        def block(x):
            return xd.dispatch(group.prepare(topk_idx), x, weights, exact=True).tokens

        # torch 2.6 shows the line that has raised, not what.
        with pytest.raises(Exception, match="exact: expected False under torch.compile|exact=True"):
            block(x)


@on_ranks(2, timeout=200)
def test_mistakes_inside_compiled_code_reach_the_peers(me: Rank) -> None:
    """Checks run where operations run, so that peers hear of mistakes inside compiled code too."""
    torch._dynamo.reset()
    tokens, *sizes = CASE
    batch = Batch(SEED + 50, (tokens[: me.num_ranks], *sizes))
    with xd.init(), torch.no_grad():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        block = torch.compile(
            lambda topk_idx, x, weights: layer(group.prepare(topk_idx), x, weights),
            fullgraph=True,
            backend="aot_eager",
        )
        assert_equal("out", block(topk_idx, x, weights), batch.expected(me.rank)[0])
        bad = me.rank == 0
        kind, words = (TypeError, "topk_weights") if bad else (Mismatch, "rank 0")
        with reported(group, kind, words):
            block(topk_idx, x, weights.bfloat16() if bad else weights)
        assert_equal("out", block(topk_idx, x, weights), batch.expected(me.rank)[0])


@on_ranks(2, timeout=400)
def test_inductor_leaves_out_nothing_on_a_rank_without_tokens(me: Rank) -> None:
    """A rank without tokens has a constant loss, and gradients that are always zero."""
    torch._dynamo.reset()
    batch = Batch(SEED + 10, CASE)
    with xd.init():
        group = batch.group()

        @torch.compile(fullgraph=True, backend="inductor")
        def loss(topk_idx, x, weights, matrix):
            plan = group.prepare(topk_idx)
            # The result of row_experts, computed; the compiler chooses where boundaries lie.
            rows = torch.arange(group.rows, dtype=torch.int32, device=topk_idx.device)
            experts = plan.row_experts(), torch.bucketize(rows, plan.ends, right=True)
            return layer(plan, x @ matrix, weights).sum(), *experts

        topk_idx, x, weights, _ = batch.local(me.rank)
        matrix = torch.eye(32, requires_grad=True)
        with torch.no_grad():
            loss(topk_idx, x, weights, matrix)
        total, experts, zones = loss(topk_idx, x, weights, matrix)
        expected = batch.routing.row_experts(me.rank)
        assert experts.tolist() == [*expected, *[-1] * (group.rows - len(expected))]
        assert torch.equal(zones, torch.where(experts < 0, group.num_local_experts, experts))
        total.backward()
        scale = (batch.factors(me.rank) * batch.weights[me.rank]).sum(1, keepdims=True)
        expected = batch.x[me.rank].T @ np.broadcast_to(scale, batch.x[me.rank].shape)
        assert_equal("gradient of the matrix", matrix.grad, expected)
        assert_equal("gradient of x", x.grad, np.broadcast_to(scale, x.shape))
        dots = batch.factors(me.rank) * batch.x[me.rank].sum(1, keepdims=True)
        assert_equal("gradient of weights", weights.grad, dots)


@on_ranks(2, timeout=200)
def test_operators_called_eagerly_are_not_looked_into(me: Rank) -> None:
    """Operators that eager code calls while a compiler watches, which must not look into them."""
    torch._dynamo.reset()
    batch = Batch(SEED, CASE)
    with xd.init(), torch.no_grad():
        group, context = batch.group(), tp.TpContext(max_tokens=16, max_k=32, max_n=32)
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        order, sizes = plan.order, (plan.num_tokens, plan.topk)
        matrix = torch.eye(32, dtype=torch.bfloat16)

        def inner(x):
            try:  # the compiler leaves the whole function to Python
                torch._dynamo.graph_break()
            finally:
                rows = torch.ops.crossdock.dispatch.default(
                    plan.data, x, weights, None, order, group.handle, *sizes, 0
                )
                context_args = (context.order, context.handle, None, 0, 0, False, 0)
                product = torch.ops.crossdock.tp_matmul_all_reduce.default(
                    matrix, matrix, None, None, *context_args
                )
            return rows[0], product[0]

        want = inner(x)
        for got, one in zip(torch.compile(inner, backend="eager")(x), want):
            assert torch.equal(got, one)
        settle(group)
