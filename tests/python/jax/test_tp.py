"""Products that are spread over the ranks: values and every gradient, exactly, on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from crossdock.jax import tp
from jax_support import RANKS, World, run
from test_hlo import COLLECTIVES

SEED = 1515
K, N = 32, 64  # of the whole layer


@contextlib.contextmanager
def joined(data: int = 1, ranks: int = RANKS) -> Iterator[tp.TpMesh]:
    """`data` sets of ranks; the mesh has an axis of data if there are several."""
    devices = np.array(jax.devices()[:ranks])
    if data == 1:
        mesh = tp.init(Mesh(devices, ("tp",)), "tp")
    else:
        mesh = tp.init(Mesh(devices.reshape(data, -1), ("data", "tp")), "tp", data_axes="data")
    try:
        yield mesh
    finally:
        mesh.close()


@dataclasses.dataclass(frozen=True)
class Layer:
    """One product of whole arrays, and how they lie on a mesh."""

    operation: str
    tokens: tuple[int, ...] = (4 * RANKS,)
    dim: int = 0
    dtype: str = "float32"
    transpose_b: bool = False
    activation: str | None = None
    bias: str | None = None  # its dtype
    options: tuple[tuple[str, Any], ...] = ()

    def specs(self, data: tuple[str, ...] = ()) -> tuple[dict[str, P], P]:
        """Of the arrays by name, and of the result."""
        gathers = self.operation == "all_gather_matmul"
        ndim = len(self.tokens) + 1

        def tokens(split: bool, features: bool) -> P:
            axes: list[tuple[str, ...]] = [()] * ndim
            axes[0] = data
            axes[self.dim] += ("tp",) if split else ()
            axes[-1] = ("tp",) if features else ()
            return P(*(names or None for names in axes))

        specs = {
            "a": tokens(gathers, not gathers),
            "b": P(None, "tp") if gathers != self.transpose_b else P("tp", None),
        }
        if self.bias:
            specs["bias"] = P("tp") if gathers else P()
        return specs, tokens(self.operation == "matmul_reduce_scatter", gathers)

    def arrays(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Small whole numbers, of which every sum is exact; and the gradient of the result."""
        rng = np.random.default_rng(SEED)

        def whole(shape: tuple[int, ...], dtype: str) -> np.ndarray:
            return rng.integers(-2, 3, shape).astype(jnp.dtype(dtype))

        arrays = {
            "a": whole((*self.tokens, K), self.dtype),
            "b": whole((N, K) if self.transpose_b else (K, N), self.dtype),
        }
        if self.bias:
            arrays["bias"] = whole((N,), self.bias)
        return arrays, whole((*self.tokens, N), self.dtype)

    def expected(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The result and the gradients, in float64."""
        arrays, grad = self.arrays()
        dtypes = {name: array.dtype for name, array in arrays.items()}
        wide = {name: array.astype(np.float64) for name, array in arrays.items()}
        a, grad = wide["a"], grad.astype(np.float64)
        b = wide["b"].T if self.transpose_b else wide["b"]
        out = a @ b + wide.get("bias", 0)
        if self.activation == "relu":
            grad = np.where(out > 0, grad, 0)
            out = np.maximum(out, 0)
        rows = a.reshape(-1, K), grad.reshape(-1, N)
        of_b = rows[0].T @ rows[1]
        grads = {"a": grad @ b.T, "b": of_b.T if self.transpose_b else of_b}
        if self.bias:
            grads["bias"] = rows[1].sum(0)
        return out.astype(self.dtype), {k: g.astype(dtypes[k]) for k, g in grads.items()}

    def run(self, **arrays: jax.Array) -> jax.Array:
        """The product, on whole arrays or on one rank's."""
        dim = {
            "all_gather_matmul": {"gather_dim": self.dim},
            "matmul_reduce_scatter": {"scatter_dim": self.dim},
        }.get(self.operation, {})
        return getattr(tp, self.operation)(
            **arrays,
            **dim,
            **dict(self.options),
            transpose_b=self.transpose_b,
            activation=self.activation,
        ).out


def place(mesh: Mesh, array: np.ndarray, spec: P) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def same(name: str, got: jax.Array, wanted: np.ndarray) -> None:
    """Every shard of this process has exactly the numbers that are expected of it."""
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), name
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(
            np.asarray(shard.data).astype(np.float64),
            wanted[shard.index].astype(np.float64),
            err_msg=f"{name} on {shard.device}",
        )


