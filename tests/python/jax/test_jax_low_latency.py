"""ll_dispatch and ll_combine on every rank against the plain definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

import crossdock.jax as xd
import jax_support as support
from jax_support import EXPERTS, RANKS, UNEQUAL, World, by_expert, equal, everywhere, on_devices
from reference import Routing, quantised
from slots import SlotRouting, factors

TOKENS = 6


def slots_of(**options: Any) -> xd.LowLatencyConfig:
    return support.low_latency_config_of(TOKENS, **options)


class Batch(support.Batch):
    """Inputs of all ranks, and the slots that they come to."""

    def __init__(
        self,
        world: World,
        seed: int,
        tokens: int = TOKENS,
        expert_ranks: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, tokens, **options)
        self.routing = SlotRouting(self.ids, EXPERTS, TOKENS, expert_ranks)
        self.expert_ranks = expert_ranks
        ids, x, weights = self.on(world)
        self.arrays = x, ids, weights  # in the order of ll_dispatch

    def check(self, world: World, slots: xd.Slots) -> None:
        world.equal(
            slots.counts, lambda rank: by_expert(self.routing.counts(rank), self.expert_ranks)
        )
        self.check_rows(world.parts(slots.tokens), self.x)

    def check_rows(self, parts: dict[int, np.ndarray], per_token: list[np.ndarray]) -> None:
        rows = {rank: self.routing.in_rows(rank, part) for rank, part in parts.items()}
        equal(rows, lambda rank: self.routing.dispatch(rank, per_token))

    def check_sums(self, world: World, out: jax.Array, weighted: bool = True) -> None:
        weights = self.weights if weighted else None
        world.equal(out, lambda rank: self.routing.sums(rank, self.x, weights))


def experts(slots: xd.Slots) -> jax.Array:
    """The model's experts on one rank's slots: local expert e multiplies by e + 1."""
    tokens = slots.tokens
    return tokens * factors(len(tokens)).astype(tokens.dtype)


@everywhere
@pytest.mark.parametrize("dtype, expert_ranks", [("float32", None), ("bfloat16", UNEQUAL)])
def test_every_element_equals_the_definition(
    world: World, dtype: str, expert_ranks: tuple[int, ...] | None
) -> None:
    config = slots_of(dtype=dtype, expert_ranks=expert_ranks)
    batch = Batch(world, 61, dtype=dtype, expert_ranks=expert_ranks)

    def trip(x, ids, weights):
        slots = xd.ll_dispatch(config, x, ids, weights)
        out, plan = xd.ll_combine(slots.plan, experts(slots))
        plain = xd.ll_dispatch(config, x, ids, after=plan)
        other, plan = xd.ll_combine(plain.plan, experts(plain))
        given, _ = xd.ll_combine(plan, experts(plain), weights)
        return slots, out, other, given

    slots, out, other, given = world.on_ranks(trip)(*batch.arrays)
    batch.check(world, slots)
    batch.check_sums(world, out)
    batch.check_sums(world, other, weighted=False)
    batch.check_sums(world, given)


@everywhere
def test_halves_of_two_batches_interleave(world: World) -> None:
    """Two batches, interleaved; several steps in one program."""
    config = slots_of()
    batches = [Batch(world, 63), Batch(world, 64)]

    def step(first, second):
        one = xd.ll_dispatch_send(config, *first)
        other = xd.ll_dispatch_send(config, *second, after=one)
        one = xd.ll_dispatch_receive(one, after=other)
        other = xd.ll_dispatch_receive(other, after=one.plan)
        slots = one, other
        one = xd.ll_combine_send(one.plan, experts(one), after=other.plan)
        other = xd.ll_combine_send(other.plan, experts(other), after=one)
        first_out, plan = xd.ll_combine_receive(one, after=other)
        second_out, _ = xd.ll_combine_receive(other, after=plan)
        return slots, (first_out, second_out)

    compiled = world.on_ranks(step)
    for _ in range(3):
        slots, sums = compiled(*(batch.arrays for batch in batches))
        for batch, found, out in zip(batches, slots, sums):
            batch.check(world, found)
            batch.check_sums(world, out)


@on_devices
def test_global_arrays(world: World) -> None:
    """Outside shard_map, eagerly and jitted."""
    config = slots_of()
    batch = Batch(world, 65)

    def trip(x, ids, weights):
        slots = xd.ll_dispatch(config, x, ids, weights)
        scale = jnp.tile(factors(EXPERTS // RANKS), (RANKS, 1, 1)).astype(np.float32)
        scale = jax.lax.with_sharding_constraint(scale, slots.tokens.sharding) if eager else scale
        rows = slots.tokens * (scale if eager else 1)
        return slots, xd.ll_combine(slots.plan, rows)[0]

    eager = True
    slots, out = trip(*batch.arrays)
    batch.check(world, slots)
    batch.check_sums(world, out)
    eager = False
    slots, _ = jax.jit(trip)(*batch.arrays)
    batch.check(world, slots)


@on_devices
def test_quantised_rows_and_scales_equal_the_definition(world: World) -> None:
    options = {"hidden": 256, "dtype": jnp.bfloat16}
    config, batch = slots_of(**options), Batch(world, 66, **options)
    for way in ("fp8_block128", "fp8_block128_pow2", "fp8_block128_e8m0"):
        slots = world.on_ranks(
            lambda *arrays, way=way: xd.ll_dispatch(config, *arrays, quantise=way)
        )(*batch.arrays)
        elements, scales = zip(*(quantised(rows, way) for rows in batch.x))
        batch.check_rows(world.parts(slots.tokens), list(elements))
        batch.check_rows(world.parts(slots.scales), list(scales))


@on_devices
def test_derivatives_and_bad_arguments_are_refused_while_tracing(world: World) -> None:
    config = slots_of()
    batch = Batch(world, 67)
    x, ids, weights = batch.arrays

    def loss(x):
        slots = xd.ll_dispatch(config, x, ids, weights)
        return xd.ll_combine(slots.plan, slots.tokens)[0].sum()

    with pytest.raises(TypeError, match="for inference and have no derivatives; ep_prepare"):
        jax.grad(loss)(x)
    with pytest.raises(TypeError, match="for inference and have no derivatives"):
        jax.jvp(loss, (x,), (x,))
    with pytest.raises(TypeError, match="config: expected a LowLatencyConfig, got EpConfig"):
        xd.ll_dispatch(support.config_of(TOKENS), x, ids)
    with pytest.raises(TypeError, match="config: expected an EpConfig, got LowLatencyConfig"):
        xd.ep_prepare(config, ids)
    with pytest.raises(ValueError, match="tokens: expected a rank's part"):
        xd.ll_dispatch(config, world.put([part[:3] for part in batch.x]), ids)
    with pytest.raises(TypeError, match="topk_weights: expected float32"):
        xd.ll_dispatch(config, x, ids, weights.astype(jnp.bfloat16))
    slots = xd.ll_dispatch(config, x, ids)
    with pytest.raises(ValueError, match="expert_out: expected a rank's part with shape"):
        xd.ll_combine(slots.plan, x)


@on_devices
def test_bad_ids_fail_the_program_and_the_group_goes_on(world: World) -> None:
    config = slots_of()
    batch = Batch(world, 68)
    x, _, weights = batch.arrays
    bad = [ids.copy() for ids in batch.ids]
    bad[1][0, 0] = EXPERTS
    call = world.on_ranks(lambda *arrays: xd.ll_dispatch(config, *arrays))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
        jax.block_until_ready(call(x, world.put(bad), weights))
    slots = call(*batch.arrays)
    batch.check(world, slots)


@everywhere
def test_a_rank_that_is_masked_is_left_out_and_comes_back(world: World) -> None:
    """All leave the last rank out, which learns of it; then all are in step again."""
    config = slots_of(on_peer_loss="mask")
    last = RANKS - 1
    rank_of = dict(zip(world.mesh.devices, range(RANKS)))
    nobody, the_last = np.zeros(RANKS, np.int32), np.int32([0] * last + [1])
    batch = Batch(world, 69)
    call = world.on_ranks(lambda *arrays: xd.ll_dispatch(config, *arrays).counts)

    def check(ids_for: Callable[[int], list[np.ndarray]]) -> None:
        def counts(rank: int) -> np.ndarray:
            return np.int32(SlotRouting(ids_for(rank), EXPERTS, TOKENS).counts(rank))

        world.equal(call(*batch.arrays), counts)

    def of_own_part(rank: int) -> list[np.ndarray]:
        none = np.full_like(batch.ids[0], -1)
        return [ids if (r == last) == (rank == last) else none for r, ids in enumerate(batch.ids)]

    check(lambda rank: batch.ids)
    meet()
    world.ep.mask_set(config, last)
    meet()
    for device, mask in world.ep.mask(config).items():
        np.testing.assert_array_equal(mask, nobody if rank_of[device] == last else the_last)
    if last in (rank_of[device] for device in world.ep.devices):  # it finds itself left out, now
        # JAX makes some failures of programs that have run before a ValueError.
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="XD_ERROR_PEER_LOST"):
            jax.block_until_ready(call(*batch.arrays))
    else:
        jax.block_until_ready(call(*batch.arrays))
    check(of_own_part)
    meet()
    for rank in range(RANKS):
        world.ep.mask_set(config, rank, False)
    meet()
    world.ep.reset(config)
    check(lambda rank: batch.ids)
    for mask in world.ep.mask(config).values():
        np.testing.assert_array_equal(mask, nobody)


def meet() -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("meet")


@on_devices
def test_masks_are_for_groups_that_mask(world: World) -> None:
    config = slots_of(on_peer_loss="mask")
    for wrong in (-1, RANKS):
        with pytest.raises(ValueError, match=f"rank: expected 0 to {RANKS - 1}, got {wrong}"):
            world.ep.mask_set(config, wrong)
    calls = (world.ep.mask, world.ep.reset, lambda config: world.ep.mask_set(config, 0))
    for call in calls:
        with pytest.raises(ValueError, match="config.on_peer_loss: expected 'mask'"):
            call(slots_of())


class Packed:
    """The results that a `Batch` has without slots, in one receive form."""

    def __init__(self, batch: Batch, receive: str, alignment: int) -> None:
        layout = "rank_major" if receive == "by_rank" else "expert_major"
        self.batch, self.by_rank = batch, receive == "by_rank"
        self.routing = Routing(batch.ids, EXPERTS, layout, alignment, batch.expert_ranks)

    def check(self, world: World, slots: xd.Slots, weighted: bool = True) -> None:
        """Rows, and all that comes beside them; padding up to the last row is zero."""
        routing = self.routing
        ranks = self.batch.expert_ranks
        world.equal(slots.counts, lambda rank: by_expert(routing.counts(rank), ranks))
        world.equal(slots.row_offsets, self.row_offsets)
        self.check_rows(world, slots.tokens, lambda rank: routing.dispatch(rank, self.batch.x))
        assert (slots.weights is not None) == weighted
        if weighted:
            weights = self.batch.weights
            self.check_rows(
                world, slots.weights, lambda rank: routing.dispatch_weights(rank, weights)
            )
        assert (slots.topk_idx is not None) == self.by_rank
        if self.by_rank:
            self.check_rows(
                world, slots.topk_idx, lambda rank: np.int32(routing.recv_topk_idx(rank))
            )
            for rank, part in world.parts(slots.topk_idx).items():
                assert (part[routing.total(rank) :] == -1).all()

    def check_rows(
        self, world: World, array: jax.Array, expected: Callable[[int], np.ndarray]
    ) -> None:
        rows = {rank: part[: self.routing.total(rank)] for rank, part in world.parts(array).items()}
        equal(rows, expected)

    def row_offsets(self, rank: int) -> np.ndarray:
        if not self.by_rank:
            return by_expert(self.routing.offsets(rank), self.batch.expert_ranks, 1)
        return np.cumsum([0, *self.routing.rank_rows()[:, rank]], dtype=np.int32)

    def check_sums(self, world: World, out: jax.Array, weighted: bool) -> None:
        """Of results that are the rows, each times the number of its place + 1."""

        def sums(rank: int) -> np.ndarray:
            routing, ranks = self.routing, range(RANKS)
            rows = [routing.dispatch(one, self.batch.x) for one in ranks]
            results = [(one * places_of(one)).astype(one.dtype) for one in rows]
            weights = [routing.dispatch_weights(one, self.batch.weights) for one in ranks]
            return routing.combine(rank, results, weights if weighted else None)

        world.equal(out, sums)


def places_of(rows: Any) -> Any:
    """[N,1]: by what `results_of` multiplies."""
    return np.arange(len(rows))[:, None] % 3 + 1


def results_of(slots: xd.Slots) -> jax.Array:
    return slots.tokens * places_of(slots.tokens).astype(slots.tokens.dtype)


@everywhere
@pytest.mark.parametrize(
    "receive, alignment, expert_ranks",
    [("by_expert", 1, None), ("by_expert", 4, UNEQUAL), ("by_rank", 1, UNEQUAL)],
)
def test_rows_without_gaps_equal_the_definition(
    world: World, receive: str, alignment: int, expert_ranks: tuple[int, ...] | None
) -> None:
    """Whole calls and halves, fewer tokens than the group's, and a combine with weights."""
    config = slots_of(receive=receive, alignment=alignment, expert_ranks=expert_ranks)
    for seed, tokens in ((70, TOKENS), (71, TOKENS - 2)):
        batch = Batch(world, seed, tokens=tokens, expert_ranks=expert_ranks)
        packed = Packed(batch, receive, alignment)

        def trip(x, ids, weights):
            slots = xd.ll_dispatch(config, x, ids, weights)
            out, plan = xd.ll_combine(slots.plan, results_of(slots))
            sent = xd.ll_dispatch_send(config, x, ids, after=plan)
            halved = xd.ll_dispatch_receive(sent)
            given = weights if receive == "by_expert" else None
            returned = xd.ll_combine_send(halved.plan, results_of(halved), given)
            other, _ = xd.ll_combine_receive(returned)
            return slots, out, halved, other

        slots, out, halved, other = world.on_ranks(trip)(*batch.arrays)
        most = config.local_experts(RANKS)
        ranks_choices = min(support.TOPK, most) if receive == "by_expert" else 1
        assert len(slots.tokens) // RANKS <= RANKS * tokens * ranks_choices + alignment * EXPERTS
        packed.check(world, slots)
        packed.check_sums(world, out, weighted=False)
        packed.check(world, halved, weighted=False)
        packed.check_sums(world, other, weighted=receive == "by_expert")


