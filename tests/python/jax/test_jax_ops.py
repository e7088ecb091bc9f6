"""Forward operations on every rank against the plain definition."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import crossdock.jax as xd
from jax_support import RANKS, World, equal, everywhere, routing, run, whole
from reference import Routing

EXPERTS, TOPK, HIDDEN = 8, 3, 16


def padded(rows: np.ndarray, total: int, fill: float = 0) -> np.ndarray:
    """The rows of a receive array with its tail."""
    tail = np.full((total - len(rows), *rows.shape[1:]), fill, rows.dtype)
    return np.concatenate([rows, tail])


def round_trip(
    world: World,
    layout: str,
    kind: str,
    dtype: str,
    tokens: int,
    alignment: int,
    index_type: str,
    bound: int | None = None,
    expert_ranks: tuple[int, ...] | None = None,
) -> None:
    """`bound`: the group's alignment, of which the plan's is a smaller one."""
    ids = routing(11, tokens, EXPERTS, TOPK, kind)
    rng = np.random.default_rng(12)
    x = whole(rng, tokens, HIDDEN, dtype=dtype)
    weights = [rng.random((tokens, TOPK), np.float32) for _ in range(RANKS)]
    config = xd.EpConfig(
        num_experts=EXPERTS,
        hidden=HIDDEN,
        max_topk=TOPK,
        max_tokens_per_rank=tokens,
        layout=layout,
        dtype=dtype,
        alignment=bound or alignment,
        expert_ranks=expert_ranks,
    )

    def trip(ids, x, weights):
        plan = xd.ep_prepare(config, ids, alignment=alignment if bound else None)
        received = xd.ep_dispatch(plan, x, weights)
        out, _ = xd.ep_combine(received.plan, received.tokens)
        experts = plan.row_experts() if layout == "expert_major" else None
        return plan, received, out, experts

    with jax.enable_x64(index_type == "int64"):
        ids_on_mesh = world.put([part.astype(index_type) for part in ids])
        plan, received, out, experts = world.on_ranks(trip)(
            ids_on_mesh, world.put(x), world.put(weights)
        )
    rows = world.ep.group(config).rows
    expected = Routing(ids, EXPERTS, layout, alignment, expert_ranks)
    equal(world.parts(plan.counts), lambda rank: np.int32(expected.counts(rank)))
    equal(world.parts(plan.total), lambda rank: np.int32([expected.total(rank)]))
    equal(world.parts(plan.rank_rows), lambda rank: expected.rank_rows().astype(np.int32))
    if layout == "expert_major":
        equal(world.parts(plan.padded_counts), lambda r: np.int32(expected.padded_counts(r)))
        equal(world.parts(plan.offsets), lambda r: np.int32(expected.offsets(r)))
        equal(world.parts(experts), lambda r: padded(np.int32(expected.row_experts(r)), rows, -1))
    else:
        equal(
            world.parts(received.topk_idx),
            lambda rank: padded(np.int32(expected.recv_topk_idx(rank)), rows, -1),
        )
    equal(world.parts(received.tokens), lambda rank: padded(expected.dispatch(rank, x), rows))
    equal(
        world.parts(received.weights),
        lambda rank: padded(expected.dispatch_weights(rank, weights), rows),
    )
    sent = [expected.dispatch(rank, x) for rank in range(RANKS)]
    equal(world.parts(out), lambda rank: expected.combine(rank, sent))


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_round_trip(where, layout, kind):
    run(where, round_trip, layout, kind, "float32", 13, 1, "int32")


@everywhere
@pytest.mark.parametrize(
    ("dtype", "tokens", "alignment", "index_type"),
    [("bfloat16", 7, 8, "int32"), ("float16", 1, 1, "int64"), ("float32", 31, 4, "int64")],
)
def test_types_and_sizes(where, dtype, tokens, alignment, index_type):
    run(where, round_trip, "expert_major", "skewed", dtype, tokens, alignment, index_type)


@everywhere
def test_a_plan_has_its_own_alignment(where):
    run(where, round_trip, "expert_major", "skewed", "float32", 13, 2, "int32", 8)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_experts_lie_where_the_config_says(where, layout):
    dealt = tuple(e % RANKS for e in range(EXPERTS))
    run(where, round_trip, layout, "uniform", "float32", 13, 4, "int32", None, dealt)


def three_dimensions(world: World) -> None:
    batch, length = 2, 5
    ids = routing(21, batch * length, EXPERTS, TOPK, "uniform")
    rng = np.random.default_rng(22)
    x = whole(rng, batch, length, HIDDEN)
    weights = whole(rng, batch, length, TOPK)
    config = xd.EpConfig(
        num_experts=EXPERTS,
        hidden=HIDDEN,
        max_topk=TOPK,
        max_tokens_per_rank=batch * length,
        dtype=np.float32,
    )

    def trip(ids, x, weights):
        plan = xd.ep_prepare(config, ids)
        tokens, weights, _, plan = xd.ep_dispatch(plan, x, weights)
        return xd.ep_combine(plan, tokens, weights)[0]

    three = world.put([part.reshape(batch, length, TOPK) for part in ids])
    inputs = three, world.put(x), world.put(weights)
    kept = [np.where(part.reshape(batch, length, TOPK) < 0, 0, w) for part, w in zip(ids, weights)]
    # Inside shard_map, outside of it in jit, and operation by operation.
    for function in (world.on_ranks(trip), jax.jit(trip), trip):
        out = function(*inputs)
        equal(world.parts(out), lambda rank: x[rank] * kept[rank].sum(-1, keepdims=True))


@everywhere
def test_leading_dimensions_and_global_arrays(where):
    run(where, three_dimensions)


def drop(world: World, tokens: int, capacity: int) -> None:
    ids = [np.zeros((tokens, 1), np.int32) for _ in range(RANKS)]  # all to rank 0
    x = whole(np.random.default_rng(31), tokens, HIDDEN)
    config = xd.EpConfig(
        num_experts=EXPERTS,
        hidden=HIDDEN,
        max_topk=1,
        max_tokens_per_rank=tokens,
        dtype=np.float32,
        recv_capacity=capacity,
        overflow="drop",
    )

    def trip(ids, x):
        plan = xd.ep_prepare(config, ids)
        tokens, _, _, plan = xd.ep_dispatch(plan, x)
        return plan.counts, plan.total, xd.ep_combine(plan, tokens)[0]

    counts, total, out = world.on_ranks(trip)(world.put(ids), world.put(x))
    first = np.eye(1, EXPERTS // RANKS, dtype=np.int32)[0]  # of a rank's experts
    equal(world.parts(counts), lambda rank: first * np.int32(capacity if rank == 0 else 0))
    equal(world.parts(total), lambda rank: np.int32([RANKS * tokens if rank == 0 else 0]))
    kept = [max(0, min(tokens, capacity - rank * tokens)) for rank in range(RANKS)]
    equal(
        world.parts(out),
        lambda rank: np.where(np.arange(tokens)[:, None] < kept[rank], x[rank], np.float32(0)),
    )
    dropped = world.ep.status(config)
    for device, status in dropped.items():
        rank = list(world.mesh.devices).index(device)
        assert status["dropped_rows"] == (RANKS * tokens - capacity if rank == 0 else 0)


@everywhere
def test_overflow_drops_the_last_rows(where):
    run(where, drop, 5, 12)


def two_groups(world: World) -> None:
    """Traffic of two configs in one program, of which neither waits for the other."""
    tokens = 9
    rng = np.random.default_rng(41)
    ids = routing(42, tokens, EXPERTS, TOPK, "uniform")
    x = whole(rng, tokens, HIDDEN)
    configs = [
        xd.EpConfig(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=tokens,
            dtype=np.float32,
        ),
        xd.EpConfig(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=tokens,
            dtype=np.float32,
            layout="rank_major",
        ),
    ]

    def trips(ids, x):
        outs = []
        for config in configs:
            tokens, _, _, plan = xd.ep_dispatch(xd.ep_prepare(config, ids), x)
            outs.append(xd.ep_combine(plan, tokens)[0])
        return outs

    one, other = world.on_ranks(trips)(world.put(ids), world.put(x))
    chosen = [(part >= 0).sum(1, keepdims=True) for part in ids]
    local = EXPERTS // RANKS
    reached = [
        np.array([[len({e // local for e in row if e >= 0})] for row in part]) for part in ids
    ]
    equal(world.parts(one), lambda rank: np.float32(x[rank] * chosen[rank]))
    equal(world.parts(other), lambda rank: np.float32(x[rank] * reached[rank]))


@everywhere
def test_two_groups_in_one_program(where):
    run(where, two_groups)
