"""Products of fp8 that are spread over the ranks: exact values, on every rank, and mistakes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from crossdock.jax import tp
from jax_support import ON_GPUS, RANKS, World, everywhere, run
from test_hlo import COLLECTIVES
from test_tp import joined, padded, place, same, with_gradients

SEED = 88
TOKENS, K, N = 4 * RANKS, 16 * RANKS, 16 * RANKS
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# How a, b and the result lie on the mesh, and what says along which dimension.
PRODUCTS = {
    "all_gather_scaled_matmul": (P(None, "tp"), P("tp"), P("tp"), P(None, None, "tp"), "gather"),
    "scaled_matmul_reduce_scatter": (
        P(None, None, "tp"), P(None, "tp"), P(), P(None, "tp"), "scatter",
    ),
    "scaled_matmul_all_reduce": (P(None, None, "tp"), P(None, "tp"), P(), P(), ""),
}  # fmt: skip


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Small whole numbers: products, and sums of them, are exact; b is stored the other way."""
    rng = np.random.default_rng(SEED)
    a = rng.integers(-2, 3, (2, TOKENS, K)).astype(E4M3)
    b = rng.integers(-2, 3, (N, K)).astype(E5M2)
    return a, b, rng.integers(-2, 3, N).astype(np.float32)


class Scaled:
    """Scales in one of the ways in which there are some, and what the matrices stand for."""

    def __init__(self, way: str, name: str) -> None:
        gathers = name.startswith("all_gather")
        of_a, of_b, _, _, _ = PRODUCTS[name]
        a, b, self.bias = arrays()
        rng = np.random.default_rng(SEED + 1)
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        if way == "one":
            self.scales = np.float32(0.5), np.array([4], np.float32)
            self.specs = P(), P()
            wide_a, wide_b = wide_a * 0.5, wide_b * 4
        elif way == "rows":
            powers = [2.0 ** rng.integers(-2, 2, shape) for shape in (a.shape[:-1], (N,))]
            self.scales = tuple(one.astype(np.float32) for one in powers)
            of_tokens = (*of_a, None, None)[: a.ndim - 1]
            self.specs = P(*of_tokens), P("tp") if gathers else P()
            wide_a, wide_b = wide_a * powers[0][..., None], wide_b * powers[1][:, None]
        else:  # each rank's own
            powers = 2.0 ** np.arange(RANKS), 0.5 ** np.arange(RANKS)
            self.scales = tuple(one.astype(np.float32) for one in powers)
            self.specs = P("tp"), P("tp")
            wide_a = wide_a * _of_parts(powers[0], wide_a.shape, 1 if gathers else 2)
            wide_b = wide_b * _of_parts(powers[1], wide_b.shape, 0 if gathers else 1)
        self.arrays = a, b, self.bias
        self.wanted = np.maximum(np.matmul(wide_a, wide_b.T) + self.bias, 0)