def trained(mesh: tp.TpMesh, layer: Layer, spelling: str) -> tuple[Callable[..., Any], list[Any]]:
    """A function that returns the result and the gradients, and its arguments on the mesh."""
    specs, out = layer.specs(mesh.place.data_axes)
    arrays, grad = layer.arrays()
    function = lambda *given: layer.run(**dict(zip(specs, given)))  # noqa: E731
    if spelling == "shard_map":
        function = jax.shard_map(
            function, mesh=mesh.mesh, in_specs=tuple(specs.values()), out_specs=out
        )

    return with_gradients(function, specs), _placed(mesh, (grad, out), arrays, specs)


def with_gradients(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """The function behind the gradient of its result: that result, and the gradients by name."""

    def step(grad: jax.Array, *given: jax.Array) -> Any:
        out, backward = jax.vjp(function, *given)
        return out, dict(zip(names, backward(grad)))

    return jax.jit(step)


def _placed(
    mesh: tp.TpMesh,
    grad: tuple[np.ndarray, P],
    arrays: dict[str, np.ndarray],
    specs: dict[str, P],
) -> list[jax.Array]:
    pairs = [grad, *((arrays[name], spec) for name, spec in specs.items())]
    return [place(mesh.mesh, *pair) for pair in pairs]


def check(mesh: tp.TpMesh, layer: Layer, spelling: str) -> None:
    step, args = trained(mesh, layer, spelling)
    out, grads = step(*args)
    wanted, wanted_grads = layer.expected()
    same(f"{layer} out", out, wanted)
    for name, grad in grads.items():
        same(f"{layer} gradient of {name}", grad, wanted_grads[name])


AGAIN = (("save_gathered", False),)
LAYERS = [
    Layer("all_gather_matmul", dtype="bfloat16", activation="relu", bias="float32"),
    Layer("all_gather_matmul", (2, 4 * RANKS), 1, transpose_b=True, options=AGAIN),
    Layer("all_gather_matmul", activation="relu", bias="float32", options=AGAIN),
    Layer("matmul_reduce_scatter", dtype="bfloat16", activation="relu", bias="bfloat16"),
    Layer("matmul_reduce_scatter", (2, 2, 3 * RANKS), 2, transpose_b=True, bias="float32"),
    Layer("matmul_all_reduce", (7,), activation="relu", bias="float32"),
    Layer("matmul_all_reduce", (2, 3), dtype="float16", transpose_b=True),
]


def layers(world: World, spelling: str, data: int) -> None:
    world.ep.close()
    with joined(data) as mesh:
        for layer in LAYERS:
            if layer.tokens[0] % data == 0:
                check(mesh, layer, spelling)


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
def test_values_and_all_gradients_are_those_of_one_process(where, spelling, data):
    run(where, layers, spelling, data)


@dataclasses.dataclass(frozen=True)
class Unequal:
    """A product of tokens of which ranks have different numbers, some of them none."""

    operation: str
    inner: tuple[int, ...] = ()  # dimensions of tokens behind those that are split
    options: tuple[tuple[str, Any], ...] = ()

    def run(self, spelling: str, counts: tuple[int, ...]) -> None:
        gathers = self.operation.startswith("all_gather")
        layer = Layer(
            "all_gather_matmul" if gathers else "matmul_reduce_scatter",
            (sum(counts), *self.inner),
            activation="relu",
            bias="float32",
            transpose_b=True,
        )
        (specs, out), (arrays, grad) = layer.specs(), layer.arrays()
        wanted, wanted_grads = layer.expected()
        if gathers:
            arrays["a"] = padded(counts, arrays["a"], np.nan)
            wanted_grads["a"] = padded(counts, wanted_grads["a"], 0)
        else:
            wanted, grad = padded(counts, wanted, 0), padded(counts, grad, np.nan)

        def function(*given: jax.Array) -> jax.Array:
            options = dict(self.options) | {"activation": "relu", "transpose_b": True}
            named = dict(zip(specs, given)) | options | {"tokens_per_rank": counts}
            return getattr(tp, self.operation)(**named).out

        with joined() as mesh:
            program = function
            if spelling == "shard_map":
                program = jax.shard_map(
                    function, mesh=mesh.mesh, in_specs=tuple(specs.values()), out_specs=out
                )

            args = _placed(mesh, (grad, out), arrays, specs)
            compiled = with_gradients(program, specs).lower(*args).compile()
            assert COLLECTIVES.findall(compiled.as_text()) == []
            found, grads = compiled(*args)
            same(f"{self} out", found, wanted)
            for name, array in grads.items():
                same(f"{self} gradient of {name}", array, wanted_grads[name])


def padded(counts: tuple[int, ...], rows: np.ndarray, value: float) -> np.ndarray:
    """The tokens of each rank, and behind them this value, as many as the most of them."""
    parts = np.split(rows, np.cumsum(counts)[:-1])
    found = np.full((len(parts), max(counts), *rows.shape[1:]), value, rows.dtype)
    for of_rank, part in zip(found, parts):
        of_rank[: len(part)] = part
    return found.reshape(-1, *rows.shape[1:])


UNEQUAL = [
    Unequal("all_gather_matmul"),
    Unequal("all_gather_matmul", (2,), AGAIN),
    Unequal("matmul_reduce_scatter"),
    Unequal("matmul_reduce_scatter", (3,)),
]


def unequal(world: World, spelling: str) -> None:
    world.ep.close()
    for product in UNEQUAL:
        for counts in ((3, 0, 5, 1)[:RANKS], (0, 2, 1, 2)[:RANKS], (2,) * RANKS):
            product.run(spelling, counts)


@pytest.mark.parametrize(
    "where, spelling",
    [("devices", "shard_map"), ("devices", "automatic"), ("processes", "shard_map")],
)
def test_ranks_may_have_different_numbers_of_tokens(where, spelling):
    run(where, unequal, spelling)


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
    layer = Layer("all_gather_matmul", *tokens, bias="float32", activation="relu")
    specs, spec = layer.specs()
    (arrays, grad), (out, grads) = layer.arrays(), layer.expected()
    # Inside of a map each rank has a copy of the rows, and a gradient of its own.
    copies = RANKS if spelling == "shard_map" else 1
    rng = np.random.default_rng(SEED)
    rows = arrays["a"]
    of_rows = rng.integers(-2, 3, (copies, *rows.shape)).astype(np.float32)
    grads["a"] = grads["a"] + of_rows.sum(0)
    if counts is not None:
        arrays["a"], grads["a"] = padded(counts, rows, np.nan), padded(counts, grads["a"], 0)

    def function(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = tp.all_gather_matmul(
            **dict(zip(specs, given)),
            gather_dim=layer.dim,
            activation="relu",
            save_gathered=save_gathered,
            return_gathered=True,
            tokens_per_rank=counts,
            fp8=fp8,
        )
        return found.out, found.gathered[None]

    with joined() as mesh:
        whole = P("tp") if copies > 1 else P()
        gather: Callable[..., Any] = function
        if spelling == "shard_map":
            gather = jax.shard_map(
                function, mesh=mesh.mesh, in_specs=tuple(specs.values()), out_specs=(spec, whole)
            )
        step = jax.jit(lambda grads, *args: jax.vjp(gather, *args)[1](grads))
        args = [place(mesh.mesh, arrays[name], specs[name]) for name in specs]
        found, gathered = jax.jit(gather)(*args)
        same("out", found, out)
        same("gathered", gathered, np.broadcast_to(rows, of_rows.shape))
        given = place(mesh.mesh, grad, spec), place(mesh.mesh, of_rows, whole)
        compiled = step.lower(given, *args).compile()
        assert COLLECTIVES.findall(compiled.as_text()) == []
        for name, array in zip(specs, compiled(given, *args)):
            same(f"gradient of {name}", array, grads[name])


@pytest.mark.parametrize("save_gathered", [True, False])
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_gathered_rows_are_returned_and_have_gradients(spelling, save_gathered):
    run("devices", returned, spelling, save_gathered)


@pytest.mark.parametrize("fp8", [False, True], ids=["wide", "fp8"])
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_gathered_rows_of_ranks_with_different_numbers_of_tokens(spelling, fp8):
    """Whole numbers are exact in fp8, too."""
    for save_gathered in (True, False):
        run("devices", returned, spelling, save_gathered, (3, 0, 5, 1)[:RANKS], fp8)


def test_one_rank_is_a_plain_product():
    with joined(ranks=1) as mesh:
        for layer in LAYERS:
            check(mesh, layer, "shard_map")


def test_arrays_that_are_nowhere_yet_and_no_jit():
    with joined() as mesh:
        for layer in LAYERS[4:5]:
            arrays, grad = layer.arrays()
            out, backward = jax.vjp(lambda given, layer=layer: layer.run(**given), arrays)
            wanted, wanted_grads = layer.expected()
            same(f"{layer}", out, wanted)
            specs, where = layer.specs()
            assert out.sharding.is_equivalent_to(NamedSharding(mesh.mesh, where), out.ndim)
            for name, found in backward(grad)[0].items():
                same(f"{layer} gradient of {name}", found, wanted_grads[name])


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
            args[1:] = [place(mesh.mesh, scale[n], s) for n, s in layer.specs()[0].items()]

            @jax.jit
            def reference(scale: Any, grad: Any, plain: Any = plain) -> dict[str, jax.Array]:
                out, backward = jax.vjp(plain, scale)
                return {"out": out} | backward(grad)[0]

            with jax.default_matmul_precision("float32"):
                wanted = reference(scale, grad)
            found = step(*args)
            for name, array in ({"out": found[0]} | found[1]).items():
                for shard in array.addressable_shards:
                    np.testing.assert_allclose(
                        shard.data, wanted[name][shard.index], rtol=1e-4, atol=1e-4, err_msg=name
                    )


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
        mapped = jax.shard_map(
            trunk(jax.checkpoint(block, policy=saved)),
            mesh=mesh.mesh,
            in_specs=specs,
            out_specs=specs[0],
        )
        step = jax.jit(lambda grad, *args: jax.vjp(mapped, *args)[1](grad))
        args = zip((grad, x, w_in, w_out), (specs[0], *specs))
        placed = [place(mesh.mesh, array, spec) for array, spec in args]
        for _ in range(steps):
            grads = jax.block_until_ready(step(*placed))
        with jax.default_matmul_precision("float32"):
            wanted = jax.vjp(trunk(plain), x, w_in, w_out)[1](grad)
        for name, found, right in zip(("x", "w_in", "w_out"), grads, wanted):
            same(name, found, np.asarray(right))


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
            specs, out = layer.specs()
            mapped = jax.shard_map(
                lambda *given, layer=layer, specs=specs: layer.run(**dict(zip(specs, given))),
                mesh=mesh.mesh,
                in_specs=tuple(specs.values()),
                out_specs=out,
                check_vma=False,
            )
            arrays, grad = layer.arrays()
            grads = jax.jit(lambda grad, *given: jax.vjp(mapped, *given)[1](grad))(
                grad, *arrays.values()
            )
            for name, found in zip(specs, grads):
                same(f"{layer} gradient of {name}", found, layer.expected()[1][name])
