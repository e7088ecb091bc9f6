"""Forward operations on every rank against the plain definition."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import crossdock.jax as xd
import jax_support as support
from jax_support import (
    EXPERTS,
    HIDDEN,
    RANKS,
    TOPK,
    UNEQUAL,
    Batch,
    World,
    by_expert,
    config_of,
    everywhere,
)
from reference import Routing


def padded(rows: np.ndarray, total: int, fill: float = 0) -> np.ndarray:
    """The rows of a receive array with its tail."""
    tail = np.full((total - len(rows), *rows.shape[1:]), fill, rows.dtype)
    return np.concatenate([rows, tail])


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of `tokens` on each rank."""

    layout: str = "expert_major"
    kind: str = "skewed"
    dtype: str = "float32"
    tokens: int = 13
    alignment: int = 1
    index_type: str = "int32"
    bound: int | None = None  # the group's alignment, where the plan's is a smaller one
    expert_ranks: tuple[int, ...] | None = None


CASES = {
    "by expert": Case(kind="uniform"),
    "by rank": Case("rank_major"),
    "bfloat16": Case(dtype="bfloat16", tokens=7, alignment=8),
    "float16": Case(dtype="float16", tokens=1, index_type="int64"),
    "many tokens": Case(tokens=31, alignment=4, index_type="int64"),
    "a plan's own alignment": Case(alignment=2, bound=8),
    "unequal experts": Case(kind="uniform", alignment=4, expert_ranks=UNEQUAL),
    "unequal experts, by rank": Case("rank_major", "uniform", alignment=4, expert_ranks=UNEQUAL),
}


@everywhere
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_round_trip(world: World, case: Case) -> None:
    batch = Batch(11, case.tokens, kind=case.kind, dtype=case.dtype)
    rng = np.random.default_rng(12)
    ids, x = batch.ids, batch.x
    weights = [rng.random((case.tokens, TOPK), np.float32) for _ in range(RANKS)]
    zones = case.layout == "expert_major"
    config = config_of(
        case.tokens,
        layout=case.layout,
        dtype=case.dtype,
        alignment=case.bound or case.alignment,
        expert_ranks=case.expert_ranks,
    )

    def trip(ids, x, weights):
        plan = xd.ep_prepare(config, ids, alignment=case.alignment if case.bound else None)
        received = xd.ep_dispatch(plan, x, weights)
        out, _ = xd.ep_combine(received.plan, received.tokens)
        return plan, received, out, plan.row_experts() if zones else None

    with jax.enable_x64(case.index_type == "int64"):
        ids_on_mesh = world.put([part.astype(case.index_type) for part in ids])
        plan, received, out, experts = world.on_ranks(trip)(
            ids_on_mesh, world.put(x), world.put(weights)
        )
    rows = world.ep.group(config).rows
    expected = Routing(ids, EXPERTS, case.layout, case.alignment, case.expert_ranks)
    world.equal(plan.counts, lambda rank: by_expert(expected.counts(rank), case.expert_ranks))
    world.equal(plan.total, lambda rank: np.int32([expected.total(rank)]))
    world.equal(plan.rank_rows, lambda rank: expected.rank_rows().astype(np.int32))
    if zones:
        world.equal(
            plan.padded_counts, lambda r: by_expert(expected.padded_counts(r), case.expert_ranks)
        )
        world.equal(plan.offsets, lambda r: by_expert(expected.offsets(r), case.expert_ranks, 1))
        world.equal(experts, lambda r: padded(np.int32(expected.row_experts(r)), rows, -1))
    else:
        world.equal(
            received.topk_idx, lambda r: padded(np.int32(expected.recv_topk_idx(r)), rows, -1)
        )
    world.equal(received.tokens, lambda rank: padded(expected.dispatch(rank, x), rows))
    world.equal(received.weights, lambda r: padded(expected.dispatch_weights(r, weights), rows))
    sent = [expected.dispatch(rank, x) for rank in range(RANKS)]
    world.equal(out, lambda rank: expected.combine(rank, sent))


