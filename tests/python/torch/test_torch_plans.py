"""A plan is a chain of operations, serves several times, and must not change under a backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import InvalidArgument, Mismatch
from reference import Routing
from support import Rank, on_ranks
from torch_support import Batch, assert_equal, layer, ragged, reported

SEED = 99


@on_ranks(4)
def test_plan_overwritten_before_its_backward_is_caught(me: Rank) -> None:
    batch, other = Batch(SEED, ragged(me)), Batch(SEED + 1, ragged(me))
    with xd.init():
        group = batch.group()
        topk_idx, x, weights, grad_out = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        out = layer(plan, x, weights)
        address = plan.data.data_ptr()
        with pytest.raises(ValueError, match=r"out: expected a plan with \(group, tokens, topk\)"):
            group.prepare(topk_idx[:, :2].contiguous(), out=plan)  # of another shape
        again = group.prepare(other.local(me.rank)[0], out=plan)
        assert again is plan and plan.data.data_ptr() == address
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(grad_out)
        # The overwritten plan is the other batch's, counts included.
        assert plan.counts.tolist() == other.routing.counts(me.rank)
        other.check_layer(me.rank, plan)


@on_ranks(2)
def test_plan_overwritten_beside_bad_ids_is_complete(me: Rank) -> None:
    batch, other = Batch(SEED, ragged(me)), Batch(SEED + 1, ragged(me))
    with xd.init():
        group = batch.group()
        plan = group.prepare(batch.local(me.rank)[0])
        topk_idx = other.local(me.rank)[0]
        with reported(group, InvalidArgument if me.rank == 0 else Mismatch, "alignment|rank 0"):
            group.prepare(topk_idx, alignment=3 if me.rank == 0 else None, out=plan)
        if group.comm.device.type == "cpu":  # where the call itself fails: nothing was prepared
            assert plan.counts.tolist() == batch.routing.counts(me.rank)
        topk_idx = torch.where(topk_idx == -1, other.num_experts, topk_idx)
        with reported(group, InvalidArgument, "the plan is usable"):
            group.prepare(topk_idx, out=plan)
        assert plan.counts.tolist() == other.routing.counts(me.rank)
        other.check_layer(me.rank, plan)
        # A call that raises gives no plan, and promises none; on a GPU it has returned one.
        told = "the plan is usable" if group.comm.device.type == "cuda" else "there is no plan"
        with reported(group, InvalidArgument, told) as raised:
            group.prepare(topk_idx)
        assert raised.value.text == str(raised.value)


@on_ranks(4)
def test_local_calls_need_no_peer(me: Rank) -> None:
    batch = Batch(SEED + 40, ragged(me), alignment=4)
    with xd.init():
        group = batch.group()
        ids = batch.local(me.rank)[0]
        plan = group.prepare(ids)
        for _ in range(me.rank):  # each rank as often as it likes
            experts = plan.row_experts()
            assert experts.dtype == torch.int64 and experts.shape == (group.rows,)
            expected = batch.routing.row_experts(me.rank).tolist()
            assert experts.tolist() == expected + [-1] * (group.rows - len(expected))
            assert torch.equal(plan.row_experts(torch.int32), experts.int())
            assert plan.ends.tolist() == plan.offsets[1:].tolist()
            for numbers in (plan.ends, plan.offsets):  # compilers may read from where it begins
                held = numbers.untyped_storage().nbytes()
                assert held == 4 * numbers.numel() and numbers.storage_offset() == 0
            layout = group.routing_layout(ids)
            owner = torch.where(ids < 0, -1, ids // group.num_local_experts)
            goes = (owner[:, :, None] == torch.arange(me.num_ranks)).any(1)
            assert torch.equal(layout.token_in_rank, goes)
            assert layout.rows_per_rank.tolist() == goes.sum(0).tolist()
            every = torch.arange(group.num_experts)
            assert layout.rows_per_expert.tolist() == (ids[..., None] == every).sum((0, 1)).tolist()
            assert layout.bad_ids.tolist() == [0]
        with pytest.raises(ValueError, match=r"dtype: expected torch\.int64 or torch\.int32"):
            plan.row_experts(torch.float32)


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
@on_ranks(2)
def test_experts_lie_where_the_group_says(me: Rank, layout: str) -> None:
    # Experts as a placement for serving has them: 0 and 1 are one that is held twice.
    expert_ranks = (1, 0, 1, 1, 1)
    batch = Batch(SEED + 41, ((9, 5), 5, 3, 32), layout)
    local = np.array([0, 0, 1, 2, 3, 0])  # by expert; the last for -1
    factors = [np.where(ids < 0, 0, local[ids] + 1) for ids in batch.topk_idx]
    batch.factors = lambda rank: factors[rank].astype(np.float32)
    with xd.init():
        group = batch.group(expert_ranks=expert_ranks)
        assert group.num_local_experts == expert_ranks.count(me.rank)
        topk_idx = batch.local(me.rank)[0]
        plan = group.prepare(topk_idx)
        assert plan.counts.shape == (group.num_local_experts,)
        batch.check_layer(me.rank, plan)
        routing = Routing(batch.topk_idx, 5, layout, expert_ranks=expert_ranks)
        found = group.routing_layout(topk_idx)
        assert found.token_in_rank.tolist() == routing.goes(me.rank).tolist()
        bad = (0, 0, 0, 0) if me.rank == 0 else expert_ranks
        with pytest.raises(ValueError if me.rank == 0 else Mismatch, match="expert_ranks"):
            batch.group(expert_ranks=bad)


@on_ranks(4)
def test_plans_of_any_alignment_serve_side_by_side(me: Rank) -> None:
    batches = [Batch(SEED + 50 + i, ragged(me), alignment=a) for i, a in enumerate((8, 1, 2))]
    with xd.init():
        group = batches[0].group()
        plans = [
            group.prepare(batch.local(me.rank)[0], alignment=batch.alignment) for batch in batches
        ]
        for batch, plan in zip(batches, plans):
            assert plan.offsets.tolist() == batch.routing.offsets(me.rank)
            batch.check_layer(me.rank, plan)
        ids = batches[0].local(me.rank)[0]
        bad = me.rank == me.num_ranks - 1
        mistakes = {0: ValueError, "8": ValueError, 3: InvalidArgument, 16: InvalidArgument}
        for wrong, kind in mistakes.items():
            with reported(group, kind if bad else Mismatch):
                group.prepare(ids, alignment=wrong if bad else None)


@on_ranks(4)
def test_repeated_ids_collapse_with_their_weights_and_gradients(me: Rank) -> None:
    batch = Batch(SEED + 60, ragged(me))
    with xd.init():
        topk_idx, x, weights, grad_out = batch.local(me.rank)
        wide = torch.cat([topk_idx, topk_idx[:, :1]], 1)  # the first choice a second time
        group = batch.group(max_topk=batch.topk + 1, duplicate_ids="collapse")
        twice = torch.cat([weights.detach(), torch.full_like(weights[:, :1], 7)], 1)
        twice.requires_grad_()
        out = layer(group.prepare(wide), x, twice)
        out.backward(grad_out)
        expected = batch.expected(me.rank)
        assert_equal("out", out, expected[0])
        assert_equal("gradient of x", x.grad, expected[1])
        assert_equal("gradient of weights", twice.grad[:, :-1], expected[2])
        assert not twice.grad[:, -1].any()


@on_ranks(2)
def test_rows_of_rank_major_have_no_single_expert(me: Rank) -> None:
    batch = Batch(SEED + 41, ragged(me), "rank_major")
    with xd.init():
        plan = batch.group().prepare(batch.local(me.rank)[0])
        with pytest.raises(ValueError, match=r"row_experts: .*Dispatched\.topk_idx"):
            plan.row_experts()


@on_ranks(4)
def test_plan_serves_several_times(me: Rank) -> None:
    batch = Batch(SEED + 2, ragged(me))
    with xd.init():
        topk_idx, x, weights, grad_out = batch.local(me.rank)
        plan = batch.group().prepare(topk_idx)
        # Both in one backward pass.
        first, second = layer(plan, x, weights), layer(plan, x, weights)
        (first + second).backward(grad_out)
        assert_equal("gradient of both", x.grad, 2 * batch.expected(me.rank)[1])
        # Each in a pass of its own.
        for _ in range(2):
            batch.check_layer(me.rank, plan.detach())


@on_ranks(4)
def test_batches_in_flight_do_not_disturb_each_other(me: Rank) -> None:
    batches = [Batch(SEED + number, ragged(me)) for number in (3, 4, 5)]
    with xd.init():
        group = batches[0].group()
        locals_ = [batch.local(me.rank) for batch in batches]
        plans = [group.prepare(topk_idx) for topk_idx, *_ in locals_]
        outs = [layer(plan, x, weights) for plan, (_, x, weights, _) in zip(plans, locals_)]
        for i in (1, 2, 0):  # the same on all ranks, any order
            outs[i].backward(locals_[i][3])
        for batch, out, (_, x, weights, _) in zip(batches, outs, locals_):
            batch.check(me.rank, out, x, weights)


@on_ranks(4)
def test_after_orders_branches_in_both_directions(me: Rank) -> None:
    batches = [Batch(SEED + number, ragged(me)) for number in (6, 7)]
    with xd.init():
        group = batches[0].group()
        for connected in (False, True):
            locals_ = [batch.local(me.rank) for batch in batches]
            first = group.prepare(locals_[0][0])
            out = layer(first, *locals_[0][1:3])
            second = group.prepare(locals_[1][0], after=first if connected else None)
            later = layer(second, *locals_[1][1:3])
            # The first plan's operations are behind the second's in the backward pass: they add
            # nothing, and run.
            (reached,) = torch.autograd.grad(
                later, locals_[0][1], locals_[1][3], allow_unused=True, retain_graph=True
            )
            if connected:
                assert_equal("gradient that is none", reached, np.zeros(reached.shape, np.float32))
            else:
                assert reached is None
            torch.autograd.backward([out, later], [locals_[0][3], locals_[1][3]])
            for batch, got, (_, x, weights, _) in zip(batches, (out, later), locals_):
                batch.check(me.rank, got, x, weights)


@pytest.mark.parametrize("plan_too", [True, False], ids=["with its plan", "of a plan outside"])
@on_ranks(4)
def test_activation_checkpointing(me: Rank, plan_too: bool) -> None:
    """The backward pass runs the block's operations again."""
    batch = Batch(SEED + 8, ragged(me))
    with xd.init():
        group = batch.group()
        topk_idx, x, weights, grad_out = batch.local(me.rank)
        plan = None if plan_too else group.prepare(topk_idx)

        def block(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return layer(group.prepare(topk_idx) if plan_too else plan, x, weights)

        for _ in range(2):  # the second time a plan from outside has a past
            x.grad = weights.grad = None
            plan = plan and plan.detach()
            out = torch.utils.checkpoint.checkpoint(block, x, weights, use_reentrant=False)
            out.backward(grad_out)
            batch.check(me.rank, out, x, weights)


@on_ranks(4)
def test_parts_give_what_whole_operations_give(me: Rank) -> None:
    batch = Batch(SEED, ragged(me))
    with xd.init():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        x, weights = x.detach(), weights.detach()
        plan = group.prepare(topk_idx, parts=2)
        rows = int(plan.offsets[-1])
        whole = xd.dispatch(plan, x, weights)
        sums = xd.combine(plan, whole.tokens, whole.weights)
        received = xd.dispatch(plan, x, weights, part=1, num_sms=2)
        received = xd.dispatch(plan, x, weights, part=2, out=received)
        out = xd.combine(plan, received.tokens, received.weights, part=1)
        out = xd.combine(plan, received.tokens, received.weights, part=2, out=out)
        assert torch.equal(out, sums)
        for got, expected in zip(received, whole, strict=True):
            if expected is not None:
                assert torch.equal(got[:rows], expected[:rows])
        with pytest.raises(ValueError, match="out: expected what part 1 has returned"):
            xd.combine(plan, received.tokens, part=2)
        x.requires_grad_()
        with pytest.raises(ValueError, match="no derivative"):
            xd.dispatch(plan, x, weights, part=1)
        with torch.no_grad():
            xd.dispatch(plan, x, weights, part=1)
        batch.check_layer(me.rank, group.prepare(topk_idx, parts=2))


@on_ranks(2)
def test_overwritten_results_are_told_to_graphs_that_saved_them(me: Rank) -> None:
    batch = Batch(SEED, ragged(me))
    with xd.init():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan, x, weights = group.prepare(topk_idx), x.detach(), weights.detach()
        scale = torch.ones(1, device=x.device, requires_grad=True)
        received = xd.dispatch(plan, x, weights)
        product = (received.tokens * scale).sum()
        assert xd.dispatch(plan, x, weights, out=received).tokens is received.tokens
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        out = xd.combine(plan, received.tokens, received.weights)
        product = (out * scale).sum()
        assert xd.combine(plan, received.tokens, received.weights, out=out) is out
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        plan = group.prepare(topk_idx, parts=2)
        received = xd.dispatch(plan, x, weights, part=1)
        product = (received.tokens[: plan.offsets[1]] * scale).sum()
        xd.dispatch(plan, x, weights, part=2, out=received)  # leaves the first expert's rows
        product.backward()
        product = (received.tokens * scale).sum()
        xd.dispatch(plan, x, weights, part=1, out=received)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
