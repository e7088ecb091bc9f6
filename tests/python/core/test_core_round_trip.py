"""Every element of every result on every rank equals the plain reference's."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import crossdock
import support
from reference import QUANTISE_WAYS, Routing, quantised
from support import Rank

SEED = 20260


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch on all ranks; tokens per rank differ, and may be 0."""

    num_tokens: tuple[int, ...]
    num_experts: int
    topk: int
    hidden: int
    layout: str = "expert_major"
    alignment: int = 1
    dtype: str = "float32"
    index: str = "int64"
    symmetric: bool = True  # receive into symmetric memory, else staged
    expert_ranks: tuple[int, ...] | None = None

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    def topk_idx(self) -> list[np.ndarray]:
        """Per rank [T,K]: distinct experts, some of them -1."""
        random = np.random.default_rng(SEED)
        ids = []
        for count in self.num_tokens:
            rows = [random.permutation(self.num_experts)[: self.topk] for _ in range(count)]
            chosen = np.array(rows, self.index).reshape(count, self.topk)
            chosen[random.random(chosen.shape) < 0.2] = -1
            ids.append(chosen)
        return ids

    def small_integers(
        self, salt: int, shapes: list[tuple[int, ...]], dtype: np.dtype | None = None
    ) -> list[np.ndarray]:
        """Per rank an array of small integers: sums of them are exact in every type."""
        random = np.random.default_rng(SEED + salt)
        return [random.integers(-4, 5, shape).astype(dtype or self.numpy_dtype) for shape in shapes]

    def per_token(self, salt: int, columns: int, dtype: np.dtype | None = None) -> list[np.ndarray]:
        return self.small_integers(salt, [(count, columns) for count in self.num_tokens], dtype)


CASES = [
    Case((3, 0, 5, 2), num_experts=8, topk=3, hidden=20),
    Case((3, 4), num_experts=6, topk=4, hidden=8, alignment=8, dtype="bfloat16", index="int32"),
    Case((7,), num_experts=3, topk=2, hidden=24, dtype="float16"),
    Case((0, 0, 0), num_experts=3, topk=1, hidden=8),
    Case((16, 9, 1), num_experts=6, topk=2, hidden=64, symmetric=False),
    Case((3, 0, 5, 2), num_experts=8, topk=3, hidden=20, layout="rank_major"),
    Case(
        (4, 4),
        num_experts=4,
        topk=4,
        hidden=32,
        layout="rank_major",
        dtype="bfloat16",
        alignment=4,
        symmetric=False,
    ),
    # Experts anywhere: rank 1 has none, and then one rank has all.
    Case((3, 6, 2), num_experts=7, topk=3, hidden=8, expert_ranks=(2, 0, 2, 2, 0, 2, 0)),
    Case(
        (5, 4),
        num_experts=5,
        topk=2,
        hidden=8,
        layout="rank_major",
        alignment=4,
        expert_ranks=(1, 1, 1, 1, 1),
    ),
]


def equal(name: str, got: np.ndarray, want: np.ndarray) -> None:
    __tracebackhide__ = True
    assert got.shape == want.shape, f"{name}: got shape {got.shape}, want {want.shape}"
    assert got.dtype == want.dtype, f"{name}: got {got.dtype}, want {want.dtype}"
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), err_msg=name)


def round_trip(me: Rank, case: Case) -> None:
    """All five operations, forward and backward, twice in one group, with poisoned memory."""
    routing = Routing(
        case.topk_idx(), case.num_experts, case.layout, case.alignment, case.expert_ranks
    )
    tokens = case.per_token(1, case.hidden)
    weights = case.per_token(2, case.topk, np.dtype(np.float32))
    grads = case.per_token(3, case.hidden)
    config = crossdock.EpConfig(
        num_experts=case.num_experts,
        max_topk=case.topk,
        hidden=case.hidden,
        dtype=case.dtype,
        max_tokens_per_rank=max(1, *case.num_tokens),
        layout=case.layout,
        alignment=case.alignment,
        expert_ranks=case.expert_ranks,
    )
    assert config.local_experts(me.rank, me.num_ranks) == len(routing.experts(me.rank))
    with me.comm(heap_bytes=(1 << 20) * case.symmetric) as comm:
        poison(comm)
        with crossdock.EpGroup(comm, config) as group:
            for _ in range(2):
                plan = group.prepare(routing.topk_idx[me.rank])
                check_local(group, plan, routing, me.rank)
                check_plan(plan, routing, me.rank)
                check_data(group, plan, routing, me.rank, tokens, weights, grads)


