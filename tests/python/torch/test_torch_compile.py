"""torch.compile(fullgraph=True) of a block: forward and backward, with any number of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import crossdock.torch as xd
from crossdock.errors import Mismatch
from crossdock.torch import tp
from support import Rank, run_ranks
from torch_support import Batch, assert_equal, layer, reported, settle

SEED = 17
CASE = ((6, 0), 8, 3, 32)


def _check(batch: Batch, rank: int, out, x, weights) -> None:
    expected = batch.expected(rank)
    for name, got, want in zip(("out", "x", "weights"), (out, x.grad, weights.grad), expected):
        assert_equal(name, got, want)


def _block(me: Rank, layout: str, steps: list[tuple[int, ...]]) -> None:
    torch._dynamo.reset()
    with xd.init() as comm:
        group = xd.EpGroup(
            num_experts=8,
            hidden=32,
            max_topk=3,
            max_tokens_per_rank=16,
            layout=layout,
            dtype=torch.float32,
        )

        @torch.compile(fullgraph=True, backend="aot_eager")
        def block(topk_idx, x, weights):
            plan = group.prepare(topk_idx)
            # Arithmetic around the operations, for the compiler to move if it could.
            return layer(plan, x * 2, weights) + x

        for number, tokens in enumerate(steps):
            batch = Batch(SEED + number, (tokens, 8, 3, 32), layout)
            topk_idx, x, weights, grad_out = batch.local(me.rank)
            got = block(topk_idx, x, weights)
            got.backward(grad_out)
            out, grad_x, grad_weights = batch.expected(me.rank)
            assert_equal("out", got, 2 * out + batch.x[me.rank])
            assert_equal("gradient of x", x.grad, 2 * grad_x + batch.grad_out[me.rank])
            assert_equal("gradient of weights", weights.grad, 2 * grad_weights)
        comm.barrier()


# 0 and 1 are special to the compiler, and a second number makes it compile for any.
STEPS = [(5, 0), (4, 3), (1, 7), (0, 1), (6, 9)]


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_block_compiles_for_any_tokens(layout):
    run_ranks(2, _block, layout, STEPS, timeout=200)


def _branches(me: Rank) -> None:
    torch._dynamo.reset()
    first, second = Batch(SEED + 20, CASE), Batch(SEED + 21, CASE)
    with xd.init():
        group = first.group()

        @torch.compile(fullgraph=True, backend="aot_eager")
        def block(one, other):
            plan = group.prepare(one[0])
            out = layer(plan, one[1], one[2])
            later = group.prepare(other[0], after=plan)
            return out, layer(later, other[1], other[2])

        inputs = [batch.local(me.rank) for batch in (first, second)]
        outs = block(inputs[0][:3], inputs[1][:3])
        torch.autograd.backward(outs, [local[3] for local in inputs])
        for batch, out, (_, x, weights, _) in zip((first, second), outs, inputs):
            _check(batch, me.rank, out, x, weights)


def test_independent_branches_are_ordered():
    run_ranks(2, _branches, timeout=200)


def test_operations_of_a_graph_are_one_chain():
    """Also between branches, and in the backward pass: by data, not by their place in the graph."""
    first, second = (Batch(SEED + number, ((6,), 8, 3, 32)) for number in (70, 71))
    chains: list[list[str]] = []

    def record(graph_module: torch.fx.GraphModule, _):
        calls = [
            node for node in graph_module.graph.nodes if str(node.target).startswith("crossdock.")
        ]
        # row_experts is no operation: it takes no turn.
        operations = [node for node in calls if "row_experts" not in str(node.target)]
        for earlier, later in zip(operations, operations[1:]):
            assert earlier in _ancestors(later), f"{later} does not depend on {earlier}"
        chains.append([str(node.target).split(".")[1] for node in operations])
        return make_boxed_func(graph_module.forward)

    torch._dynamo.reset()
    with xd.init():
        group = first.group()

        @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record))
        def block(one, other):
            plan = group.prepare(one[0])
            out = layer(plan, one[1], one[2])
            later = group.prepare(other[0], after=plan)
            return out, layer(later, other[1], other[2])

        inputs = [batch.local(0) for batch in (first, second)]
        outs = block(inputs[0][:3], inputs[1][:3])
        torch.autograd.backward(outs, [local[3] for local in inputs])
    assert chains == [["prepare", "dispatch", "combine"] * 2, ["combine_bwd", "dispatch_bwd"] * 2]


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    found, todo = set(), [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo += new
    return found


def _quantised(me: Rank) -> None:
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


def test_quantised_rows_and_their_gradient():
    run_ranks(2, _quantised, timeout=200)


def _plan_outside(me: Rank) -> None:
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
        _check(batch, me.rank, out, x, weights)


def test_plan_from_outside():
    run_ranks(2, _plan_outside, timeout=200)


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


def _mistake_inside(me: Rank) -> None:
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


def test_mistakes_inside_compiled_code_reach_the_peers():
    run_ranks(2, _mistake_inside, timeout=200)


def _constant_loss(me: Rank) -> None:
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


def test_inductor_leaves_out_nothing_on_a_rank_without_tokens():
    run_ranks(2, _constant_loss, timeout=400)


def _called_eagerly(me: Rank) -> None:
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


def test_operators_called_eagerly_are_not_looked_into():
    run_ranks(2, _called_eagerly, timeout=200)
