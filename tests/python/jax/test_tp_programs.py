"""Products in programs: no collective but ours, one order, mistakes, and what is left behind."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import crossdock.jax as xd
from crossdock import GemmConfig, errors
from crossdock.jax import tp
from crossdock.jax._group import programs_of
from crossdock.jax.tp import _run
from jax_support import RANKS, World, config_of, everywhere, on_processes
from programs import (
    COLLECTIVES,
    KEEPING_BARRIERS,
    all_same,
    compiled,
    mapped,
    place,
    placed,
    same,
    spelled,
    with_gradients,
)
from test_jax_life import workers
from tp_support import CHAINS, LAYERS, K, Layer, N, check, joined, trained

# ---- XLA's programs of them ----------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
@pytest.mark.parametrize("operation", CHAINS)
def test_beside_an_axis_of_data_weights_alone_are_summed_by_xla(operation, spelling):
    layer = Layer(operation, (4, RANKS), 1, bias="float32")
    with joined(data=2) as mesh:
        step, args = trained(mesh, layer, spelling)
        tokens = jax.jit(lambda *args: (step(*args)[0], step(*args)[1][0]))
        assert COLLECTIVES.findall(tokens.lower(*args).compile().as_text()) == []
        text = step.lower(*args).compile().as_text()
    assert {kind.removesuffix("-start") for kind in COLLECTIVES.findall(text)} == {"all-reduce"}
    # Devices 0 and 1 are one set of ranks, and hold the same data. XLA says so in three ways.
    groups = re.findall(r"replica_groups=(.+?), use_global", text)
    over_data = {"{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", "mesh['data'=2,'tp'=2] {'data'}"}
    assert groups and set(groups) <= over_data, groups


def test_order_of_branches_is_in_the_program():
    """A gate and a projection of the same rows, which do not need each other."""
    layer = Layer("all_gather_matmul")
    with joined() as mesh:

        def gated(a: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
            left = tp.all_gather_matmul(a, gate)
            return left.out * tp.all_gather_matmul(a, up, after=left).out

        (specs, out), (arrays, grad) = layer.specs(), layer.arrays()
        a, b = arrays.values()
        args = placed(mesh, (grad, a, b, b), (out, specs["a"], specs["b"], specs["b"]))
        step = jax.jit(lambda *args: with_gradients(gated)(*args)[1])
        chain = ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
        found = compiled(step, args, chain)(*args)
        same("gradient of a", found[0], (2 * (grad * (a @ b)) @ b.T).astype(np.float32))


@pytest.mark.parametrize(
    "policy, again",
    [
        ("nothing_saveable", ["all_gather", "reduce_scatter"]),
        ("crossdock_order", ["all_gather"]),
        ("everything_saveable", []),
    ],
)
def test_backward_products_come_behind_all_that_is_repeated(policy, again):
    """The data of the second product's gradient do not say that the first one comes before."""
    layers = Layer("all_gather_matmul"), Layer("matmul_reduce_scatter")
    policies = jax.checkpoint_policies

    def both(x: jax.Array, w_in: jax.Array, h: jax.Array, w_out: jax.Array) -> Any:
        first = tp.all_gather_matmul(x, w_in)
        return first.out, tp.matmul_reduce_scatter(h, w_out, after=first).out

    with joined() as mesh:
        saved = getattr(policies, policy, policies.save_only_these_names(policy))
        specs = [spec for layer in layers for spec in layer.specs()[0].values()]
        outs = tuple(layer.specs()[1] for layer in layers)
        remat = jax.checkpoint(both, policy=saved)
        step = with_gradients(spelled(mesh, "shard_map", remat, tuple(specs), outs), late=True)
        grads = tuple(placed(mesh, (layer.arrays()[1] for layer in layers), outs))
        arrays = (array for layer in layers for array in layer.arrays()[0].values())
        args = [grads, *placed(mesh, arrays, specs)]
        chain = ["all_gather", "reduce_scatter", *again, "all_gather", "reduce_scatter"]
        found = compiled(step, args, chain, KEEPING_BARRIERS)(*args)
        wanted = [layer.expected() for layer in layers]
        of_args = tuple(grad for _, grads in wanted for grad in grads.values())
        all_same(found, (tuple(out for out, _ in wanted), of_args))