def _of_parts(factors: np.ndarray, shape: tuple[int, ...], dim: int) -> np.ndarray:
    """One factor for each of equal parts along a dimension."""
    along = [1] * len(shape)
    along[dim] = shape[dim]
    return np.repeat(factors, shape[dim] // RANKS).reshape(along)


def products(world: World, spelling: str) -> None:
    world.ep.close()
    with joined() as mesh:
        for name, (of_a, of_b, of_bias, of_out, dim) in PRODUCTS.items():
            for way in ("one", "rows", "ranks")[: 3 if spelling == "shard_map" else 2]:
                scaled = Scaled(way, name)
                for dtype in (jnp.bfloat16, np.float32):

                    def product(
                        *given: jax.Array, name: str = name, dim: str = dim, dtype: Any = dtype
                    ) -> jax.Array:
                        a, b, bias, *scales = given
                        along = {f"{dim}_dim": 1} if dim else {}
                        options = {"bias": bias, "out_dtype": dtype, "activation": "relu"}
                        function = getattr(tp, name)
                        return function(a, b, *scales, transpose_b=True, **options, **along).out

                    specs = of_a, of_b, of_bias, *scaled.specs
                    if spelling == "shard_map":
                        product = jax.shard_map(
                            product, mesh=mesh.mesh, in_specs=specs, out_specs=of_out
                        )
                    given = *scaled.arrays, *scaled.scales
                    args = [place(mesh.mesh, *pair) for pair in zip(given, specs)]
                    same(f"{name} {way}", jax.jit(product)(*args), scaled.wanted.astype(dtype))


@everywhere
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_products_are_exact(where, spelling):
    run(where, products, spelling)


def unequal(world: World) -> None:
    """Numbers of tokens that differ between ranks, with scales of both kinds."""
    world.ep.close()
    counts = (3, 0, 5, 1)[:RANKS]
    with joined() as mesh:
        for name in ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"):
            gathers = name.startswith("all_gather")
            for way in ("one", "rows"):
                scaled = Scaled(way, name)
                a, b, bias = scaled.arrays
                a, wanted = a[0, : sum(counts)], scaled.wanted[0, : sum(counts)]
                of_a, of_b = scaled.scales
                of_a = of_a[0, : sum(counts)] if way == "rows" else of_a
                if gathers:
                    a = padded(counts, a, np.nan)
                    of_a = padded(counts, of_a, np.nan) if way == "rows" else of_a
                else:
                    wanted = padded(counts, wanted, 0)

                def product(*given: jax.Array, name: str = name) -> jax.Array:
                    a, b, bias, *scales = given
                    options = {"bias": bias, "out_dtype": np.float32, "activation": "relu"}
                    options |= {"transpose_b": True, "tokens_per_rank": counts}
                    return getattr(tp, name)(a, b, *scales, **options).out

                tokens, columns = P("tp") if gathers else P(None, "tp"), P("tp")
                specs = (tokens, columns, columns) if gathers else (tokens, P(None, "tp"), P())
                if way == "rows":
                    specs += (columns, columns) if gathers else (P(), P())
                else:
                    specs += (P(), P())
                out = P(None, "tp") if gathers else P("tp")
                mapped = jax.shard_map(product, mesh=mesh.mesh, in_specs=specs, out_specs=out)
                args = [place(mesh.mesh, *pair) for pair in zip((a, b, bias, of_a, of_b), specs)]
                same(f"{name} {way}", jax.jit(mapped)(*args), wanted.astype(np.float32))


@everywhere
def test_ranks_may_have_different_numbers_of_tokens(where):
    run(where, unequal)


def of_blocks(
    name: str, transpose_b: bool, counts: tuple[int, ...] | None
) -> tuple[list[np.ndarray], np.ndarray, list[P], P]:
    """-> a, b and their scales per 128 columns, their product, and how they lie."""
    gathers = name.startswith("all_gather")
    blocks = 2 * RANKS if gathers else 3 * RANKS  # of N; of K
    k, n = (384, 128 * blocks) if gathers else (128 * blocks, 160)
    tokens = TOKENS if counts is None else sum(counts)
    rng = np.random.default_rng(SEED)

    def powers(*shape: int) -> np.ndarray:
        return (2.0 ** rng.integers(-2, 2, shape)).astype(np.float32)

    a = rng.integers(-2, 3, (tokens, k)).astype(E4M3)
    b = rng.integers(-2, 3, (k, n)).astype(E5M2)
    of_a, of_b = powers(tokens, k // 128), powers(k // 128, -(-n // 128))
    wide_b = b.astype(np.float64) * of_b.repeat(128, 0)[:k].repeat(128, 1)[:, :n]
    wanted = (a.astype(np.float64) * of_a.repeat(128, 1)) @ wide_b
    given, tokens_spec = [a, b, of_a, of_b], P("tp") if gathers else P(None, "tp")
    of_out = P(None, "tp") if gathers else P("tp") if "scatter" in name else P()
    if counts is not None and gathers:
        given[0], given[2] = padded(counts, a, np.nan), padded(counts, of_a, np.nan)
    elif counts is not None:
        wanted = padded(counts, wanted, 0)
    if transpose_b:
        given[1], given[3] = given[1].T, given[3].T
    of_weights = P("tp") if gathers == transpose_b else P(None, "tp")
    return given, wanted, [tokens_spec, of_weights] * 2, of_out


def block_scales(world: World, spelling: str) -> None:
    world.ep.close()
    unequal = (3, 0, 5, 1)[:RANKS]
    with joined() as mesh:
        for name, counts in [(name, None) for name in PRODUCTS] + [
            ("all_gather_scaled_matmul", unequal),
            ("scaled_matmul_reduce_scatter", unequal),
        ]:
            for transpose_b in (True,) if ON_GPUS else (True, False):
                given, wanted, specs, of_out = of_blocks(name, transpose_b, counts)
                options: dict[str, Any] = {"out_dtype": np.float32, "transpose_b": transpose_b}
                if counts is not None:
                    options["tokens_per_rank"] = counts

                def product(*given: jax.Array, name: str = name, options=options) -> jax.Array:
                    return getattr(tp, name)(*given, **options).out

                program: Any = product
                if spelling == "shard_map":
                    program = jax.shard_map(
                        product, mesh=mesh.mesh, in_specs=tuple(specs), out_specs=of_out
                    )
                args = [place(mesh.mesh, *pair) for pair in zip(given, specs)]
                same(f"{name} {counts}", jax.jit(program)(*args), wanted.astype(np.float32))


@everywhere
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_products_with_scales_of_blocks_are_exact(where, spelling):
    run(where, block_scales, spelling)


def test_blocks_of_two_ranks_are_refused_and_of_one_are_not():
    """Inside of a map each rank's last block may be smaller."""
    one = np.ones((), np.float32)
    a, b = np.ones((4 * RANKS, 160), E4M3), np.ones((160, 16 * RANKS), E4M3)
    of_a, of_b = np.full((4 * RANKS, 2), one), np.full((2, 1), one)
    with joined() as mesh:
        with pytest.raises(ValueError, match="b_scale: expected columns of b .* of 128 on each"):
            tp.all_gather_scaled_matmul(a, b, of_a, of_b)
        specs = P("tp"), P(None, "tp"), P("tp"), P()
        mapped = jax.shard_map(
            lambda *given: tp.all_gather_scaled_matmul(*given, out_dtype=np.float32).out,
            mesh=mesh.mesh,
            in_specs=specs,
            out_specs=P(None, "tp"),
        )
        np.testing.assert_array_equal(jax.jit(mapped)(a, b, of_a, of_b), 160)


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"a": np.ones((4, K), np.float32)}, TypeError, "a: expected float8_e4m3fn or float8_e5m2"),
        ({"b": np.ones((K, N), np.float16)}, TypeError, "b: expected float8.*, got float16"),
        ({"out_dtype": E4M3}, TypeError, "out_dtype: expected float32, .*got float8_e4m3fn"),
        ({"a_scale": np.ones(2, np.float32)}, ValueError, r"a_scale, b_.*one number.* got \(2,\)"),
        (
            {"b_scale": np.ones(N, np.float32)},
            ValueError,
            r"\(4,\) and \(64,\),.*got \(\) and \(64",
        ),
        ({"b_scale": np.ones(1, np.int32)}, ValueError, "b_scale: expected float32, got int32"),
        ({"bias": np.ones(N, np.float16)}, TypeError, "bias: expected bfloat16 or float32, got fl"),
        ({"b": np.ones((K, 8 * RANKS), E4M3)}, ValueError, "16 bytes .* N = 8 of 1 bytes"),
    ],
)
def test_arguments_that_do_not_fit(changes, error, text):
    one = np.ones((), np.float32)
    given = {"a": np.ones((4, K), E4M3), "b": np.ones((K, N), E4M3)}
    with joined(), pytest.raises(error, match=text):
        tp.all_gather_scaled_matmul(**({"a_scale": one, "b_scale": one} | given | changes))


