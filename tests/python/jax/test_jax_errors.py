"""Mistakes: while tracing as Python errors, at run time as errors of the program on all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import crossdock.jax as xd
from crossdock import errors as xd_errors
from jax_support import (
    EXPERTS,
    HIDDEN,
    RANKS,
    TOPK,
    Batch,
    World,
    config_of,
    everywhere,
    on_devices,
    on_processes,
    round_trip,
)

TOKENS = 11
CONFIG = config_of(TOKENS)


def inputs() -> tuple[np.ndarray, ...]:
    """Choices, rows and weights of all ranks together."""
    return Batch(101, TOKENS).together()


# ---- Types and shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.int32])
def test_weights_are_float32_or_refused(world, dtype):
    ids, x, weights = inputs()
    plan = xd.ep_prepare(CONFIG, ids)
    with pytest.raises(TypeError, match=r"topk_weights: expected float32, got .*: cast with"):
        xd.ep_dispatch(plan, x, weights.astype(dtype))
    received = xd.ep_dispatch(plan, x, weights)
    with pytest.raises(TypeError, match=r"weights: expected float32, got .*: cast with"):
        xd.ep_combine(received.plan, received.tokens, received.weights.astype(dtype))


WRONG_INPUTS = {
    "ids": [
        (lambda a: a.astype(np.int16), TypeError, "topk_idx: expected int32 or int64"),
        (lambda a: a[:, :1].repeat(4, 1), ValueError, "K from 1 to 3"),
        (lambda a: a[:, 0], ValueError, "topk_idx: expected"),
        (lambda a: np.tile(a, (2, 1)), ValueError, "at most 11 tokens of a rank"),
        (
            lambda a: a[:-1],
            ValueError,
            r"topk_idx: expected a first dimension that 4 devices share evenly, got shape \(43,",
        ),
    ],
    "x": [
        (lambda a: a.astype(np.int32), TypeError, "tokens: expected bfloat16, float16 or"),
        (lambda a: np.tile(a, 2), ValueError, "tokens: expected rows of at most 16 "),
        (
            lambda a: a[:, :3],
            ValueError,
            r"tokens: .* multiple of 16 bytes, got shape \(44, 3\) of float32, 12 bytes a row",
        ),
        (lambda a: a[:, :0], ValueError, "tokens: .* positive multiple of 16 .* 0 bytes"),
        (lambda a: a[:, :8].astype(np.int8), ValueError, "tokens: .* 16 bytes, .* int8, 8 "),
        (lambda a: a[:-RANKS], ValueError, r"tokens: expected a rank's part with shape \(11, "),
    ],
    "weights": [(lambda a: a[:, :1], ValueError, r"topk_weights: expected .* shape \(11, 3\)")],
}


@pytest.mark.parametrize(
    "name, change, error, text",
    [(name, *row) for name, rows in WRONG_INPUTS.items() for row in rows],
)
def test_arguments_that_do_not_fit(world, name, change, error, text):
    given = dict(zip(("ids", "x", "weights"), inputs()))
    given[name] = change(given[name])
    with pytest.raises(error, match=text):
        xd.ep_dispatch(xd.ep_prepare(CONFIG, given["ids"]), given["x"], given["weights"])


def test_combine_refuses_other_rows(world):
    ids, x, weights = inputs()
    received = xd.ep_dispatch(xd.ep_prepare(CONFIG, ids), x, weights)
    rows = world.ep.group(CONFIG).rows
    with pytest.raises(ValueError, match=f"expert_out: expected {rows} rows of a rank"):
        xd.ep_combine(received.plan, np.asarray(received.tokens)[:-RANKS])
    with pytest.raises(ValueError, match=f"weights: expected one for each of {RANKS * rows} rows"):
        xd.ep_combine(received.plan, received.tokens, np.asarray(received.weights)[:-RANKS])
    with pytest.raises(ValueError, match="expert_out: .* multiple of 16 bytes, .* 12 bytes a row"):
        xd.ep_combine(received.plan, np.asarray(received.tokens)[:, :3])
    by_rank = dataclasses.replace(CONFIG, layout="rank_major")
    received = xd.ep_dispatch(xd.ep_prepare(by_rank, ids), x, weights)
    with pytest.raises(ValueError, match="weights: expected None in rank_major"):
        xd.ep_combine(received.plan, received.tokens, np.asarray(received.weights)[:, 0])


@pytest.mark.parametrize("mapped", [False, True], ids=["global", "shard_map"])
@pytest.mark.parametrize(
    "after",
    [np.zeros(RANKS, np.int32), np.zeros(2 * RANKS, np.float32), np.zeros((RANKS, 1), np.float32)],
    ids=["type", "size", "shape"],
)
def test_after_is_an_order_or_refused(world, after, mapped):
    prepare = lambda ids, after: xd.ep_prepare(CONFIG, ids, after=after).order  # noqa: E731
    with pytest.raises(ValueError, match=r"after: expected a plan or an order, .* \(1,\) on a "):
        (world.on_ranks(prepare) if mapped else prepare)(inputs()[0], after)


def test_config_is_checked_and_hashable():
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG, dtype="float32"))
    with pytest.raises(ValueError, match="layout: expected 'expert_major' or"):
        dataclasses.replace(CONFIG, layout="slots")
    with pytest.raises(ValueError, match="dtype: expected bfloat16"):
        dataclasses.replace(CONFIG, dtype=np.float64)
    with pytest.raises(ValueError, match="recv_capacity: expected .* got -8"):
        dataclasses.replace(CONFIG, recv_capacity=-8)


def test_ranks_of_experts_that_do_not_fit(world):
    ranks = (0,) * (CONFIG.num_experts - 1) + (RANKS,)
    with pytest.raises(ValueError, match=r"expert_ranks\[7\]"):
        xd.ep_prepare(dataclasses.replace(CONFIG, expert_ranks=ranks), inputs()[0])
    with pytest.raises(ValueError, match="expert_ranks: expected the ranks of num_experts"):
        dataclasses.replace(CONFIG, expert_ranks=ranks[1:])


def test_sizes_that_do_not_fit_the_ranks(world):
    with pytest.raises(ValueError, match="num_experts"):
        xd.ep_prepare(dataclasses.replace(CONFIG, num_experts=6), inputs()[0])


# ---- Meshes and layouts -------------------------------------------------------------------------


def test_operations_need_init():
    with pytest.raises(RuntimeError, match="init.* has not been called"):
        xd.ep_prepare(CONFIG, np.zeros((4, 1), np.int32))


@on_devices
def test_errors_name_the_place_in_the_mesh_and_other_numbers_of_ranks(world: World) -> None:
    """One process has all devices, so its ranks are known by those."""
    devices = world.mesh.devices.reshape(-1, 2)
    ep = xd.init(jax.sharding.Mesh(devices, ("ep", "data")), "ep")
    ep.abort()
    own = rf" \(global rank {devices[0, 0].id}\)" if RANKS > 2 else ""
    said = rf"^rank 0{own} called .* \[rank 0 of {RANKS // 2}{own} in 'data=0'\]$"
    with pytest.raises(xd_errors.Aborted, match=said):
        ep.check()
    ep.close()


def test_arrays_that_the_program_says_are_split_otherwise():
    mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(AxisType.Explicit,))
    ep = xd.init(mesh, "ep")
    ids, x, _ = inputs()

    trip = jax.jit(functools.partial(round_trip, CONFIG))
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))  # noqa: E731
    try:
        # With the mesh as the current one, and without.
        for current in (jax.set_mesh(mesh), contextlib.nullcontext()):
            with current:
                out = trip(place(ids, P("ep")), place(x, P("ep")))
            np.testing.assert_array_equal(np.asarray(out), x * (ids >= 0).sum(1, keepdims=True))
        with jax.set_mesh(mesh):
            with pytest.raises(ValueError, match="in_specs passed to shard_map: .* not match"):
                trip(place(ids, P("ep")), place(x, P(None, "ep")))
    finally:
        ep.close()


def test_memory_of_the_cpu_cannot_be_registered(world):
    with pytest.raises(xd_errors.Unsupported):
        world.ep.register_memory()


# ---- At run time --------------------------------------------------------------------------------


NO_EXPERT, TWO_OF_RANK_0 = np.full((2, TOKENS, TOPK), -1, np.int32)
NO_EXPERT[3, 1] = EXPERTS
TWO_OF_RANK_0[:, :2] = 0, 1
NAMED = "XD_ERROR_INVALID_ARGUMENT: .*lowest rank with some is 3"


@everywhere
@pytest.mark.parametrize(
    "code, text, bad, capacity",
    [
        ("INVALID_ARGUMENT", NAMED, NO_EXPERT, 0),
        ("OUT_OF_RANGE", "XD_ERROR_OVERFLOW", TWO_OF_RANK_0, 16),
    ],
    ids=["bad expert ids", "overflow"],
)
def test_a_program_fails_on_every_rank_and_its_group_stays_usable(
    world: World, code: str, text: str, bad: np.ndarray, capacity: int
) -> None:
    config = dataclasses.replace(CONFIG, recv_capacity=capacity)
    good = [np.full((TOKENS, TOPK), -1, np.int32) for _ in range(RANKS)]
    for part in good:
        part[:2, 0] = (1, 5)
    x = Batch(102, TOKENS).x

    function = world.on_ranks(functools.partial(round_trip, config))
    wrong = [*good[:-1], bad]
    assert world.ep.errors(config) == {}
    for failed in (1, 2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{code}.*{text}"):
            jax.block_until_ready(function(world.put(wrong), world.put(x)))
        out = function(world.put(good), world.put(x))
        for rank, part in world.parts(out).items():
            np.testing.assert_array_equal(part[:2], x[rank][:2])
            assert not part[2:].any()
        assert world.ep.errors(config) == {device: failed for device in world.ep.devices}


def test_plan_of_other_bytes(world):
    ids, x, _ = inputs()
    plan = xd.ep_prepare(CONFIG, ids)
    noise = jax.device_put(np.zeros(plan.data.shape, np.uint8), plan.data.sharding)
    broken = jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(plan), [noise, *jax.tree_util.tree_leaves(plan)[1:]]
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*plan"):
        jax.block_until_ready(xd.ep_dispatch(broken, x).tokens)
    received = xd.ep_dispatch(plan, x)
    out, _ = xd.ep_combine(received.plan, received.tokens)
    np.testing.assert_array_equal(np.asarray(out), x * (ids >= 0).sum(1, keepdims=True))


@on_processes
def test_configs_that_differ_between_processes(world: World) -> None:
    """One process's config differs: none has the group, all say why."""
    hidden = HIDDEN * (2 if jax.process_index() == 1 else 1)
    config = dataclasses.replace(CONFIG, hidden=hidden)
    with pytest.raises(xd_errors.Mismatch, match="hidden|row"):
        world.ep.create(config)
    world.ep.create(CONFIG)
