"""Every element of every result on every rank equals the plain reference's."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import crossdock
import support
from core_support import Case, equal, peers_are_told, poison
from reference import QUANTISE_WAYS, Routing, quantised
from support import Rank, on_ranks

SEED = 20260


CASES = [
    Case((3, 0, 5, 2), 8, 3, 20),
    Case((3, 4), 6, 4, 8, alignment=8, dtype="bfloat16", index="int32"),
    Case((7,), 3, 2, 24, dtype="float16"),
    Case((0, 0, 0), 3, 1, 8),
    Case((16, 9, 1), 6, 2, 64, symmetric=False),
    Case((3, 0, 5, 2), 8, 3, 20, layout="rank_major"),
    Case((4, 4), 4, 4, 32, "bfloat16", layout="rank_major", alignment=4, symmetric=False),
    # Experts anywhere: rank 1 has none, and then one rank has all.
    Case((3, 6, 2), 7, 3, 8, expert_ranks=(2, 0, 2, 2, 0, 2, 0)),
    Case((5, 4), 5, 2, 8, layout="rank_major", alignment=4, expert_ranks=(1, 1, 1, 1, 1)),
]


def routing_of(case: Case) -> Routing:
    layout = case.layout, case.alignment, case.expert_ranks
    return Routing(case.ids(SEED), case.experts, *layout)


def data_of(case: Case) -> list[list[np.ndarray]]:
    """Tokens, weights and gradients of all ranks."""
    weights = case.whole(SEED + 2, case.topk, np.float32)
    return [case.whole(SEED + 1, case.hidden), weights, case.whole(SEED + 3, case.hidden)]


def round_trip(me: Rank, case: Case) -> None:
    """All five operations, forward and backward, twice in one group, with poisoned memory."""
    routing, config = routing_of(case), case.config()
    assert config.local_experts(me.rank, me.num_ranks) == len(routing.experts(me.rank))
    with me.comm(heap_bytes=(1 << 20) * case.symmetric) as comm:
        poison(comm)
        with crossdock.EpGroup(comm, config) as group:
            for _ in range(2):
                plan = group.prepare(routing.topk_idx[me.rank])
                check_local(group, plan, routing, me.rank)
                check_plan(plan, routing, me.rank)
                check_data(group, plan, routing, me.rank, *data_of(case))


def check_plan(plan: crossdock.Plan, routing: Routing, rank: int) -> None:
    assert plan.counts.tolist() == routing.counts(rank)
    assert plan.total.tolist() == [routing.total(rank)]
    assert plan.rank_rows.tolist() == routing.rank_rows().tolist()
    assert plan.recv_rows == routing.total(rank)
    assert plan.num_tokens == len(routing.topk_idx[rank])
    assert plan.topk == routing.topk_idx[rank].shape[1]
    if routing.layout == "expert_major":
        assert plan.padded_counts.tolist() == routing.padded_counts(rank)
        assert plan.offsets.tolist() == routing.offsets(rank)


def check_local(
    group: crossdock.EpGroup, plan: crossdock.Plan, routing: Routing, rank: int
) -> None:
    if routing.layout == "rank_major":
        with pytest.raises(crossdock.InvalidArgument, match="recv_topk_idx"):
            group.row_experts(plan)
    else:
        equal(group.row_experts(plan), routing.row_experts(rank), "row_experts")
        wide = group.row_experts(plan, out=np.full(routing.total(rank) + 3, 7, np.int32))
        equal(wide, np.int32([*routing.row_experts(rank), -1, -1, -1]), "row_experts")
    ids = routing.topk_idx[rank]
    layout = group.comm.routing_layout(ids, len(routing.owners), group.config.expert_ranks)
    goes = routing.goes(rank)
    equal(layout.token_in_rank, goes, "token_in_rank")
    equal(layout.rows_per_rank, goes.sum(0), "rows_per_rank")
    equal(
        layout.rows_per_expert,
        (ids[:, :, None] == np.arange(len(layout.rows_per_expert))).any(1).sum(0),
        "rows_per_expert",
    )
    assert layout.bad_ids == 0


def check_data(
    group: crossdock.EpGroup,
    plan: crossdock.Plan,
    routing: Routing,
    rank: int,
    tokens: list[np.ndarray],
    weights: list[np.ndarray],
    grads: list[np.ndarray],
) -> None:
    every = range(routing.num_ranks)
    expert_major = routing.layout == "expert_major"

    received = group.dispatch(plan, tokens[rank], weights[rank])
    equal(received.tokens, routing.dispatch(rank, tokens), "tokens")
    recv_weights = [routing.dispatch_weights(r, weights) for r in every]
    equal(received.weights, recv_weights[rank], "weights")
    if not expert_major:
        equal(received.topk_idx, routing.recv_topk_idx(rank), "topk_idx")

    # The experts double and add one.
    outputs = [routing.dispatch(r, tokens) * 2 + 1 for r in every]
    used = recv_weights if expert_major else None
    out = group.combine(plan, received.tokens * 2 + 1, received.weights if used else None)
    equal(out, routing.combine(rank, outputs, used), "combine")

    grad_out, grad_weights, no_scales = group.combine_bwd(
        plan, grads[rank], outputs[rank] if used else None, recv_weights[rank] if used else None
    )
    equal(
        grad_out,
        routing.combine_bwd(rank, grads, recv_weights[rank] if used else None),
        "grad_expert_out",
    )
    assert no_scales is None
    if used:
        equal(grad_weights, routing.combine_bwd_weights(rank, grads, outputs[rank]), "grad_weights")

    grad_tokens, grad_topk_weights = group.dispatch_bwd(plan, grad_out, recv_weights[rank])
    all_grads = [routing.combine_bwd(r, grads, recv_weights[r] if used else None) for r in every]
    equal(grad_tokens, routing.combine(rank, all_grads), "grad_tokens")
    equal(grad_topk_weights, routing.dispatch_bwd_weights(rank, recv_weights), "grad_topk_weights")


@on_ranks(2)
def test_plans_of_any_alignment_and_topk_serve_side_by_side(me: Rank) -> None:
    """Alignment and top-k are a plan's: several of them at once in one group."""
    sizes = ((4, 8), (1, 1), (3, 2), (2, 4))  # top-k, alignment
    cases = [Case((3, 4), 6, topk, 8, alignment=alignment) for topk, alignment in sizes]
    with me.comm() as comm, crossdock.EpGroup(comm, cases[0].config(recv_capacity=61)) as group:
        routings = [routing_of(case) for case in cases]
        plans = [
            group.prepare(
                routing.topk_idx[me.rank], alignment=0 if case.alignment == 8 else case.alignment
            )
            for case, routing in zip(cases, routings)
        ]
        for case, routing, plan in reversed(list(zip(cases, routings, plans))):
            info = plan.info()
            assert info["alignment"] == case.alignment
            assert info["capacity_rows"] == 61 // case.alignment * case.alignment
            check_plan(plan, routing, me.rank)
            check_data(group, plan, routing, me.rank, *data_of(case))
        ids = routings[0].topk_idx[me.rank]
        for wrong, kind in (
            (16, crossdock.InvalidArgument),
            (1 << 40, ValueError),
            ("8", TypeError),
        ):
            right = functools.partial(group.prepare, ids)
            peers_are_told(me, kind, "", functools.partial(right, alignment=wrong), right)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_operations_equal_the_reference(case: Case) -> None:
    support.run_ranks(len(case.tokens), round_trip, case)


