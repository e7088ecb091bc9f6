"""Products that are spread over the ranks: values and every gradient, exactly, on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from crossdock.jax import tp
from jax_support import RANKS, World, ranked, run
from programs import all_same, compiled, mapped, place, placed, same, spelled, with_gradients
from tp_support import AGAIN, LAYERS, SEED, Layer, check, joined, padded, trained


@pytest.mark.parametrize(
    "where, spelling, data",
    [
        ("devices", "shard_map", 1),
        ("devices", "shard_map", 2),
        ("devices", "automatic", 1),
        ("devices", "automatic", 2),
        ("processes", "shard_map", 1),
        ("processes", "automatic", 2),
    ],
)
@ranked
def test_values_and_all_gradients_are_those_of_one_process(
    world: World, spelling: str, data: int
) -> None:
    world.ep.close()
    with joined(data) as mesh:
        for layer in LAYERS:
            if layer.tokens[0] % data == 0:
                check(mesh, layer, spelling)


def of_counts(
    operation: str, counts: tuple[int, ...], *inner: int, options: tuple[tuple[str, Any], ...] = ()
) -> Layer:
    """A layer of so many tokens on each rank, and of dimensions of tokens behind them."""
    tokens = sum(counts), *inner
    more = {"transpose_b": True, "activation": "relu", "bias": "float32"}
    return Layer(operation, tokens, counts=counts, options=options, **more)


COUNTS = (3, 0, 5, 1)[:RANKS]
UNEQUAL = [
    of_counts("all_gather_matmul", COUNTS),
    of_counts("all_gather_matmul", (0, 2, 1, 2)[:RANKS], 2, options=AGAIN),
    of_counts("all_gather_matmul", (2,) * RANKS),
    of_counts("matmul_reduce_scatter", COUNTS, 3),
    of_counts("matmul_reduce_scatter", (0, 2, 1, 2)[:RANKS]),
    of_counts("matmul_reduce_scatter", (2,) * RANKS, 3),
]


@pytest.mark.parametrize(
    "where, spelling",
    [("devices", "shard_map"), ("devices", "automatic"), ("processes", "shard_map")],
)
@ranked
def test_ranks_may_have_different_numbers_of_tokens(world: World, spelling: str) -> None:
    """Numbers of tokens that differ between ranks, some of which have none, or are equal."""
    world.ep.close()
    with joined() as mesh:
        for layer in UNEQUAL:
            check(mesh, layer, spelling)


def returned(
    world: World,
    spelling: str,
    save_gathered: bool,
    counts: tuple[int, ...] | None = None,
    fp8: bool = False,
) -> None:
    """The gathered rows, and the gradients of what is made of them beside the product."""
    world.ep.close()
    tokens = ((2, 2 * RANKS), 1) if counts is None else ((sum(counts), 2), 0)
    options = {"save_gathered": save_gathered, "return_gathered": True, "fp8": fp8}
    layer = Layer("all_gather_matmul", *tokens, bias="float32", activation="relu", counts=counts)
    specs, spec = layer.specs()
    (arrays, grad), (out, grads) = layer.arrays(), layer.expected()
    # Inside of a map each rank has a copy of the rows, and a gradient of its own.
    copies = RANKS if spelling == "shard_map" else 1
    rng = np.random.default_rng(SEED)
    rows = layer.whole()[0]["a"]
    of_rows = rng.integers(-2, 3, (copies, *rows.shape)).astype(np.float32)
    more = of_rows.sum(0)
    grads["a"] = grads["a"] + (more if counts is None else padded(counts, more, 0))

    def function(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
        named = dict(zip(specs, given)) | options
        dim = {"gather_dim": layer.dim, "tokens_per_rank": counts}
        found = tp.all_gather_matmul(**named, **dim, activation="relu")
        return found.out, found.gathered[None]

    with joined() as mesh:
        whole = P("tp") if copies > 1 else P()
        gather = spelled(mesh, spelling, function, tuple(specs.values()), (spec, whole))
        args = placed(mesh, arrays.values(), specs.values())
        args = [tuple(placed(mesh, (grad, of_rows), (spec, whole))), *args]
        wanted = (out, np.broadcast_to(rows, of_rows.shape)), tuple(grads.values())
        all_same(compiled(with_gradients(gather), args, None)(*args), wanted)


@pytest.mark.parametrize("save_gathered", [True, False])
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_gathered_rows_are_returned_and_have_gradients(spelling, save_gathered):
    run("devices", returned, spelling, save_gathered)


@pytest.mark.parametrize("fp8", [False, True], ids=["wide", "fp8"])
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_gathered_rows_of_ranks_with_different_numbers_of_tokens(spelling, fp8):
    """Whole numbers are exact also in fp8."""
    for save_gathered in (True, False):
        run("devices", returned, spelling, save_gathered, COUNTS, fp8)


def test_one_rank_is_a_plain_product():
    with joined(ranks=1) as mesh:
        for layer in LAYERS:
            check(mesh, layer, "shard_map")


def test_arrays_that_are_nowhere_yet_and_no_jit():
    with joined() as mesh:
        for layer in LAYERS[4:5]:
            arrays, grad = layer.arrays()
            out, backward = jax.vjp(lambda given, layer=layer: layer.run(**given), arrays)
            all_same((out, backward(grad)[0]), layer.expected())
            where = NamedSharding(mesh.mesh, layer.specs()[1])
            assert out.sharding.is_equivalent_to(where, out.ndim)


def test_a_mesh_of_explicit_axes():
    """As ``jax.make_mesh`` makes it unless it is told otherwise; current or not."""
    mesh = tp.init(jax.make_mesh((RANKS,), ("tp",)), "tp")
    assert mesh.mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    try:
        for layer in LAYERS[3:6:2]:
            arrays, (specs, out) = layer.arrays()[0], layer.specs()
            args = {name: place(mesh.mesh, arrays[name], spec) for name, spec in specs.items()}
            for current in (jax.set_mesh(mesh.mesh), contextlib.nullcontext()):
                for run in (layer.run, jax.jit(lambda layer=layer, **given: layer.run(**given))):
                    with current:
                        found = run(**args)
                    same("out", found, layer.expected()[0])
                    assert found.sharding.spec == out
    finally:
        mesh.close()


def gelu(world: World) -> None:
    """Near JAX's in float32, which adds in another order."""
    world.ep.close()
    with joined() as mesh:
        for layer in LAYERS[2:6:2] + [Layer("matmul_all_reduce")]:
            layer = dataclasses.replace(layer, activation="gelu")
            step, args = trained(mesh, layer, "shard_map")
            arrays, grad = layer.arrays()

            def plain(given: dict[str, np.ndarray], layer: Layer = layer) -> jax.Array:
                b = given["b"].T if layer.transpose_b else given["b"]
                return jax.nn.gelu(given["a"] @ b + given.get("bias", 0), approximate=True)

            scale = {name: (array / 16).astype(array.dtype) for name, array in arrays.items()}
            args[1:] = placed(mesh, scale.values(), layer.specs()[0].values())
            reference = with_gradients(lambda *given, plain=plain: plain(dict(zip(scale, given))))
            with jax.default_matmul_precision("float32"):
                wanted = reference(grad, *scale.values())
            all_same(step(*args), wanted, tolerance=1e-4)


