"""Groups with logical experts: compiled programs, gradients and weights under other tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import crossdock
import crossdock.jax as xd
from crossdock.errors import InvalidArgument, Mismatch, PeerLost
from jax_support import (
    HIDDEN,
    RANKS,
    TOPK,
    World,
    config_of,
    everywhere,
    low_latency_config_of,
    on_devices,
    on_processes,
    whole,
)
from programs import place

LOGICAL, SLOTS, TOKENS, SEED = 6, 3, 9, 400  # slots of each of 4 ranks
ALL = RANKS * SLOTS

IN_ORDER = [[0, 1, 2], [3, 4, 5], [-1, -1, -1], [-1, -1, -1]]
SPREAD = [[-1, -1, -1], [1, 2, 0], [4, -1, -1], [-1, 3, 5]]
REPLICAS = [[0, 1, 2], [3, 4, 5], [5, 0, -1], [2, 0, 3]]
ON_ONE_RANK = [[-1, -1, -1], [5, 5, 4], [0, 1, -1], [2, 3, 1]]
TABLES = (REPLICAS, SPREAD, ON_ONE_RANK, IN_ORDER)
# Tokens of rank 1 that choose expert 0 take its slots 9, 9 and 0 in turn.
CHOICES = [[[] for _ in range(LOGICAL)] for _ in range(RANKS)]
CHOICES[1][0] = [10, 10, 0]


def config(**options: Any) -> xd.EpConfig:
    return config_of(TOKENS, num_experts=ALL, num_logical_experts=LOGICAL, **options)


class Batch:
    """Whole numbers of all ranks, and the sums and gradients of a layer on one device.

    The layer multiplies a token's row by the weight and by the scale of each of its experts.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(SEED)
        print(f"seed {SEED}")
        drawn = [rng.random((TOKENS, LOGICAL)).argsort(1)[:, :TOPK] for _ in range(RANKS)]
        self.ids = [np.where(rng.random(i.shape) < 0.1, -1, i).astype(np.int32) for i in drawn]
        self.x = whole(rng, TOKENS, HIDDEN)
        self.weights = whole(rng, TOKENS, TOPK)
        self.grads = whole(rng, TOKENS, HIDDEN)  # of the outputs
        self.scales = np.arange(1, LOGICAL + 1, dtype=np.float32)

    def on(self, world: World) -> tuple[jax.Array, ...]:
        return tuple(world.put(one) for one in (self.ids, self.x, self.weights, self.grads))

    def factors(self, rank: int) -> np.ndarray:
        chosen = self.scales[self.ids[rank]] * self.weights[rank]
        return np.where(self.ids[rank] < 0, np.float32(0), chosen).sum(1, keepdims=True)

    def out(self, rank: int) -> np.ndarray:
        return self.x[rank] * self.factors(rank)

    def grad_x(self, rank: int) -> np.ndarray:
        return self.grads[rank] * self.factors(rank)

    def grad_weights(self, rank: int) -> np.ndarray:
        dots = (self.x[rank] * self.grads[rank]).sum(1, keepdims=True)
        return np.where(self.ids[rank] < 0, np.float32(0), self.scales[self.ids[rank]] * dots)

    def grad_scales(self) -> np.ndarray:
        """``[experts]``."""
        found = np.zeros(LOGICAL, np.float32)
        for ids, x, weights, grads in zip(self.ids, self.x, self.weights, self.grads, strict=True):
            dots = (x * grads).sum(1, keepdims=True) * weights
            np.add.at(found, ids[ids >= 0], dots[ids >= 0])
        return found

    def slot_counts(self, table: list[list[int]], choices: Any = None) -> np.ndarray:
        """``[ranks, slots]`` int32: the choices of each slot."""
        slots = np.ravel(table)
        found = np.zeros(ALL, np.int32)
        for rank, ids in enumerate(self.ids):
            for token, row in enumerate(ids):
                for expert in row[row >= 0]:
                    every = np.flatnonzero(slots == expert)
                    own = every[every // SLOTS == rank]
                    given = choices[rank][expert] if choices else []
                    entries = given or list(own) or list(every)
                    if entries:
                        found[entries[(token + rank) % len(entries)]] += 1
        return found.reshape(RANKS, SLOTS)


def layer(ids: Any, x: Any, weights: Any, scales: Any) -> tuple[jax.Array, jax.Array]:
    """The layer of `Batch` on the ranks, and the choices of each slot; scales are by slot."""
    plan = xd.ep_prepare(config(), ids)
    received = xd.ep_dispatch(plan, x, weights)
    rows = received.tokens * jnp.append(scales, 0.0)[plan.row_experts()][:, None]
    return xd.ep_combine(received.plan, rows, received.weights)[0], plan.counts


def step(ids: Any, x: Any, weights: Any, grads: Any, scales: Any) -> tuple[Any, ...]:
    """-> sums, the gradients of x, weights and scales, the choices of each slot."""

    def loss(x, weights, scales):
        out, counts = layer(ids, x, weights, scales)
        return (out * grads).sum(), (out, counts)

    found, (out, counts) = jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, scales)
    return out, *found, counts


