"""Mistakes: while tracing as Python errors, at run time as errors of the program on all ranks."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import crossdock.jax as xd
from crossdock import errors as xd_errors
from jax_support import RANKS, World, everywhere, routing, run, whole

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 2, 16, 11
CONFIG = xd.EpConfig(
    num_experts=EXPERTS, hidden=HIDDEN, max_topk=TOPK, max_tokens_per_rank=TOKENS, dtype=np.float32
)


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Global topk_idx, x, topk_weights."""
    rng = np.random.default_rng(101)
    parts = (
        routing(101, TOKENS, EXPERTS, TOPK, "uniform"),
        whole(rng, TOKENS, HIDDEN),
        whole(rng, TOKENS, TOPK),
    )
    return tuple(np.concatenate(part) for part in parts)


# ---- Types and shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.int32])
def test_weights_are_float32_or_refused(world, dtype):
    ids, x, weights = inputs()
    plan = xd.ep_prepare(CONFIG, ids)
    wrong = weights.astype(dtype)
    with pytest.raises(TypeError, match=r"topk_weights: expected float32, got .*: cast with"):
        xd.ep_dispatch(plan, x, wrong)
    received = xd.ep_dispatch(plan, x, weights)
    with pytest.raises(TypeError, match=r"weights: expected float32, got .*: cast with"):
        xd.ep_combine(received.plan, received.tokens, received.weights.astype(dtype))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"ids": lambda a: a.astype(np.int16)}, TypeError, "topk_idx: expected int32 or int64"),
        ({"ids": lambda a: a[:, :1].repeat(3, 1)}, ValueError, "K from 1 to 2"),
        ({"ids": lambda a: a[:, 0]}, ValueError, "topk_idx: expected"),
        ({"ids": lambda a: np.tile(a, (2, 1))}, ValueError, "at most 11 tokens of a rank"),
        ({"ids": lambda a: a[:-1]}, ValueError, "a first dimension that 4 devices share evenly"),
        ({"x": lambda a: a.astype(np.int32)}, TypeError, "tokens: expected bfloat16, float16 or"),
        ({"x": lambda a: np.tile(a, 2)}, ValueError, "tokens: expected rows of at most 16 "),
        (
            {"x": lambda a: a[:, :3]},
            ValueError,
            r"tokens: .* multiple of 16 bytes, got shape \(44, 3\) of float32, 12 bytes a row",
        ),
        ({"x": lambda a: a[:, :0]}, ValueError, "tokens: .* positive multiple of 16 .* 0 bytes"),
        ({"x": lambda a: a[:, :8].astype(np.int8)}, ValueError, "tokens: .* 16 bytes, .* int8, 8 "),
        (
            {"x": lambda a: a[:-RANKS]},
            ValueError,
            r"tokens: expected a rank's part with shape \(11, ",
        ),
        ({"w": lambda a: a[:, :1]}, ValueError, r"topk_weights: expected .* shape \(11, 2\)"),
    ],
)
def test_arguments_that_do_not_fit(world, change, error, text):
    ids, x, weights = inputs()
    ids, x, weights = (
        change.get(name, lambda a: a)(array)
        for name, array in (("ids", ids), ("x", x), ("w", weights))
    )
    with pytest.raises(error, match=text):
        xd.ep_dispatch(xd.ep_prepare(CONFIG, ids), x, weights)


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


def test_all_ranks_hold_equally_many_experts(world):
    uneven = (0,) * (CONFIG.num_experts - RANKS + 1) + tuple(range(1, RANKS))
    with pytest.raises(ValueError, match="expert_ranks: expected equally many experts on every"):
        xd.ep_prepare(dataclasses.replace(CONFIG, expert_ranks=uneven), inputs()[0])
    with pytest.raises(ValueError, match="expert_ranks: expected the ranks of num_experts"):
        dataclasses.replace(CONFIG, expert_ranks=uneven[1:])


def test_sizes_that_do_not_fit_the_ranks(world):
    with pytest.raises(ValueError, match="num_experts"):
        xd.ep_prepare(dataclasses.replace(CONFIG, num_experts=6), inputs()[0])


