"""Products of fp8 that are spread over the ranks: exact values, on every rank, and mistakes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from crossdock.jax import tp
from jax_support import RANKS, World, everywhere, run
from test_tp import joined, place, same

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


def products(world: World, spelling: str) -> None:
    world.ep.close()
    a, b, bias = arrays()
    scales = np.float32(0.5), np.array([4], np.float32)
    wanted = 2 * np.matmul(a.astype(np.float64), b.astype(np.float64).T) + bias
    with joined() as mesh:
        for name, (of_a, of_b, of_bias, of_out, dim) in PRODUCTS.items():
            for dtype in (jnp.bfloat16, np.float32):

                def product(
                    *given: jax.Array, name: str = name, dim: str = dim, dtype: Any = dtype
                ) -> jax.Array:
                    a, b, bias = given
                    along = {f"{dim}_dim": 1} if dim else {}
                    options = {"bias": bias, "out_dtype": dtype, "activation": "relu"}
                    function = getattr(tp, name)
                    return function(a, b, *scales, transpose_b=True, **options, **along).out

                specs = of_a, of_b, of_bias
                if spelling == "shard_map":
                    product = jax.shard_map(
                        product, mesh=mesh.mesh, in_specs=specs, out_specs=of_out
                    )
                args = [place(mesh.mesh, *pair) for pair in zip((a, b, bias), specs)]
                same(name, jax.jit(product)(*args), np.maximum(wanted, 0).astype(dtype))


@everywhere
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_products_are_exact(where, spelling):
    run(where, products, spelling)


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"a": np.ones((4, K), np.float32)}, TypeError, "a: expected float8_e4m3fn or float8_e5m2"),
        ({"b": np.ones((K, N), np.float16)}, TypeError, "b: expected float8.*, got float16"),
        ({"out_dtype": E4M3}, TypeError, "out_dtype: expected float32, .*got float8_e4m3fn"),
        ({"a_scale": np.ones(2, np.float32)}, ValueError, r"a_scale: expected one .*shape \(2,\)"),
        ({"b_scale": np.ones(1, np.int32)}, ValueError, "b_scale: .* of float32, got int32"),
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
