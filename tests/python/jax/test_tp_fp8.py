"""Products of fp8 that are spread over the ranks: exact values, on every rank, and mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from crossdock.jax import tp
from jax_support import ON_GPUS, RANKS, World, ranked
from programs import mapped, placed, same, spelled
from tp_support import AGAIN, Layer, check, joined, padded

SEED = 88
K, N = 16 * RANKS, 16 * RANKS
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
COUNTS = (3, 0, 5, 1)[:RANKS]
PRODUCTS = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"
# test_tp.py has the other two pairs.
both = pytest.mark.parametrize(
    "where, spelling", [("devices", "shard_map"), ("processes", "automatic")]
)


def powers_of_two(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (2.0 ** rng.integers(-2, 2, shape)).astype(np.float32)


def scales_of(
    way: str, rng: np.random.Generator, a: tuple[int, ...], b: tuple[int, int], by_tokens: bool
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """-> scales of a and b, which have these shapes, and what they multiply elements by.

    They are "one" for a matrix, of its "rows" or of "blocks" of 128 along K, or "ranks" have their
    own: `by_tokens`, of tokens and columns, else of parts of K.
    """
    if way == "one":
        both = np.float32(0.5), np.array([4], np.float32)
        return both, both
    if way == "rows":
        of_rows = powers_of_two(rng, *a[:-1]), powers_of_two(rng, b[0])
        return of_rows, tuple(one[..., None] for one in of_rows)
    if way == "ranks":
        of_ranks = tuple((base ** np.arange(RANKS)).astype(np.float32) for base in (2.0, 0.5))
        sizes = [shape[-2 if by_tokens else -1] // RANKS for shape in (a, b)]
        spread = [one.repeat(size) for one, size in zip(of_ranks, sizes)]
        return of_ranks, tuple(one[:, None] if by_tokens else one for one in spread)
    blocks = (
        powers_of_two(rng, *a[:-1], a[-1] // 128),
        powers_of_two(rng, -(-b[0] // 128), b[1] // 128),
    )
    wide = blocks[0].repeat(128, -1), blocks[1].repeat(128, 0)[: b[0]].repeat(128, 1)
    return blocks, wide


class Scaled:
    """Small whole numbers with scales that are powers of two: products and sums are exact.

    b is stored as [N, K]; a has a dimension before that of tokens, unless its scales or numbers of
    tokens that differ, `counts`, want none.
    """

    def __init__(
        self, name: str, way: str, transpose_b: bool = True, counts: tuple[int, ...] | None = None
    ) -> None:
        rng = np.random.default_rng(SEED)
        gathers, blocks = name.startswith("all_gather"), way == "blocks"
        k, n = K, N
        if blocks:  # the last one along N is smaller, where it is no other rank's
            k, n = (384, 256 * RANKS) if gathers else (384 * RANKS, 160)
        tokens = (sum(counts),) if counts else (4 * RANKS,) if blocks else (2, 4 * RANKS)
        a = rng.integers(-2, 3, (*tokens, k)).astype(E4M3)
        b = rng.integers(-2, 3, (n, k)).astype(E5M2)
        bias = rng.integers(-2, 3, n).astype(np.float32)
        scales, factors = scales_of(way, rng, a.shape, b.shape, gathers)
        wide = [matrix.astype(np.float64) * factor for matrix, factor in zip((a, b), factors)]
        self.out = np.maximum(np.matmul(wide[0], wide[1].T) + bias, 0)
        self.given = [a, b, bias, *scales]

        dim = len(tokens) - 1
        of_tokens, of_features = (P(*(None,) * before, "tp") for before in (dim, dim + 1))
        of_a, of_b = (of_tokens, P("tp")) if gathers else (of_features, P(None, "tp"))
        of_scales = {
            "one": (P(), P()),
            "rows": (of_tokens, P("tp")) if gathers else (P(), P()),
            "ranks": (P("tp"), P("tp")),
            "blocks": (of_a, of_b),
        }[way]
        self.specs = [of_a, of_b, P("tp") if gathers else P(), *of_scales]
        self.of_out = of_features if gathers else of_tokens if "scatter" in name else P()
        self.options: dict[str, Any] = {"transpose_b": transpose_b, "activation": "relu"}
        if "all_reduce" not in name:
            self.options |= {"gather_dim" if gathers else "scatter_dim": dim}
            self.options["tokens_per_rank"] = counts
        if counts and gathers:
            for at in (0,) if way == "one" else (0, 3):
                self.given[at] = padded(counts, self.given[at], np.nan)
        elif counts:
            self.out = padded(counts, self.out, 0)
        if not transpose_b:
            for at in (1, 4) if blocks else (1,):
                self.given[at] = self.given[at].T
                self.specs[at] = P(None, "tp") if gathers else P("tp")


def cases(spelling: str) -> Iterator[tuple[Any, ...]]:
    """The arguments of `Scaled`. Whole arrays know no ranks, and GPUs take b as [N, K] alone."""
    ways = ("one", "rows", "blocks", "ranks")[: 4 if spelling == "shard_map" else 3]
    yield from itertools.product(PRODUCTS, ways)
    yield from itertools.product(PRODUCTS[:2], ways[:3], (True,), (COUNTS,))
    if not ON_GPUS:
        yield from ((name, "blocks", False) for name in PRODUCTS)
        yield from ((name, "blocks", False, COUNTS) for name in PRODUCTS[:2])


@both
@ranked
def test_products_are_exact_with_scales_of_every_kind(world: World, spelling: str) -> None:
    world.ep.close()
    with joined() as mesh:
        for number, case in enumerate(cases(spelling)):
            scaled = Scaled(*case)
            # Sums of ranks that are many are exact in float32 alone.
            dtype = jnp.bfloat16 if number % 2 and "blocks" not in case else np.float32

            def product(*given: jax.Array, case=case, scaled=scaled, dtype=dtype) -> jax.Array:
                a, b, bias, *scales = given
                named = scaled.options | {"bias": bias, "out_dtype": dtype}
                return getattr(tp, case[0])(a, b, *scales, **named).out

            program = jax.jit(spelled(mesh, spelling, product, tuple(scaled.specs), scaled.of_out))
            args = placed(mesh, scaled.given, scaled.specs)
            same(str(case), program(*args), scaled.out.astype(dtype))


def test_blocks_of_two_ranks_are_refused_and_of_one_are_not():
    """Inside of a map each rank's last block may be smaller."""
    one = np.ones((), np.float32)
    a, b = np.ones((4 * RANKS, 160), E4M3), np.ones((160, 16 * RANKS), E4M3)
    of_a, of_b = np.full((4 * RANKS, 2), one), np.full((2, 1), one)
    with joined() as mesh:
        with pytest.raises(ValueError, match="b_scale: expected columns of b .* of 128 on each"):
            tp.all_gather_scaled_matmul(a, b, of_a, of_b)
        specs = P("tp"), P(None, "tp"), P("tp"), P()

        def product(*given):
            return tp.all_gather_scaled_matmul(*given, out_dtype=np.float32).out

        program = mapped(mesh, product, specs, P(None, "tp"))
        np.testing.assert_array_equal(program(a, b, of_a, of_b), 160)


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
    a, b = np.ones((4 * RANKS, K), E4M3), np.ones((K, N), E5M2)
    with joined():

        def total(scale: jax.Array) -> jax.Array:
            return tp.scaled_matmul_all_reduce(a, b, scale, scale).out.sum()

        with pytest.raises(
            ValueError, match="crossdock_gemm_all_reduce.* cannot be differentiated"
        ):
            jax.grad(total)(np.float32(1))