def by_slot(world: World, values: np.ndarray, table: Any) -> jax.Array:
    """``[slots of all]`` of what each expert has; NaN in slots that are empty."""
    return world.put(list(np.append(values, np.float32(np.nan))[np.array(table)]))


@everywhere
def test_a_compiled_step_follows_the_table_with_the_gradients_of_a_dense_sum(world: World) -> None:
    """Replicas, ranks without experts, lists of choices; loads count on. Nothing compiles anew."""
    batch = Batch()
    compiled = world.on_ranks(step)
    world.ep.set_placement(config(), IN_ORDER)
    scales = by_slot(world, batch.scales, IN_ORDER)
    runs = 0

    def check(table: list[list[int]], choices: Any = None) -> None:
        nonlocal runs
        runs += 1
        out, grad_x, grad_weights, grad_scales, counts = compiled(*batch.on(world), scales)
        world.equal(counts, lambda rank: batch.slot_counts(table, choices)[rank])
        world.equal(out, batch.out)
        world.equal(grad_x, batch.grad_x)
        world.equal(grad_weights, batch.grad_weights)
        every = np.zeros(LOGICAL, np.float32)  # of this process's ranks
        for rank, part in world.parts(grad_scales).items():
            slots = np.array(table[rank])
            np.add.at(every, slots[slots >= 0], part[slots >= 0])
            assert not part[slots < 0].any()
        if jax.process_count() == 1:
            np.testing.assert_array_equal(every, batch.grad_scales())
        np.testing.assert_array_equal(world.ep.placement(config()), table)

    check(IN_ORDER)
    for table in TABLES:
        scales = xd.move_experts(config(), scales, table)
        check(table)
    world.ep.set_placement(config(), REPLICAS, choices=CHOICES)  # slots keep what they hold
    scales = by_slot(world, batch.scales, REPLICAS)
    check(REPLICAS, CHOICES)
    assert compiled._cache_size() == 1

    chosen = np.array([[(ids == e).sum() for e in range(LOGICAL)] for ids in batch.ids])
    for clear, expected in ((True, runs * chosen), (False, 0 * chosen)):
        found = world.ep.loads(config(), clear=clear)
        assert set(found) == set(world.ep.devices)
        for counts in found.values():
            np.testing.assert_array_equal(counts, expected)