def test_ranks_may_be_threads_of_one_process() -> None:
    support.run_threads(4, round_trip, CASES[0])


def test_results_between_machines_are_those_of_one() -> None:
    support.run_ranks(4, round_trip, CASES[0], apart=True)


@on_ranks(2)
def test_fp8_rows_come_with_their_scales(me: Rank) -> None:
    """bfloat16 tokens quantised on the way, and float8 tokens with scales beside them."""
    rows, hidden = 4, 256
    random = np.random.default_rng(SEED)
    tokens = [random.normal(size=(rows, hidden)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    ids = [np.array([[1], [0], [1], [-1]]), np.array([[0], [1], [1], [0]])]
    routing = Routing(ids, 2)
    config = crossdock.EpConfig(
        num_experts=2, max_topk=1, max_tokens_per_rank=rows, hidden=hidden, max_scale_bytes=8
    )
    with me.comm(heap_bytes=1 << 20) as comm, crossdock.EpGroup(comm, config) as group:
        plan = group.prepare(ids[me.rank])
        for way in (True, *QUANTISE_WAYS):
            received = group.dispatch(plan, tokens[me.rank], quantise=way)
            name = "fp8_block128" if way is True else way
            elements, scales = zip(*(quantised(batch, name) for batch in tokens))
            equal(received.tokens, routing.dispatch(me.rank, elements), name)
            equal(received.scales, routing.dispatch(me.rank, scales), f"scales of {name}")

        narrow = [batch.astype(ml_dtypes.float8_e4m3fn) for batch in tokens]
        scales = [np.arange(8, dtype=np.float32).reshape(4, 2) + 10 * r for r in range(2)]
        moved = group.dispatch(plan, narrow[me.rank], scales=scales[me.rank])
        equal(moved.tokens, routing.dispatch(me.rank, narrow), "moved")
        equal(moved.scales, routing.dispatch(me.rank, scales), "moved scales")
        back = group.combine_bwd(
            plan, narrow[me.rank], grad_out_scales=np.asfortranarray(scales[me.rank])
        )
        equal(back.expert_out, routing.dispatch(me.rank, narrow), "moved back")
        equal(back.scales, routing.dispatch(me.rank, scales), "scales moved back")
        assert back.weights is None
        with pytest.raises(ValueError if me.rank == 0 else crossdock.Mismatch):
            group.combine_bwd(
                plan, narrow[me.rank], grad_out_scales=scales[me.rank].repeat(1 + (me.rank == 0), 1)
            )

        # Column after column, into every second element of a larger array from its end on.
        wide = np.full((2 * len(moved.scales), 5), np.nan, np.float32)
        out = crossdock.Dispatched(moved.tokens, None, None, wide[::-2, 1:4:2])
        group.dispatch(plan, narrow[me.rank], scales=np.asfortranarray(scales[me.rank]), out=out)
        equal(out.scales, routing.dispatch(me.rank, scales), "strided scales")
        assert np.isnan(wide).sum() == wide.size - out.scales.size


@on_ranks(4)
def test_parts_give_what_whole_operations_give(me: Rank) -> None:
    case = CASES[0]
    routing, (tokens, weights, grads) = routing_of(case), data_of(case)
    mine, its_weights, grad = tokens[me.rank], weights[me.rank], grads[me.rank]
    with me.comm() as comm, crossdock.EpGroup(comm, case.config()) as group:
        plan = group.prepare(routing.topk_idx[me.rank], parts=np.uint8(2), alignment=np.int64(1))
        assert plan.info()["parts"] == 2
        whole = group.dispatch(plan, mine, its_weights)
        sums = group.combine(plan, whole.tokens, whole.weights)
        moved = group.combine_bwd(plan, grad, whole.tokens, whole.weights)
        back = group.dispatch_bwd(plan, moved.expert_out, moved.weights)
        received = out = into = gradients = None
        for part in np.arange(1, 3):  # integers of NumPy's
            received = group.dispatch(plan, mine, its_weights, part=part, out=received)
        for part in np.arange(1, 3):
            out = group.combine(plan, received.tokens, received.weights, part=part, out=out)
        for part in (1, 2):
            into = group.combine_bwd(
                plan, grad, received.tokens, received.weights, part=part, out=into
            )
        for part in (1, 2):
            gradients = group.dispatch_bwd(
                plan, into.expert_out, into.weights, part=part, out=gradients
            )
        equal(received.tokens, whole.tokens, "tokens")
        equal(received.weights, whole.weights, "weights")
        equal(out, sums, "out")
        equal(into.expert_out, moved.expert_out, "grad_expert_out")
        equal(into.weights, moved.weights, "grad_weights")
        for got, expected in zip(gradients, back, strict=True):
            equal(got, expected, "gradients")
        with pytest.raises(ValueError, match="out: expected what part 1 has returned"):
            group.combine(plan, whole.tokens, part=2)
        with pytest.raises(crossdock.InvalidArgument, match="part = 3, expected at most 2"):
            group.dispatch(plan, mine, its_weights, part=3, out=received)