# ---- Tags, by which ranks see that they call the same product ------------------------------------

GATHER, SCATTER, REDUCE = (Layer(operation) for operation in CHAINS)


def tags_of(mesh: tp.TpMesh, function: Callable[..., Any], backward: bool = False) -> list[int]:
    """The tags of a function of a rank's rows and weights, or of it and of its gradient."""
    (specs, out), (arrays, grad) = GATHER.specs(), GATHER.arrays()
    program, args = mapped(mesh, function, tuple(specs.values()), out), arrays.values()
    if backward:
        forward = program
        program = jax.jit(lambda grad, *args: jax.vjp(forward, *args)[1](grad))
        args = grad, *args
    return [int(tag) for tag in re.findall(r"\btag = (\d+)", program.lower(*args).as_text())]


def test_tags_are_of_the_line_and_its_turn_in_every_trace():
    """So they are the same in another process, and of a product that is repeated."""

    def twice(a: jax.Array, b: jax.Array) -> jax.Array:
        order, total = None, 0.0
        for _ in range(2):
            out, order = tp.all_gather_matmul(a, b, after=order)
            total += out
        return total * tp.all_gather_matmul(a, b, after=order).out

    with joined() as mesh:
        found = tags_of(mesh, twice, backward=True)
        assert len(found) == len(set(found)) == 6
        assert all(tag % 2 == 0 for tag in found[:3])
        assert found[3:] == [tag + 1 for tag in reversed(found[:3])]  # the backward products
        jax.clear_caches()
        assert tags_of(mesh, twice, backward=True) == found


SOURCE = """
def product(tp, a, b):
    assert a is not None, "left out under -O, which moves all instructions behind it"
    return tp.all_gather_matmul(a, b).out if True else (
        tp.all_gather_matmul(a, b).out)
"""


def test_tags_are_of_the_source_and_not_of_what_an_interpreter_makes_of_it():
    found = []
    with joined() as mesh:
        for optimize in (0, 2):
            names: dict[str, Any] = {}
            exec(compile(SOURCE, "program.py", "exec", optimize=optimize), names)
            found.append(tags_of(mesh, functools.partial(names["product"], tp)))
    assert len(found[0]) == 1 and found[0] == found[1]


def test_a_function_that_traces_many_others_is_not_forgotten():
    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        order, total = None, 0.0
        for _ in range(2):
            product, order = tp.all_gather_matmul(a, b, after=order)
            total += product
            for _ in range(100):
                jax.eval_shape(lambda a, b: tp.all_gather_matmul(a, b).out, a, b)
        return total

    with joined() as mesh:
        found = tags_of(mesh, function)
    assert len(found) == len(set(found)) == 2


def test_programs_of_unrolled_loops_do_not_stay_for_ever(monkeypatch):
    monkeypatch.setattr(_run, "_MOST_PROGRAMS", 4)
    layer = Layer("matmul_all_reduce", (7,))

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        order, total = None, 0.0
        for _ in range(6):
            out, order = tp.matmul_all_reduce(a, b, after=order)
            total += out
        return total

    with joined() as mesh:
        config = GemmConfig(
            max_tokens=2, max_k=K // RANKS, max_n=N, dtype=np.float32, operations=("all_reduce",)
        )
        args = placed(mesh, layer.arrays()[0].values(), layer.specs()[0].values())
        for _ in range(2):
            same("out", jax.jit(function)(*args), 6 * layer.expected()[0])
            jax.clear_caches()
        assert len(programs_of(mesh.context(config))) == 4