@everywhere
def test_leading_dimensions_and_global_arrays(world: World) -> None:
    batch, length = 2, 5
    given = Batch(21, batch * length)
    rng = np.random.default_rng(22)
    x = support.whole(rng, batch, length, HIDDEN)
    weights = support.whole(rng, batch, length, TOPK)
    config = config_of(batch * length)

    def trip(ids, x, weights):
        return support.round_trip(config, ids, x, weights)

    ids = [part.reshape(batch, length, TOPK) for part in given.ids]
    inputs = world.put(ids), world.put(x), world.put(weights)
    kept = [np.where(part < 0, 0, w) for part, w in zip(ids, weights)]
    # Inside shard_map, outside of it in jit, and operation by operation.
    for function in (world.on_ranks(trip), jax.jit(trip), trip):
        out = function(*inputs)
        world.equal(out, lambda rank: x[rank] * kept[rank].sum(-1, keepdims=True))


@everywhere
def test_batches_without_tokens_are_empty(world: World) -> None:
    config = config_of(3)

    def trip(ids, x, weights):
        return support.round_trip(config, ids, x, weights)

    ids = [np.zeros((0, TOPK), np.int32)] * RANKS
    x, weights = [np.zeros((0, HIDDEN), np.float32)] * RANKS, [np.float32(part) for part in ids]
    inputs = world.put(ids), world.put(x), world.put(weights)
    for function in (world.on_ranks(trip), jax.jit(trip), trip):
        assert function(*inputs).shape == (0, HIDDEN)  # its parts may lie anywhere


@everywhere
@pytest.mark.parametrize("tokens, capacity", [(5, 12)])
def test_overflow_drops_the_last_rows(world: World, tokens: int, capacity: int) -> None:
    ids = [np.zeros((tokens, 1), np.int32) for _ in range(RANKS)]  # all to rank 0
    x = Batch(31, tokens).x
    config = config_of(tokens, max_topk=1, recv_capacity=capacity, overflow="drop")

    def trip(ids, x):
        plan = xd.ep_prepare(config, ids)
        tokens, _, _, plan = xd.ep_dispatch(plan, x)
        return plan.counts, plan.total, xd.ep_combine(plan, tokens)[0]

    counts, total, out = world.on_ranks(trip)(world.put(ids), world.put(x))
    first = np.eye(1, EXPERTS // RANKS, dtype=np.int32)[0]  # of a rank's experts
    world.equal(counts, lambda rank: first * np.int32(capacity if rank == 0 else 0))
    world.equal(total, lambda rank: np.int32([RANKS * tokens if rank == 0 else 0]))
    kept = [max(0, min(tokens, capacity - rank * tokens)) for rank in range(RANKS)]
    world.equal(
        out, lambda rank: np.where(np.arange(tokens)[:, None] < kept[rank], x[rank], np.float32(0))
    )
    dropped = world.ep.status(config)
    for device, status in dropped.items():
        rank = list(world.mesh.devices).index(device)
        assert status["dropped_rows"] == (RANKS * tokens - capacity if rank == 0 else 0)


@everywhere
def test_two_groups_in_one_program(world: World) -> None:
    """Traffic of two configs in one program, of which neither waits for the other."""
    batch = Batch(42, 9)
    configs = [config_of(9), config_of(9, layout="rank_major")]

    def trips(ids, x):
        return [support.round_trip(config, ids, x) for config in configs]

    one, other = world.on_ranks(trips)(*batch.on(world)[:2])
    chosen = [(part >= 0).sum(1, keepdims=True) for part in batch.ids]
    local = EXPERTS // RANKS
    reached = [
        np.array([[len({e // local for e in row if e >= 0})] for row in part]) for part in batch.ids
    ]
    world.equal(one, lambda rank: np.float32(batch.x[rank] * chosen[rank]))
    world.equal(other, lambda rank: np.float32(batch.x[rank] * reached[rank]))