def poison(comm: crossdock.Comm) -> None:
    """Fills all symmetric memory with NaN, for arrays that are allocated later."""
    size = comm.memory().largest_free_bytes
    if size:
        comm.empty(size // 4, np.float32).fill(np.nan)


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
        equal("row_experts", group.row_experts(plan), routing.row_experts(rank))
        wide = group.row_experts(plan, out=np.full(routing.total(rank) + 3, 7, np.int32))
        equal("row_experts", wide, np.int32([*routing.row_experts(rank), -1, -1, -1]))
    ids = routing.topk_idx[rank]
    layout = group.comm.routing_layout(ids, len(routing.owners), group.config.expert_ranks)
    goes = routing.goes(rank)
    equal("token_in_rank", layout.token_in_rank, goes)
    equal("rows_per_rank", layout.rows_per_rank, goes.sum(0))
    equal(
        "rows_per_expert",
        layout.rows_per_expert,
        (ids[:, :, None] == np.arange(len(layout.rows_per_expert))).any(1).sum(0),
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
    equal("tokens", received.tokens, routing.dispatch(rank, tokens))
    recv_weights = [routing.dispatch_weights(r, weights) for r in every]
    equal("weights", received.weights, recv_weights[rank])
    if not expert_major:
        equal("topk_idx", received.topk_idx, routing.recv_topk_idx(rank))

    # The experts double and add one.
    outputs = [routing.dispatch(r, tokens) * 2 + 1 for r in every]
    used = recv_weights if expert_major else None
    out = group.combine(plan, received.tokens * 2 + 1, received.weights if used else None)
    equal("combine", out, routing.combine(rank, outputs, used))

    grad_out, grad_weights, no_scales = group.combine_bwd(
        plan, grads[rank], outputs[rank] if used else None, recv_weights[rank] if used else None
    )
    equal(
        "grad_expert_out",
        grad_out,
        routing.combine_bwd(rank, grads, recv_weights[rank] if used else None),
    )
    assert no_scales is None
    if used:
        equal("grad_weights", grad_weights, routing.combine_bwd_weights(rank, grads, outputs[rank]))

    grad_tokens, grad_topk_weights = group.dispatch_bwd(plan, grad_out, recv_weights[rank])
    all_grads = [routing.combine_bwd(r, grads, recv_weights[r] if used else None) for r in every]
    equal("grad_tokens", grad_tokens, routing.combine(rank, all_grads))
    equal("grad_topk_weights", grad_topk_weights, routing.dispatch_bwd_weights(rank, recv_weights))


def plans_of_their_own(me: Rank) -> None:
    """Alignment and top-k are a plan's: several of them at once in one group."""
    sizes = ((4, 8), (1, 1), (3, 2), (2, 4))  # top-k, alignment
    cases = [
        Case((3, 4), num_experts=6, topk=topk, hidden=8, alignment=alignment)
        for topk, alignment in sizes
    ]
    config = crossdock.EpConfig(
        num_experts=6,
        max_topk=4,
        max_tokens_per_rank=4,
        hidden=8,
        dtype="float32",
        alignment=8,
        recv_capacity=61,
    )
    with me.comm() as comm, crossdock.EpGroup(comm, config) as group:
        routings = [Routing(case.topk_idx(), 6, "expert_major", case.alignment) for case in cases]
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
            check_data(
                group,
                plan,
                routing,
                me.rank,
                case.per_token(1, 8),
                case.per_token(2, case.topk, np.dtype(np.float32)),
                case.per_token(3, 8),
            )
        for alignment, kind in (
            (16, crossdock.InvalidArgument),
            (1 << 40, ValueError),
            ("8", TypeError),
        ):
            with pytest.raises(kind if me.rank == 0 else crossdock.Mismatch):
                group.prepare(
                    routings[0].topk_idx[me.rank], alignment=alignment if me.rank == 0 else 0
                )


def test_plans_of_any_alignment_and_topk_serve_side_by_side() -> None:
    support.run_ranks(2, plans_of_their_own)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_operations_equal_the_reference(case: Case) -> None:
    support.run_ranks(len(case.num_tokens), round_trip, case)


def test_ranks_may_be_threads_of_one_process() -> None:
    support.run_threads(4, round_trip, CASES[0])


def fp8(me: Rank) -> None:
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
            equal(name, received.tokens, routing.dispatch(me.rank, elements))
            equal(f"scales of {name}", received.scales, routing.dispatch(me.rank, scales))

        narrow = [batch.astype(ml_dtypes.float8_e4m3fn) for batch in tokens]
        scales = [np.arange(8, dtype=np.float32).reshape(4, 2) + 10 * r for r in range(2)]
        moved = group.dispatch(plan, narrow[me.rank], scales=scales[me.rank])
        equal("moved", moved.tokens, routing.dispatch(me.rank, narrow))
        equal("moved scales", moved.scales, routing.dispatch(me.rank, scales))
        back = group.combine_bwd(
            plan, narrow[me.rank], grad_out_scales=np.asfortranarray(scales[me.rank])
        )
        equal("moved back", back.expert_out, routing.dispatch(me.rank, narrow))
        equal("scales moved back", back.scales, routing.dispatch(me.rank, scales))
        assert back.weights is None
        with pytest.raises(ValueError if me.rank == 0 else crossdock.Mismatch):
            group.combine_bwd(
                plan, narrow[me.rank], grad_out_scales=scales[me.rank].repeat(1 + (me.rank == 0), 1)
            )

        # Column after column, into every second element of a larger array from its end on.
        wide = np.full((2 * len(moved.scales), 5), np.nan, np.float32)
        out = crossdock.Dispatched(moved.tokens, None, None, wide[::-2, 1:4:2])
        group.dispatch(plan, narrow[me.rank], scales=np.asfortranarray(scales[me.rank]), out=out)
        equal("strided scales", out.scales, routing.dispatch(me.rank, scales))
        assert np.isnan(wide).sum() == wide.size - out.scales.size


def test_fp8_rows_come_with_their_scales() -> None:
    support.run_ranks(2, fp8)