def test_gelu_and_its_gradient_are_near_those_of_jax():
    run("devices", gelu)


def later_on_later_ranks(x: jax.Array) -> jax.Array:
    """x, behind work that takes longer the higher the rank."""
    start = jnp.full((256, 256), 1e-3) + 0 * x[0, 0]
    turns = 4 * jax.lax.axis_index("tp")
    end = jax.lax.fori_loop(0, turns, lambda _, square: jnp.tanh(square @ square), start)
    return x + (end.sum() > 1e9).astype(x.dtype)


def blocks(world: World, policy: str, activation: Literal["relu"] | None, steps: int = 1) -> None:
    """Two blocks of a pair of layers in a scan, rematerialised, as they are on one device.

    Where there are several steps the ranks are out of step by what they compute before a gather.
    """
    world.ep.close()
    rng = np.random.default_rng(SEED)
    shapes = (4 * RANKS, 8), (2, 8, 4 * RANKS), (2, 4 * RANKS, 8)
    x, w_in, w_out = (rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes)
    grad = rng.integers(-2, 3, x.shape).astype(np.float32)
    specs = P("tp"), P(None, None, "tp"), P(None, "tp")

    def block(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        given = later_on_later_ranks(x) if steps > 1 else x
        hidden, order = tp.all_gather_matmul(given, weights[0], activation=activation)
        return x + tp.matmul_reduce_scatter(hidden, weights[1], after=order).out, None

    def plain(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        hidden = x @ weights[0]
        return x + (jax.nn.relu(hidden) if activation else hidden) @ weights[1], None

    def trunk(block: Any) -> Callable[..., jax.Array]:
        return lambda x, w_in, w_out: jax.lax.scan(block, x, (w_in, w_out))[0]

    with joined() as mesh:
        saved = {
            "nothing": None,
            "order": jax.checkpoint_policies.save_only_these_names("crossdock_order"),
        }[policy]
        repeated = trunk(jax.checkpoint(block, policy=saved))
        step = with_gradients(spelled(mesh, "shard_map", repeated, specs, specs[0]))
        args = placed(mesh, (grad, x, w_in, w_out), (specs[0], *specs))
        for _ in range(steps):
            out, grads = jax.block_until_ready(step(*args))
        with jax.default_matmul_precision("float32"):
            all_same((out, grads), with_gradients(trunk(plain))(grad, x, w_in, w_out))


@pytest.mark.parametrize(
    "where, policy", [("devices", "nothing"), ("devices", "order"), ("processes", "order")]
)
def test_blocks_in_a_scan_with_remat_have_the_gradients_of_one_device(where, policy):
    run(where, blocks, policy, "relu")


def test_a_repeated_operation_comes_before_backward_ones_also_of_ranks_that_are_late():
    run("devices", blocks, "order", None, 10)


def test_maps_that_do_not_know_what_varies():
    """Gradients of what all ranks have are summed by JAX there, so each rank gives its part."""
    with joined() as mesh:
        for layer in LAYERS[:5]:
            (specs, out), (arrays, grad) = layer.specs(), layer.arrays()

            def product(*given: jax.Array, layer: Layer = layer) -> jax.Array:
                return layer.run(**dict(zip(layer.specs()[0], given)))

            program = mapped(mesh, product, tuple(specs.values()), out, check_vma=False)
            wanted, grads = layer.expected()
            found = with_gradients(program)(grad, *arrays.values())
            all_same(found, (wanted, tuple(grads.values())))