@on_devices
def test_choices_of_an_expert_without_a_slot_count_as_none(world: World) -> None:
    batch = Batch()
    without = [[-1, 1, 2], [3, 4, 5], [-1, -1, -1], [-1, -1, -1]]
    world.ep.set_placement(config(), without)
    *_, counts = world.on_ranks(step)(*batch.on(world), by_slot(world, batch.scales, without))
    world.equal(counts, lambda rank: batch.slot_counts(without)[rank])
    for rank, status in enumerate(world.ep.status(config()).values()):
        assert status["unplaced_choices"] == (batch.ids[rank] == 0).sum()
    scales = by_slot(world, batch.scales, without)
    with pytest.raises(ValueError, match="placement: expected experts that the old one has, got 0"):
        xd.move_experts(config(), scales, IN_ORDER)
    np.testing.assert_array_equal(world.ep.placement(config()), without)


@everywhere
def test_low_latency_and_bulk_groups_move_together(world: World) -> None:
    """Slots of both have the same experts; rows come to the slots that the table says."""
    few = low_latency_config_of(
        TOKENS, num_experts=ALL, num_logical_experts=LOGICAL, on_peer_loss="mask"
    )
    batch = Batch()
    ids, x, weights, _ = batch.on(world)
    world.ep.set_placement(config(), IN_ORDER)
    world.ep.set_placement(few, IN_ORDER)
    scales = by_slot(world, batch.scales, IN_ORDER)

    def decode(ids, x, weights, scales):
        slots = xd.ll_dispatch(few, x, ids, weights)
        rows = slots.tokens * scales[:, None, None]
        return xd.ll_combine(slots.plan, rows)[0], slots.counts

    compiled = [world.on_ranks(function) for function in (decode, layer)]
    for table in TABLES:
        scales = xd.move_experts([few, config()], scales, table)
        for function in compiled:
            out, counts = function(ids, x, weights, scales)
            world.equal(out, batch.out)
            world.equal(counts, lambda rank, table=table: batch.slot_counts(table)[rank])
    scales = xd.move_experts(few, scales, SPREAD)  # the other stays behind
    out, counts = compiled[0](ids, x, weights, scales)
    world.equal(out, batch.out)
    world.equal(counts, lambda rank: batch.slot_counts(SPREAD)[rank])


# ---- Weights ------------------------------------------------------------------------------------