# ---- Meshes and layouts -------------------------------------------------------------------------


def test_init_refuses_axes_that_the_mesh_has_not(world):
    with pytest.raises(ValueError, match=r"ep_axis: expected axes of \('ep',\), got 'experts'"):
        xd.init(world.mesh, "experts")
    with pytest.raises(ValueError, match="data_axes: expected axes other than"):
        xd.init(world.mesh, "ep", data_axes="ep")


def test_operations_need_init():
    with pytest.raises(RuntimeError, match="init.* has not been called"):
        xd.ep_prepare(CONFIG, np.zeros((4, 1), np.int32))


def test_shard_map_over_a_part_of_the_mesh():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "ep"))
    ep = xd.init(mesh, "ep", data_axes="data")
    ids = inputs()[0]

    def counts(ids):
        return xd.ep_prepare(CONFIG, ids).counts

    try:
        partial = jax.shard_map(
            counts,
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
            axis_names={"ep"},
            check_vma=False,
        )
        with pytest.raises(ValueError, match="shard_map: expected one over all axes of the mesh"):
            jax.jit(partial)(ids)
        replicated = jax.shard_map(counts, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        with pytest.raises(ValueError, match=r"replicated along \('ep',\): name them in in_specs"):
            jax.jit(replicated)(ids)
    finally:
        ep.close()


def test_shard_map_over_another_mesh(world):
    other = Mesh(np.array(jax.devices()[:2]), ("ep",))
    mapped = jax.shard_map(
        lambda ids: xd.ep_prepare(CONFIG, ids).counts,
        mesh=other,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    with pytest.raises(ValueError, match="expected the mesh of crossdock.jax.init, {'ep': 4}"):
        jax.jit(mapped)(inputs()[0])


def test_arrays_that_the_program_says_are_split_otherwise():
    mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(AxisType.Explicit,))
    ep = xd.init(mesh, "ep")
    ids, x, _ = inputs()

    @jax.jit
    def trip(ids, x):
        plan = xd.ep_prepare(CONFIG, ids)
        return xd.ep_combine(plan, xd.ep_dispatch(plan, x).tokens)[0]

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


def fails_then_works(world: World, code: str, text: str, bad: np.ndarray, capacity: int) -> None:
    """The program fails on every rank with the library's text, and the group stays usable."""
    config = dataclasses.replace(CONFIG, recv_capacity=capacity)
    good = [np.full((TOKENS, TOPK), -1, np.int32) for _ in range(RANKS)]
    for part in good:
        part[:2, 0] = (1, 5)
    x = whole(np.random.default_rng(102), TOKENS, HIDDEN)

    def trip(ids, x):
        tokens, _, _, plan = xd.ep_dispatch(xd.ep_prepare(config, ids), x)
        return xd.ep_combine(plan, tokens)[0]

    function = world.on_ranks(trip)
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


@everywhere
def test_bad_expert_ids(where):
    bad = np.full((TOKENS, TOPK), -1, np.int32)
    bad[3, 1] = EXPERTS
    text = "XD_ERROR_INVALID_ARGUMENT: .*lowest rank with some is 3"
    run(where, fails_then_works, "INVALID_ARGUMENT", text, bad, 0)


@everywhere
def test_overflow_is_an_error_by_default(where):
    bad = np.tile(np.array([[0, 1]], np.int32), (TOKENS, 1))
    run(where, fails_then_works, "OUT_OF_RANGE", "XD_ERROR_OVERFLOW", bad, 16)


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


def wrong_size(world: World) -> None:
    """One process's config differs: none has the group, all say why."""
    hidden = HIDDEN * (2 if jax.process_index() == 1 else 1)
    config = dataclasses.replace(CONFIG, hidden=hidden)
    with pytest.raises(xd_errors.Mismatch, match="hidden|row"):
        world.ep.create(config)
    world.ep.create(CONFIG)


def test_configs_that_differ_between_processes():
    run("processes", wrong_size)
