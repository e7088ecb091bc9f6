"""Expert parallelism's cases of the CPU on GPUs: one process per GPU, and one with all.

As many ranks as there are GPUs, 4 or 2. XLA puts operations into command buffers. Tests of the CPU
that take its devices in their own process run in another one here.
"""

from __future__ import annotations

import dataclasses

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
import test_jax_ops as ops
import test_jax_order as order
import test_moe as moe
import test_sharding as sharding
from crossdock import _jax, errors
from jax_support import RANKS, World, equal, everywhere, routing, run, whole

pytestmark = MARKS


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_round_trip(where, layout, kind):
    run(where, ops.round_trip, layout, kind, "bfloat16", 13, 1, "int32")


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_latency_round_trip(where, dtype):
    run(where, low_latency.round_trip, dtype)


@everywhere
def test_low_latency_halves(where):
    run(where, low_latency.halves)


def test_low_latency_fp8():
    run("devices", low_latency.fp8)


@everywhere
def test_leading_dimensions_and_global_arrays(where):
    run(where, ops.three_dimensions)


@everywhere
def test_overflow_drops_the_last_rows(where):
    run(where, ops.drop, 5, 8)


@everywhere
def test_two_groups_in_one_program(where):
    run(where, ops.two_groups)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_every_choice_has_its_own_weight_gradient(where, layout):
    run(where, gradients.weight_gradients, layout, "skewed")


@everywhere
@pytest.mark.parametrize("how", ["loop", "scan", "remat"])
def test_layers(where, how):
    run(where, gradients.layers, how)


@everywhere
def test_plans_are_ordinary_arrays(where):
    run(where, gradients.plans_are_data)


@everywhere
def test_no_tail_reaches_a_gradient(where):
    run(where, gradients.no_garbage)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_quantised_rows(where, layout):
    run(where, fp8.quantised, layout)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_given_scales(where, layout):
    run(where, fp8.given, layout)


@everywhere
def test_branches_are_one_chain(where):
    run(where, order.branches)


@everywhere
def test_two_programs_back_to_back(where):
    run(where, order.two_programs)


@pytest.mark.parametrize(
    "mesh, spelling, layout",
    [
        (0, "automatic", "expert_major"),
        (1, "shard_map", "expert_major"),
        (1, "automatic", "rank_major"),
    ],
)
def test_no_collective_but_ours_forward_and_backward(mesh, spelling, layout):
    run(
        "devices",
        elsewhere,
        hlo.test_no_collective_but_ours_forward_and_backward,
        hlo.MESHES[mesh],
        spelling,
        layout,
    )


@pytest.mark.parametrize(
    "test",
    [
        hlo.test_collectives_would_be_found,
        hlo.test_order_of_two_independent_branches_is_in_the_program,
        life.test_operations_outside_of_jit_keep_nothing,
        life.test_what_is_closed_cannot_be_compiled,
        life.test_another_mesh_takes_over,
        moe.test_layer_inside_shard_map_is_the_layer_on_global_arrays,
        moe.test_layers_in_scan_with_remat_have_the_gradients_of_one_device,
        moe.test_bfloat16_layer_is_near_float32,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_as_on_the_cpu(test):
    run("devices", elsewhere, test)


@everywhere
def test_another_init_while_an_executable_lives(where):
    run(where, life.again)


@everywhere
def test_groups_that_are_dropped_leave_nothing(where):
    run(where, life.many)


def test_a_process_ends_with_everything_alive():
    life.test_a_process_ends_with_everything_alive()


def test_layer_and_all_gradients_are_those_of_one_device():
    run(
        "devices",
        elsewhere,
        moe.test_layer_and_all_gradients_are_those_of_one_device,
        moe.MESHES[1],
        (4, 7),
    )


def test_layers_side_by_side_are_chained():
    run("devices", elsewhere, moe.test_layers_side_by_side_are_chained, True)


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


CONFIG = xd.EpConfig(
    num_experts=8, hidden=128, max_topk=2, max_tokens_per_rank=64, dtype=np.float32
)


def round_trips(world: World, batches: int, runs: int, config: xd.EpConfig = CONFIG) -> None:
    """One program on one batch after another, some times each."""

    def trip(ids, x, weights):
        tokens, weights, _, plan = xd.ep_dispatch(xd.ep_prepare(config, ids), x, weights)
        return xd.ep_combine(plan, tokens * 2, None if config.rank_major else weights)[0]

    def factors(ids, weights):
        """For each token of a rank, its weights' sum, or the number of ranks that it goes to."""
        if not config.rank_major:
            return np.where(ids < 0, np.float32(0), weights).sum(1, keepdims=True)
        owners = np.where(ids < 0, -1, ids // (config.num_experts // RANKS))
        return (owners[:, :, None] == np.arange(RANKS)).any(1).sum(1, keepdims=True)

    function = world.on_ranks(trip)
    rng = np.random.default_rng(111)
    for seed in range(batches):
        ids = routing(seed, 64, 8, 2, "uniform")
        x, weights = whole(rng, 64, 128), whole(rng, 64, 2)
        inputs = world.put(ids), world.put(x), world.put(weights)
        expected = [
            2 * x[rank] * factors(ids[rank], weights[rank]).astype(np.float32)
            for rank in range(RANKS)
        ]
        for _ in range(runs):
            equal(world.parts(function(*inputs)), lambda rank: expected[rank])
    world.ep.check()


def replays(world: World) -> None:
    before = _jax.calls()
    round_trips(world, 3, 20)
    made, run = _jax.calls() - before, 3 * 20 * 3 * len(world.ep.devices)
    print(f"{made} calls of handlers for {run} operations")
    assert made < run / 2


@everywhere
def test_command_buffers_replay_operations(where):
    """Most runs do not call the handlers again, and their values are right nevertheless."""
    run(where, replays)


def bad_ids(world: World) -> None:
    """Found on the device: told by check(), and the group stays usable."""
    ids = [np.zeros((64, 1), np.int32) for _ in range(RANKS)]
    ids[-1][5] = 8
    prepare = world.on_ranks(lambda ids: xd.ep_prepare(CONFIG, ids))
    jax.block_until_ready(prepare(world.put(ids)))
    with pytest.raises(errors.InvalidArgument, match=f"lowest rank with some is {RANKS - 1}"):
        world.ep.check()
    round_trips(world, 1, 1)


@everywhere
def test_bad_expert_ids(where):
    run(where, bad_ids)


def in_place(world: World, layout: str) -> None:
    """A group without memory to stage rows takes XLA's buffers, once its pool is registered."""
    config = dataclasses.replace(CONFIG, staging="none", layout=layout)
    with pytest.raises(jax.errors.JaxRuntimeError, match="outside symmetric memory"):
        round_trips(world, 1, 1, config)
    world.ep.check()  # what calls have raised is not told again
    world.ep.register_memory()
    round_trips(world, 5, 2, config)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_memory_pool_of_xla_in_place(where, layout):
    run(where, in_place, layout)