def test_there_is_no_derivative():
    a, b, _ = arrays()
    with joined():

        def total(scale: jax.Array) -> jax.Array:
            return tp.scaled_matmul_all_reduce(a[0], b.T, scale, scale).out.sum()

        with pytest.raises(
            ValueError, match="crossdock_gemm_all_reduce.* cannot be differentiated"
        ):
            jax.grad(total)(np.float32(1))


# ---- Operands that are made fp8 on the way -------------------------------------------------------


class Linear:
    """A layer of small whole numbers, which are exact in fp8, of other sizes on each rank."""

    def __init__(
        self, gathers: bool, dtype: Any, transpose_b: bool, counts: tuple[int, ...] | None
    ) -> None:
        rng = np.random.default_rng(SEED)
        self.counts = (4,) * RANKS if counts is None else counts
        tokens = sum(self.counts)

        def whole(*shape: int) -> np.ndarray:
            return rng.integers(-1, 2, shape).astype(np.float64)

        factors = 2.0 ** (np.arange(RANKS) - 1)
        a, b, bias, grad = whole(tokens, K), whole(K, N), whole(N), whole(tokens, N)
        # Scales of all ranks differ.
        inner = np.repeat(factors, K // RANKS)
        a *= np.repeat(factors, self.counts)[:, None] if gathers else inner
        b *= 2 * (np.repeat(factors, N // RANKS) if gathers else inner[:, None])
        out = a @ b + bias
        of_sum = np.where(out > 0, grad, 0)
        of_b = a.T @ of_sum
        given = [a, b.T if transpose_b else b, bias]
        grads = [of_sum @ b.T, of_b.T if transpose_b else of_b, of_sum.sum(0)]
        out = np.maximum(out, 0)
        if counts is not None and gathers:
            given[0], grads[0] = padded(counts, given[0], np.nan), padded(counts, grads[0], 0)
        elif counts is not None:
            out, grad = padded(counts, out, 0), padded(counts, grad, np.nan)
        self.given, self.grads = ([one.astype(dtype) for one in ones] for ones in (given, grads))
        self.out, self.grad = out.astype(dtype), grad.astype(dtype)
        tokens_in, columns = P("tp"), P(None, "tp")
        self.specs = [tokens_in, columns, P("tp")] if gathers else [columns, P("tp"), P()]
        self.of_out = columns if gathers else P("tp")
        if transpose_b:
            self.specs[1] = P("tp") if gathers else columns


def made_fp8(world: World, spelling: str) -> None:
    world.ep.close()
    unequal = (3, 0, 5, 1)[:RANKS]
    ways = [
        (True, jnp.bfloat16, {}, None),
        (True, np.float32, {"save_gathered": False}, unequal),
        (True, np.float16, {"transpose_b": True}, unequal),
        (False, jnp.bfloat16, {"transpose_b": True}, None),
        (False, np.float32, {}, unequal),
    ]
    with joined() as mesh:
        for gathers, dtype, options, counts in ways:
            layer = Linear(gathers, dtype, options.get("transpose_b", False), counts)
            name = "all_gather_matmul" if gathers else "matmul_reduce_scatter"

            def product(*given: jax.Array, name=name, options=options, counts=counts) -> jax.Array:
                a, b, bias = given
                named = options | {"bias": bias, "activation": "relu", "tokens_per_rank": counts}
                return getattr(tp, name)(a, b, fp8=True, **named).out

            program: Any = product
            if spelling == "shard_map":
                specs = tuple(layer.specs)
                program = jax.shard_map(
                    product, mesh=mesh.mesh, in_specs=specs, out_specs=layer.of_out
                )

            args = [place(mesh.mesh, layer.grad, layer.of_out)]
            args += [place(mesh.mesh, *pair) for pair in zip(layer.given, layer.specs)]
            compiled = with_gradients(program, ("a", "b", "bias")).lower(*args).compile()
            text = compiled.as_text()
            assert COLLECTIVES.findall(text) == [] and "f8e4m3fn" in text
            out, grads = compiled(*args)
            same(f"{name} {options} out", out, layer.out)
            for (which, got), wanted in zip(grads.items(), layer.grads):
                same(f"{name} {options} gradient of {which}", got, wanted)


@everywhere
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_operands_made_fp8_and_all_gradients_are_exact_for_whole_numbers(where, spelling):
    run(where, made_fp8, spelling)


def test_operands_are_rounded_once():
    """By the scale of a power of two that the largest element of a rank's matrix allows."""

    def in_fp8(x: np.ndarray) -> np.ndarray:
        scale = 2.0 ** np.floor(np.log2(448 / np.abs(x).max()))
        return (x * scale).astype(E4M3).astype(np.float64) / scale

    rng = np.random.default_rng(SEED)
    a = (1000 * rng.standard_normal((4 * RANKS, K))).astype(np.float32)
    b = (rng.standard_normal((K, N)) / 100).astype(np.float32)
    parts = (
        [in_fp8(part) for part in np.split(a, RANKS)],
        [in_fp8(part) for part in np.split(b, RANKS, 1)],
    )
    wanted = np.concatenate(parts[0]) @ np.concatenate(parts[1], 1)
    with joined():
        out = np.asarray(tp.all_gather_matmul(a, b, fp8=True).out)
        np.testing.assert_allclose(out, wanted, rtol=1e-3, atol=1e-3)
        zeros = np.asarray(tp.all_gather_matmul(0 * a, b, fp8=True).out)
        np.testing.assert_array_equal(zeros, 0)
        for value in (np.inf, -np.inf, np.nan):
            bad = a.copy()
            bad[1, 2] = value
            out = np.asarray(tp.all_gather_matmul(bad, b, fp8=True).out)
            assert np.isnan(out[:4]).all() and np.isfinite(out[4:]).all(), value
        found = tp.all_gather_matmul(a, b, fp8=True, return_gathered=True)
        np.testing.assert_array_equal(found.gathered, np.concatenate(parts[0]))
        with pytest.raises(ValueError, match="16 bytes on a rank, got K = 8 of 1 bytes"):
            tp.all_gather_matmul(a[:, :8], b[:8], fp8=True)
