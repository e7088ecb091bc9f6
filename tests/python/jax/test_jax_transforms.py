"""Transformations that the operations refuse in words, and programs compiled ahead of time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_support import RANKS, Batch, World, config_of, round_trip

CONFIG = config_of(5)


def batch() -> tuple[np.ndarray, ...]:
    """Choices, rows and weights of all ranks together."""
    return Batch(5, 5).together()


layer = functools.partial(round_trip, CONFIG)


def on_shards(world: World) -> Callable[..., Any]:
    return world.on_ranks(layer)


def on_globals(world: World) -> Callable[..., Any]:
    return layer


both = pytest.mark.parametrize("layer_on", [on_shards, on_globals])


@both
def test_forward_mode_is_refused(world, layer_on):
    ids, x, weights = batch()
    run = layer_on(world)
    for derive in (jax.jacfwd, jax.hessian):
        with pytest.raises((NotImplementedError, TypeError), match="jvp"):
            derive(lambda x: run(ids, x, weights).sum())(x)


def test_eager_forward_mode_names_the_operation_and_the_way_out(world):
    ids, x, weights = batch()
    with pytest.raises(NotImplementedError, match="ep_dispatch: there is no jvp .* reverse mode"):
        jax.jvp(lambda x: layer(ids, x, weights), (x,), (x,))


@both
def test_second_derivatives_are_refused(world, layer_on):
    ids, x, weights = batch()
    run = layer_on(world)

    def slope(x):
        return jax.grad(lambda x: (run(ids, x, weights) ** 2).sum())(x).sum()

    with pytest.raises(NotImplementedError, match="ep_.*_bwd has no derivative .* first order"):
        jax.grad(slope)(x)


@pytest.mark.parametrize("mapped", ["ids", "tokens", "weights"])
def test_vmap_is_refused(world, mapped):
    given = dict(zip(("ids", "tokens", "weights"), batch()))

    def run(one: Any) -> Any:
        return layer(*(given | {mapped: one}).values())

    operation = "ep_prepare" if mapped == "ids" else "ep_dispatch"
    ways = [jax.vmap(run), jax.jit(jax.vmap(run))]
    if mapped != "ids":  # whole numbers have no gradient
        ways.append(jax.grad(lambda array: jax.vmap(run)(array).sum()))
    for transformed in ways:
        with pytest.raises(NotImplementedError, match=f"{operation}: there is no vmap"):
            transformed(np.stack([given[mapped]] * 2))


def test_vmap_in_shard_map_is_refused(world):
    ids, x, weights = batch()

    def twice(ids, x, weights):
        return jax.vmap(lambda x: layer(ids, x, weights))(jax.numpy.stack([x, x]))[0]

    with pytest.raises(NotImplementedError, match="ep_dispatch: there is no vmap"):
        world.on_ranks(twice)(ids, x, weights)


def test_a_program_compiled_ahead_of_time_gives_equal_bits(world):
    split = NamedSharding(world.mesh, P("ep"))
    given = [jax.device_put(array, split) for array in batch()]
    run = on_shards(world)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split) for a in given]
    compiled = run.lower(*shapes).compile()
    np.testing.assert_array_equal(compiled(*given), run(*given))


def test_an_exported_program_runs_where_its_groups_are(world):
    split = NamedSharding(world.mesh, P("ep"))
    given = [jax.device_put(array, split) for array in batch()]
    run = on_shards(world)
    with pytest.raises(ValueError, match="compatibility guarantees"):
        export.export(run)(*given)
    names = ("prepare", "dispatch", "combine")
    allowed = [export.DisabledSafetyCheck.custom_call(f"crossdock_ep_{name}") for name in names]
    exported = export.export(run, disabled_checks=allowed)(*given)
    assert exported.nr_devices == RANKS
    np.testing.assert_array_equal(jax.jit(exported.call)(*given), run(*given))
