"""Expert parallelism's cases of the CPU on GPUs: one process per GPU, and one with all.

As many ranks as there are GPUs, 4 or 2. XLA puts operations into command buffers. Tests of the CPU
that take its devices in their own process run in another one here.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from gpu_jax import MARKS, elsewhere  # isort: skip (before JAX is imported)

import jax
import numpy as np

import crossdock.jax as xd
import test_hlo as hlo
import test_jax_fp8 as fp8
import test_jax_gradients as gradients
import test_jax_life as life
import test_jax_low_latency as low_latency
import test_jax_moe as layers
import test_jax_ops as ops
import test_jax_order as order
import test_jax_wire as wires
import test_moe as moe
import test_sharding as sharding
from crossdock import _jax, errors
from jax_support import EXPERTS, RANKS, Batch, World, config_of, everywhere, on_devices, run
from programs import all_same, same

pytestmark = MARKS


# Just as on the CPU.
test_low_latency_round_trip = low_latency.test_every_element_equals_the_definition
test_low_latency_halves = low_latency.test_halves_of_two_batches_interleave
test_low_latency_fp8 = low_latency.test_quantised_rows_and_scales_equal_the_definition
test_low_latency_rows_without_gaps = low_latency.test_rows_without_gaps_equal_the_definition
test_low_latency_fp8_without_gaps = low_latency.test_quantised_rows_without_gaps_and_global_arrays
test_leading_dimensions_and_global_arrays = ops.test_leading_dimensions_and_global_arrays
test_two_groups_in_one_program = ops.test_two_groups_in_one_program
test_every_choice_has_its_own_weight_gradient = (
    gradients.test_every_choice_has_its_own_weight_gradient
)
test_layers = gradients.test_layers
test_plans_are_ordinary_arrays = gradients.test_plans_are_ordinary_arrays
test_no_tail_reaches_a_gradient = gradients.test_no_tail_reaches_a_gradient
test_quantised_rows = fp8.test_quantised_rows_and_their_gradient
test_given_scales = fp8.test_given_scales_travel_with_their_rows
test_wires = wires.test_sums_and_their_gradient
test_wires_of_few_tokens = wires.test_few_tokens_whole_and_in_halves
test_branches_are_one_chain = order.test_branches_are_one_chain_forward_and_backward
test_two_programs_back_to_back = order.test_two_programs_back_to_back
test_another_init_while_an_executable_lives = life.test_another_init_while_an_executable_lives
test_groups_that_are_dropped_leave_nothing = life.test_groups_that_are_dropped_leave_nothing
test_a_process_ends_with_everything_alive = life.test_a_process_ends_with_everything_alive


@pytest.mark.parametrize("where", ["devices", "processes"])
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_round_trip(where, layout, kind):
    run(where, ops.test_round_trip, ops.Case(layout, kind, "bfloat16"))


@pytest.mark.parametrize("where", ["devices", "processes"])
def test_overflow_drops_the_last_rows(where):
    run(where, ops.test_overflow_drops_the_last_rows, 5, 8)


@pytest.mark.parametrize(
    "test, given",
    [
        (hlo.test_no_collective_but_ours_forward_and_backward, (hlo.MESHES[mesh], *spelled))
        for mesh, *spelled in (
            (0, "automatic", "expert_major"),
            (1, "shard_map", "expert_major"),
            (1, "automatic", "rank_major"),
        )
    ]
    + [
        (hlo.test_collectives_would_be_found, ()),
        (hlo.test_order_of_two_independent_branches_is_in_the_program, ()),
        (life.test_operations_outside_of_jit_keep_nothing, ()),
        (life.test_what_is_closed_cannot_be_compiled, ()),
        (life.test_another_mesh_takes_over, ()),
        (moe.test_layer_and_all_gradients_are_those_of_one_device, (moe.MESHES[1], (4, 7), False)),
        (moe.test_layer_inside_shard_map_is_the_layer_on_global_arrays, ()),
        (moe.test_layers_in_scan_with_remat_have_the_gradients_of_one_device, (False,)),
        (moe.test_layers_side_by_side_are_chained, (True,)),
        (moe.test_bfloat16_layer_is_near_float32, (False,)),
        (moe.test_bfloat16_layer_is_near_float32, (xd.Overlap(EXPERTS // RANKS),)),
        (layers.test_global_arrays_over_axes_of_data_and_of_experts, ()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).removeprefix("test_"),
)
def test_as_on_the_cpu(test, given):
    run("devices", elsewhere, test, *given)


def layouts() -> None:
    """Wrong ones are refused, eagerly and when XLA compiles; arrays that are nowhere are split."""
    mesh = sharding.make_mesh()
    for name in ("topk_idx", "tokens"):
        for spec in sharding.WRONG[:2]:
            sharding.test_arrays_that_lie_otherwise_are_refused(mesh, name, spec)
    sharding.test_refused_gradients_too(mesh)
    sharding.test_constraint_splits_what_a_program_computes(mesh)
    sharding.test_arrays_that_are_nowhere_yet_are_split(mesh)
    for how in (sharding.eager, jax.jit):
        sharding.test_derivatives_of_arrays_that_are_nowhere_yet(mesh, how, sharding.of_jax)


def test_layouts():
    run("devices", elsewhere, layouts)


CONFIG = config_of(64, hidden=128, max_topk=2)


def round_trips(world: World, batches: int, runs: int, config: xd.EpConfig = CONFIG) -> None:
    """One program on one batch after another, some times each."""

    def trip(ids, x, weights):
        tokens, weights, _, plan = xd.ep_dispatch(xd.ep_prepare(config, ids), x, weights)
        return xd.ep_combine(plan, tokens * 2, None if config.rank_major else weights)[0]

    def expected(batch: Batch, rank: int) -> np.ndarray:
        """Twice the token by the sum of its weights, or by the number of ranks that it goes to."""
        if not config.rank_major:
            return 2 * batch.x[rank] * batch.factors(rank)
        owners = np.where(batch.ids[rank] < 0, -1, batch.ids[rank] // (EXPERTS // RANKS))
        ranks = (owners[:, :, None] == np.arange(RANKS)).any(1).sum(1, keepdims=True)
        return np.float32(2 * batch.x[rank] * ranks)

    function = world.on_ranks(trip)
    for seed in range(batches):
        batch = Batch(seed, 64, topk=2, hidden=128)
        inputs = batch.on(world)
        for _ in range(runs):
            world.equal(function(*inputs), lambda rank: expected(batch, rank))
    world.ep.check()


@everywhere
def test_command_buffers_replay_operations(world: World) -> None:
    """Most runs do not call the handlers again, and their values are right nevertheless."""
    before = _jax.calls()
    round_trips(world, 3, 20)
    made, run = _jax.calls() - before, 3 * 20 * 3 * len(world.ep.devices)
    print(f"{made} calls of handlers for {run} operations")
    assert made < run / 2


@everywhere
def test_bad_expert_ids(world: World) -> None:
    """Found on the device: told by check(), and the group stays usable."""
    ids = [np.zeros((64, 1), np.int32) for _ in range(RANKS)]
    ids[-1][5] = 8
    prepare = world.on_ranks(lambda ids: xd.ep_prepare(CONFIG, ids))
    jax.block_until_ready(prepare(world.put(ids)))
    with pytest.raises(errors.InvalidArgument, match=f"lowest rank with some is {RANKS - 1}"):
        world.ep.check()
    round_trips(world, 1, 1)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_memory_pool_of_xla_in_place(world: World, layout: str) -> None:
    """A group without memory to stage rows takes XLA's buffers, once its pool is registered."""
    config = dataclasses.replace(CONFIG, staging="none", layout=layout)
    with pytest.raises(jax.errors.JaxRuntimeError, match="outside symmetric memory"):
        round_trips(world, 1, 1, config)
    world.ep.check()  # errors that calls have raised are not told again
    world.ep.register_memory()
    round_trips(world, 5, 2, config)