MESHES = [
    ((RANKS,), ("ep",), "ep", ()),
    ((2, RANKS // 2), ("a", "b"), ("a", "b"), ()),
    ((2, RANKS // 2), ("data", "ep"), "ep", "data"),
]


@pytest.mark.parametrize("sizes, names, axes, data", MESHES, ids=str)
def test_every_bit_of_a_tree_of_weights_comes_along(sizes, names, axes, data) -> None:
    """Random tables, with replicas, empty slots and cycles; one program for each dtype."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]).reshape(sizes), names)
    ep = xd.init(mesh, axes, data_axes=data)
    ranks, experts = ep.num_ranks, ep.num_ranks * SLOTS - 2
    one = config_of(TOKENS, num_experts=ranks * SLOTS, num_logical_experts=experts)
    rng = np.random.default_rng(SEED + 1)
    print(f"seed {SEED + 1}")
    by_expert = {
        "moments": (
            rng.integers(0, 1 << 32, (experts, 3, 5), np.uint32).view(np.float32),
            rng.integers(0, 1 << 16, (experts, 7), np.uint16).view(jnp.bfloat16),
        ),
        "elements": rng.integers(0, 256, (experts, 16), np.uint8).view(jnp.float8_e4m3fn),
        "numbers": rng.integers(-9, 9, experts).astype(np.int32),
    }

    def slots_of(table: np.ndarray, values: np.ndarray) -> np.ndarray:
        return values[table.ravel()]  # empty slots hold the last expert

    table = np.arange(ranks * SLOTS).reshape(ranks, SLOTS)
    table[table >= experts] = -1
    tree = jax.tree.map(lambda values: place(mesh, slots_of(table, values), P(axes)), by_expert)
    loads = rng.exponential(size=experts)
    try:
        for number in range(12):
            loads *= np.exp(rng.standard_normal(experts))
            current = table if number % 2 else None
            table = crossdock.plan_placement(loads, ranks, SLOTS, current=current).expert_of_slot
            if number % 3 == 0:  # an empty slot or two
                spare = [s for s in range(table.size) if (table == table.flat[s]).sum() > 1][:1]
                table.flat[spare] = -1
            given = tree
            tree = xd.move_experts(one, tree, table)
            for before, after, values in zip(*map(jax.tree.leaves, (given, tree, by_expert))):
                assert (after.dtype, after.sharding) == (before.dtype, before.sharding)
                assert not before.is_deleted()
                for shard in after.addressable_shards:
                    slots = table.ravel()[shard.index[0]]
                    used = np.asarray(shard.data)[slots >= 0]
                    assert used.tobytes() == values[slots[slots >= 0]].tobytes()
    finally:
        ep.close()


@on_devices
def test_what_does_not_fit_is_refused_and_nothing_changes(world: World) -> None:
    scales = by_slot(world, np.ones(LOGICAL, np.float32), IN_ORDER)
    plain = config_of(TOKENS)
    elsewhere = jax.device_put(np.ones(ALL, np.float32), NamedSharding(world.mesh, P()))
    other = low_latency_config_of(TOKENS, num_experts=ALL, num_logical_experts=LOGICAL)
    world.ep.set_placement(config(), IN_ORDER)
    world.ep.set_placement(other, SPREAD)
    for text, call in (
        ("expected num_logical_experts", lambda: world.ep.set_placement(plain, IN_ORDER)),
        ("expected num_logical_experts", lambda: world.ep.loads(plain)),
        ("expected 0 beside expert_ranks", lambda: config(expert_ranks=[0] * ALL)),
        (r"placement: .*\[4, 3\], got", lambda: world.ep.set_placement(config(), SPREAD[1:])),
        (
            r"weights\['w'\]: expected \[12, ...\] by slot, got shape \(6,",
            lambda: xd.move_experts(config(), {"w": scales[:6]}, SPREAD),
        ),
        (
            r"weights\['w'\]: expected a dtype that JAX has here, got float64",
            lambda: xd.move_experts(config(), {"w": np.ones(ALL)}, SPREAD),
        ),
        (
            r"weights\[0\]: expected P\('ep'",
            lambda: xd.move_experts(config(), [elsewhere], SPREAD),
        ),
        (
            "configs: expected groups of equal tables",
            lambda: xd.move_experts([config(), other], scales, SPREAD),
        ),
        ("configs: expected one or more", lambda: xd.move_experts([], scales, SPREAD)),
    ):
        with pytest.raises(ValueError, match=text):
            call()
        np.testing.assert_array_equal(world.ep.placement(config()), IN_ORDER)
    for sizes in ({"num_experts": ALL + 1}, {"num_logical_experts": ALL + 1}):
        with pytest.raises(InvalidArgument, match="|".join(sizes)):
            world.ep.set_placement(dataclasses.replace(config(), **sizes), IN_ORDER)
    with pytest.raises(TypeError, match="config: expected one of a group, got dict"):
        world.ep.set_placement({}, IN_ORDER)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda scales: xd.move_experts(config(), scales, SPREAD))(scales)
    unknown = [[LOGICAL, 1, 2], *IN_ORDER[1:]]
    with pytest.raises(InvalidArgument, match="expert_of_slot"):
        world.ep.set_placement(config(), unknown)
    batch = Batch()
    out, _ = world.on_ranks(layer)(*batch.on(world)[:3], by_slot(world, batch.scales, IN_ORDER))
    world.equal(out, batch.out)


@on_processes
def test_processes_that_disagree_hear_of_it_and_keep_the_old_table(world: World) -> None:
    me = jax.process_index()
    world.ep.set_placement(config(), IN_ORDER)
    scales = by_slot(world, Batch().scales, IN_ORDER)
    with pytest.raises(Mismatch, match="placement"):
        xd.move_experts(config(), scales, SPREAD if me else REPLICAS)
    # Mistakes that Python finds, of which the library tells the others.
    with pytest.raises(ValueError if me == 1 else Mismatch):
        world.ep.set_placement(config(), SPREAD[me == 1 :])
    with pytest.raises(ValueError if me == 2 else Mismatch):
        xd.move_experts(config(), np.zeros(6) if me == 2 else scales, SPREAD)
    batch = Batch()
    out, _ = world.on_ranks(layer)(*batch.on(world)[:3], scales)
    world.equal(out, batch.out)
    np.testing.assert_array_equal(world.ep.placement(config()), IN_ORDER)


@on_processes
def test_what_fails_in_one_process_leaves_all_with_the_old_table(world: World) -> None:
    me = jax.process_index()
    few = low_latency_config_of(TOKENS, num_experts=ALL, num_logical_experts=LOGICAL)
    both = [few, config()]
    for one in both:
        world.ep.set_placement(one, REPLICAS, choices=CHOICES)
    batch = Batch()
    scales = by_slot(world, batch.scales, REPLICAS)
    within = [row[::-1] for row in REPLICAS]  # so that no process waits for another's weights

    def no_memory(*_: Any) -> None:
        raise RuntimeError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        if me == 1:  # behind the turn of all
            patch.setattr("crossdock.jax._moves._mover", no_memory)
        kind, text = (
            (RuntimeError, "^no memory") if me == 1 else (Mismatch, "rank 1: its call failed")
        )
        for table in (within, REPLICAS):  # the latter with other lists alone
            with pytest.raises(kind, match=text):
                xd.move_experts(both, scales, table)
    deleted = scales + 0
    if me == 2:  # before it
        deleted.delete()
    kind, text = (RuntimeError, "deleted") if me == 2 else (Mismatch, "rank 2: its call failed")
    with pytest.raises(kind, match=text):
        xd.move_experts(both, deleted, within)
    for one in both:
        np.testing.assert_array_equal(world.ep.placement(one), REPLICAS)
        assert world.ep.choices(one) is CHOICES
    out, counts = world.on_ranks(layer)(*batch.on(world)[:3], scales)
    world.equal(out, batch.out)
    world.equal(counts, lambda rank: batch.slot_counts(REPLICAS, CHOICES)[rank])


@on_devices
def test_a_rank_that_the_turn_finds_lost_leaves_all_with_the_old_table(world: World) -> None:
    few = low_latency_config_of(
        TOKENS, num_experts=ALL, num_logical_experts=LOGICAL, on_peer_loss="mask"
    )
    scales = by_slot(world, np.ones(LOGICAL, np.float32), IN_ORDER)
    for one in (few, config()):
        world.ep.set_placement(one, IN_ORDER)
    world.ep.mask_set(few, RANKS - 1)  # of which this rank itself hears in the turn
    with pytest.raises(PeerLost, match="have masked this rank") as caught:
        xd.move_experts([few, config()], scales, SPREAD)
    assert not caught.value.fatal
    for one in (few, config()):
        np.testing.assert_array_equal(world.ep.placement(one), IN_ORDER)
    batch = Batch()
    _, counts = world.on_ranks(layer)(*batch.on(world)[:3], scales)
    world.equal(counts, lambda rank: batch.slot_counts(IN_ORDER)[rank])


@on_processes
def test_sets_of_ranks_of_several_processes_are_refused(world: World) -> None:
    mesh = Mesh(world.mesh.devices.reshape(2, -1), ("data", "ep"))
    ep = xd.init(mesh, "ep")
    one = config_of(TOKENS, num_experts=ep.num_ranks * SLOTS, num_logical_experts=LOGICAL)
    table = ep.placement(one)
    for call in (
        lambda: ep.set_placement(one, table),
        lambda: xd.move_experts(one, np.ones(table.size), table),
    ):
        with pytest.raises(ValueError, match="mesh: expected no axes but .*{'data': 2} too"):
            call()
    ep.close()