# ---- Operands that are made fp8 on the way -------------------------------------------------------


def made_fp8(
    operation: str,
    dtype: str,
    counts: tuple[int, ...] | None = None,
    *,
    again: bool = False,
    **more,
) -> Layer:
    """A layer of small whole numbers, which are exact in fp8; scales of all ranks differ."""
    tokens = (4 * RANKS if counts is None else sum(counts),)
    options = ("fp8", True), *(AGAIN if again else ())
    more |= {"dtype": dtype, "bias": dtype, "activation": "relu", "counts": counts}
    return Layer(operation, tokens, k=K, spread=True, options=options, **more)


MADE_FP8 = [
    made_fp8("all_gather_matmul", "bfloat16"),
    made_fp8("all_gather_matmul", "float32", COUNTS, again=True),
    made_fp8("all_gather_matmul", "float16", COUNTS, transpose_b=True),
    made_fp8("matmul_reduce_scatter", "bfloat16", transpose_b=True),
    made_fp8("matmul_reduce_scatter", "float32", COUNTS),
]


@both
@ranked
def test_operands_made_fp8_and_all_gradients_are_exact_for_whole_numbers(
    world: World, spelling: str
) -> None:
    world.ep.close()
    with joined() as mesh:
        for layer in MADE_FP8:
            check(mesh, layer, spelling)


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