# ---- A layer's experts in one call ---------------------------------------------------------------


@pytest.mark.parametrize("where", ["devices", "processes"])
def test_values_of_layers_and_all_gradients(where):
    run(where, layers.test_values_and_all_gradients_are_those_of_a_dense_layer)


@everywhere
def test_command_buffers_replay_layers(world: World) -> None:
    """In parts, whose streams a captured call has beside XLA's, and with rows in XLA's pool."""
    world.ep.register_memory()
    step, args, expected = layers.trained(
        world, functools.partial(layers.layer, overlap=xd.Overlap(layers.LOCAL))
    )
    before, runs = _jax.calls(), 30
    for _ in range(runs):
        all_same(step(*args), expected)
    made, run = _jax.calls() - before, 3 * runs * len(world.ep.devices)
    print(f"{made} calls of handlers for {run} operations")
    assert made < run / 2
    world.ep.check()


@everywhere
def test_a_rank_that_fails_in_a_layer(world: World) -> None:
    """The rank, and its peers, are told by check(), and the next call works."""
    broken, out = layers.with_a_broken_plan(world)
    for _ in range(2):
        jax.block_until_ready(broken(1))
        with pytest.raises((errors.InvalidArgument, errors.Mismatch)):
            world.ep.check()
        same("out", broken(0), out)
    world.ep.check()


@on_devices
def test_layers_of_float32_are_refused(world: World) -> None:
    numbers = layers.Numbers(np.dtype(np.float32))
    with pytest.raises(TypeError, match="tokens: expected bfloat16 or float16 on GPUs"):
        xd.ep_moe(layers.config(dtype=np.float32), numbers.ids, *numbers.arrays)