@on_processes
def test_ranks_that_call_products_in_different_orders(world: World) -> None:
    """Two products of equal sizes, which one process may call in the other order."""
    world.ep.close()
    specs, out = GATHER.specs()
    with joined() as mesh:

        def both(a: jax.Array, b: jax.Array, first: int) -> tuple[jax.Array, jax.Array]:
            calls = [
                lambda order: tp.all_gather_matmul(a, b, after=order),
                lambda order: tp.all_gather_matmul(2 * a, b, after=order),
            ]
            products: dict[int, tp.Product] = {}
            products[first] = calls[first](None)
            products[1 - first] = calls[1 - first](products[first])
            return products[0].out, products[1].out

        args = placed(mesh, GATHER.arrays()[0].values(), specs.values())
        for differs in (False, True, False):
            first = int(differs and jax.process_index() == 1)
            program = mapped(
                mesh, lambda a, b, first=first: both(a, b, first), tuple(specs.values()), (out, out)
            )
            if differs:
                with pytest.raises(
                    (jax.errors.JaxRuntimeError, ValueError), match="XD_ERROR_MISMATCH: .*tag"
                ):
                    jax.block_until_ready(program(*args))
            else:
                for factor, found in enumerate(program(*args), 1):
                    same("out", found, factor * GATHER.expected()[0])