@on_devices
def test_quantised_rows_without_gaps_and_global_arrays(world: World) -> None:
    options = {"hidden": 256, "dtype": jnp.bfloat16}
    for receive in ("by_expert", "by_rank"):
        config, batch = slots_of(receive=receive, **options), Batch(world, 72, **options)
        packed = Packed(batch, receive, 1)
        slots = xd.ll_dispatch(config, *batch.arrays, quantise="fp8_block128")
        elements, scales = zip(*(quantised(rows, "fp8_block128") for rows in batch.x))
        for array, rows in ((slots.tokens, elements), (slots.scales, scales)):
            packed.check_rows(
                world, array, lambda rank, rows=rows: packed.routing.dispatch(rank, list(rows))
            )
        plain = xd.ll_dispatch(config, *batch.arrays)
        packed.check(world, plain)
        packed.check_sums(world, xd.ll_combine(plain.plan, results_on(plain))[0], weighted=False)


def results_on(slots: xd.Slots) -> jax.Array:
    """`results_of` each rank's part of global rows."""
    factors = np.tile(places_of(range(len(slots.tokens) // RANKS)), (RANKS, 1))
    factors = jnp.asarray(factors, slots.tokens.dtype)
    return slots.tokens * jax.device_put(factors, slots.tokens.sharding)


@on_devices
def test_bad_arguments_without_slots_are_refused_while_tracing(world: World) -> None:
    config = slots_of(receive="by_rank")
    batch = Batch(world, 73)
    slots = xd.ll_dispatch(config, *batch.arrays)
    with pytest.raises(ValueError, match="topk_weights: expected None, as rows came by rank"):
        xd.ll_combine(slots.plan, slots.tokens, batch.arrays[2])
    with pytest.raises(ValueError, match=r"expert_out: expected a rank's part with shape \(24, 'H"):
        xd.ll_combine(slots.plan, batch.arrays[0])
    with pytest.raises(ValueError, match="receive: expected"):
        slots_of(receive="elsewhere")
    with pytest.raises(ValueError, match="config.alignment = 2, expected 0 or 1"):
        xd.ll_dispatch(slots_of(receive="by_rank", alignment=2), *batch.arrays)