@everywhere
def test_products_and_experts_are_one_chain(world: World) -> None:
    """Operations of both kinds on one mesh, in one chain."""
    config = config_of(4, hidden=K, max_topk=1)
    mesh = tp.init(world.mesh, "ep")
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 8, (4 * RANKS, 1)).astype(np.int32)
    x, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((4 * RANKS, K), (K, N)))

    def both(ids: jax.Array, x: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        plan = xd.ep_prepare(config, ids)
        product = tp.all_gather_matmul(x, b, after=plan)
        plan = xd.ep_prepare(config, ids, after=product.order)
        received = xd.ep_dispatch(plan, x)
        return product.out, xd.ep_combine(received.plan, received.tokens)[0]

    try:
        specs = P("ep"), P("ep"), P(None, "ep")
        args = placed(mesh, (ids, x, b), specs)
        program = mapped(mesh, both, specs, (P(None, "ep"), P("ep")))
        chain = ["prepare", "all_gather", "prepare", "dispatch", "combine"]
        all_same(compiled(program, args, chain)(*args), (x @ b, x))
    finally:
        mesh.close()


# ---- Mistakes ------------------------------------------------------------------------------------


ONES = np.ones
EVEN, MIDDLE = (4,) * RANKS, Layer("all_gather_matmul", (2, 4 * RANKS), 1)
SMALL = GemmConfig(max_tokens=2, max_k=K, max_n=K, dtype="float32")
MISTAKES = {
    TypeError: [
        (GATHER, {"a": ONES((16, K), np.int32)}, "a: expected bfloat16, float16 or fl"),
        (GATHER, {"b": ONES((K, N), "f2")}, "b: .* of a, float32, got float16"),
        (GATHER, {"bias": ONES(N, "f2")}, "bias: expected float32 or float32, got"),
        (GATHER, {"config": 3}, "config: expected a GemmConfig, got int"),
    ],
    ValueError: [
        (GATHER, {"a": ONES(K, "f4")}, r"a: expected \[..., K\] with tokens .*\(32,\)"),
        (GATHER, {"a": ONES((18, K), "f4")}, "a: .* dimension 0 .* multiple of 4, the"),
        (SCATTER, {"a": ONES((18, K), "f4")}, "multiple of the 4 ranks along scatter_d"),
        (REDUCE, {"a": ONES((0, K), "f4")}, r"a: .* one token .* \(0, 8\) on a rank"),
        (GATHER, {"b": ONES((K, N, 1), "f4")}, "b: expected 2 dimensions, got shape"),
        (GATHER, {"b": ONES((N, 2 * K), "f4")}, r"b: .*\[K, N\] with K = 32 as of a"),
        (GATHER, {"b": ONES((K, 8), "f4")}, "multiple of 16 bytes .* N = 2 of 4 bytes"),
        (
            GATHER,
            {"transpose_b": True},
            rf"b: expected \[N, K\] with K = 32 as of a, \(4, 32\) on a rank; got .*{N}",
        ),
        (GATHER, {"bias": ONES((N, 1), "f4")}, r"bias: expected \[N\], got shape"),
        (GATHER, {"bias": ONES(4, "f4")}, r"bias: .* N = 16 as of b, got \(1,\) on a"),
        (GATHER, {"tokens_per_rank": (4,)}, f"tokens_per_rank: expected {RANKS} num"),
        (GATHER, {"tokens_per_rank": (-1, 4, *EVEN[2:])}, "from 0, .*-1"),
        (GATHER, {"tokens_per_rank": (0,) * RANKS}, "one of them above it, got"),
        (GATHER, {"tokens_per_rank": (5,) * RANKS}, r"a: expected 5 .*the most of"),
        (SCATTER, {"tokens_per_rank": (5,) * RANKS}, r"a: expected .*the sum of"),
        (
            MIDDLE,
            {"tokens_per_rank": EVEN, "gather_dim": 1},
            "gather_dim: expected a dimension with none of more than one element before it",
        ),
        (GATHER, {"gather_dim": 1}, "gather_dim: .* before its last one, 0 to 0, got 1"),
        (SCATTER, {"scatter_dim": -3}, "scatter_dim: .* got -3 for shape"),
        (GATHER, {"activation": "dgelu"}, "activation: expected one of .*'relu', got"),
        (REDUCE, {"algo": "ring"}, "algo: expected .*'sequential', .*got 'ring'"),
        (GATHER, {"algo": "cublasmp"}, "algo: .*'sequential', got 'cublasmp'"),
        (
            GATHER,
            {"config": SMALL},
            "config.max_tokens: exp.* at least 4 for .* gradient, got 2",
        ),
        (GATHER, {"after": ONES(3, "f4")}, r"after: .* shape \(4,\) here; got float32"),
    ],
}


@pytest.mark.parametrize(
    "error, layer, changes, text",
    [(error, *row) for error, rows in MISTAKES.items() for row in rows],
)
def test_arguments_that_do_not_fit(error, layer, changes, text):
    with joined(), pytest.raises(error, match=text):
        getattr(tp, layer.operation)(**layer.arrays()[0] | changes)


def test_bounds_of_the_gradient_are_checked_where_it_is_asked_for():
    layer = Layer("all_gather_matmul")
    with joined() as mesh:
        config = GemmConfig(max_tokens=4, max_k=K, max_n=N // RANKS, dtype="float32")
        bounded = dataclasses.replace(layer, options=(("config", config),))
        step, args = trained(mesh, bounded, "shard_map")
        with pytest.raises(ValueError, match="config.max_n: expected at least 32 .*gradient, got"):
            step(*args)


def test_layouts_that_are_others_are_refused():
    with joined() as mesh:
        a, b = LAYERS[2].arrays()[0]["a"], LAYERS[2].arrays()[0]["b"]
        wrong = place(mesh.mesh, b, P("tp"))
        text = r"b: expected P.*\(None, .*\), dimensions split .* got P.*\('tp'"
        with pytest.raises(ValueError, match=text):
            tp.all_gather_matmul(a, wrong)
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.jit(lambda a, b: tp.all_gather_matmul(a, b).out)(
                place(mesh.mesh, a, P("tp")), wrong
            )


def test_parts_that_have_to_differ_and_parts_that_must_not():
    arrays, _ = LAYERS[5].arrays()
    with joined() as mesh:
        gather = mapped(mesh, lambda a, b: tp.all_gather_matmul(a, b).out, P(), P(None, "tp"))
        advice = r"name them in in_specs, .* jax\.lax\.pcast\(a, \('tp',\), to='varying'\)"
        with pytest.raises(ValueError, match=rf"a: expected parts .* \('tp',\): {advice}"):
            gather(arrays["a"], arrays["b"])
        specs = P(None, "tp"), P("tp"), P("tp")
        reduce = mapped(mesh, lambda a, b, c: tp.matmul_all_reduce(a, b, bias=c).out, specs, P())
        with pytest.raises(ValueError, match=r"bias: expected the same one on all .*\('tp',\)"):
            reduce(arrays["a"], arrays["b"], np.tile(arrays["bias"], RANKS))


def test_gradient_of_all_reduce_needs_a_map_that_knows_what_varies():
    arrays, _ = LAYERS[5].arrays()
    with joined() as mesh:
        specs = P(None, "tp"), P("tp")
        reduce = mapped(
            mesh, lambda a, b: tp.matmul_all_reduce(a, b).out, specs, P(), check_vma=False
        )
        same("out", reduce(arrays["a"], arrays["b"]), arrays["a"] @ arrays["b"])
        with pytest.raises(ValueError, match=r"expected shard_map\(check_vma=True\) where it is"):
            jax.grad(lambda a: reduce(a, arrays["b"]).sum())(arrays["a"])


def test_operations_need_init():
    with pytest.raises(RuntimeError, match="crossdock.jax.tp.init.* has not been called"):
        tp.matmul_all_reduce(ONES((4, 8), "f4"), ONES((8, 8), "f4"))
    with pytest.raises(ValueError, match=r"tp_axis: expected axes of \('x',\), got 'tp'"):
        tp.init(jax.make_mesh((RANKS,), ("x",)), "tp")


@everywhere
def test_what_a_context_cannot_do(world: World) -> None:
    """A request that a context cannot meet fails on all ranks, and the next call works."""
    world.ep.close()
    with joined() as mesh:
        config = GemmConfig(
            max_tokens=4, max_k=K, max_n=N, dtype="float32", operations=["all_gather"]
        )
        layer = Layer("all_gather_matmul", options=(("config", config),))
        step, args = trained(mesh, layer, "shard_map")
        for failed in (1, 2):
            with pytest.raises(
                (jax.errors.JaxRuntimeError, ValueError),
                match="XD_ERROR_UNSUPPORTED: .*reduce_scatter",
            ):
                jax.block_until_ready(step(*args))
            same("out", jax.jit(lambda a, b: layer.run(a=a, b=b))(*args[1:]), layer.expected()[0])
            assert mesh.errors(config) == {device: failed for device in mesh.devices}


@on_processes
def test_configs_that_differ_between_processes(world: World) -> None:
    """One process's config differs: none has the context, all say why."""
    world.ep.close()
    with joined() as mesh:
        with pytest.raises(errors.Mismatch, match="max_k"):
            mesh.create(GemmConfig(max_tokens=4, max_k=64 if jax.process_index() else 32, max_n=32))
        check(mesh, LAYERS[2], "shard_map")


# ---- Things left behind --------------------------------------------------------------------------


def test_lengths_up_to_the_same_power_of_two_share_a_context():
    """So a program that is compiled for many lengths does not take memory for each."""
    gc.collect()
    before = workers()
    with joined() as mesh:
        for tokens in (5, 6, 7, 8):
            check(mesh, Layer("all_gather_matmul", (tokens * RANKS,)), "automatic")
        assert workers() == before + RANKS
        check(mesh, Layer("all_gather_matmul", (9 * RANKS,)), "automatic")
        assert workers() == before + 2 * RANKS


def test_explain_says_what_a_product_does():
    a, b = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((3, 2, K), (K, N)))
    with joined() as mesh:
        with pytest.raises(RuntimeError, match=r"max_tokens=8, .* has not been made: run the prod"):
            mesh.explain("all_gather", a, b)
        config = GemmConfig(max_tokens=8, max_k=K, max_n=N, dtype="float32")
        mesh.create(config)
        for operation in ("all_gather", "reduce_scatter", "all_reduce"):
            tall = jax.ShapeDtypeStruct((3, 2 * RANKS, K), np.float32)
            rows = a if operation == "all_gather" else tall
            plan = mesh.explain(operation, rows, b, config=config)
            named = mesh.explain(operation, rows, b, config=config, algo="sequential")
            assert plan.estimate_us > 0 and "SEQUENTIAL" in plan.text
            assert named.algo == "sequential"
        with pytest.raises(ValueError, match=r"b: expected \[N, K\] with K = 32 as of a"):
            mesh.explain("all_gather", a, b, transpose_b=True)
        with pytest.raises(ValueError, match="operation: expected one of 'all_gather', .*'bulk'"):
            mesh.explain("bulk", a, b)


def test_layers_of_a_pair_share_a_context_which_ends_with_the_mesh():
    gc.collect()
    before = workers()
    with joined() as mesh:
        arrays, _ = GATHER.arrays()
        hidden, order = tp.all_gather_matmul(arrays["a"], arrays["b"])
        back = tp.matmul_reduce_scatter(hidden, arrays["b"], transpose_b=True, after=order)
        same("out", back.out, arrays["a"] @ arrays["b"] @ arrays["b"].T)
        assert workers() == before + RANKS
        assert repr(mesh) == f"TpMesh({{'tp': {RANKS}}}, {RANKS} ranks along tp)"
    gc.collect()
    assert workers() == before
