"""The three products of fp8 for users, without derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from crossdock import GemmConfig
from crossdock._gemm_config import Algo

from . import _run
from ._calls import Activation
from ._mesh import TpMesh
from ._products import Product

__all__ = [
    "all_gather_scaled_matmul",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]


def all_gather_scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    bias: jax.Array | None = None,
    out_dtype: npt.DTypeLike = jnp.bfloat16,
    activation: Activation | None = None,
    transpose_b: bool = False,
    gather_dim: int = 0,
    tokens_per_rank: Sequence[int] | None = None,
    algo: Algo = "auto",
    config: GemmConfig | None = None,
    after: Any = None,
    mesh: TpMesh | None = None,
) -> Product:
    """`all_gather_matmul` of fp8: ``act(all-gather(a * a_scale) @ (b * b_scale) + bias)``.

    It has no derivative.

    Args:
        a: ``[..., K]`` float8_e4m3fn or float8_e5m2, this rank's tokens.
        b: ``[K, N]`` of either, this rank's columns of the layer; with `transpose_b` stored as
            ``[N, K]``, as GPUs need it.
        a_scale, b_scale: float32: a number each; or one for each token, of shape ``a.shape[:-1]``,
            and one for each column, ``[N]``; or one for 128 columns of a token, ``[..., K / 128]``,
            and one for 128 x 128 elements of b, ``[K / 128, N / 128]``, with `transpose_b` the
            other way round, both rounded up. Outside ``shard_map`` a single number is that of all
            ranks, others lie on the mesh as `a` and `b` do, and no block is of two ranks. Inside,
            each rank may have its own.
        bias: ``[N]`` of the dtype of the result, or float32.
        out_dtype: of the result: bfloat16, float16 or float32.
        activation, gather_dim, tokens_per_rank, algo, config, after, mesh: as of
            `all_gather_matmul`.

    Returns, Raises: as `all_gather_matmul`.
    """
    options = _options(out_dtype, activation, transpose_b, algo, tokens_per_rank)
    scales = a_scale, b_scale
    return Product(
        *_run.product(_run.ALL_GATHER, a, b, bias, gather_dim, options, config, after, mesh, scales)
    )


def scaled_matmul_reduce_scatter(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    bias: jax.Array | None = None,
    out_dtype: npt.DTypeLike = jnp.bfloat16,
    activation: Activation | None = None,
    transpose_b: bool = False,
    scatter_dim: int = 0,
    tokens_per_rank: Sequence[int] | None = None,
    algo: Algo = "auto",
    config: GemmConfig | None = None,
    after: Any = None,
    mesh: TpMesh | None = None,
) -> Product:
    """`matmul_reduce_scatter` of fp8. It has no derivative.

    Terms are rounded to `out_dtype` before they are summed over the ranks in float32.

    Args:
        a, b, a_scale, b_scale, out_dtype, transpose_b: as of `all_gather_scaled_matmul`; a
            ``[..., K]`` with the tokens of all ranks.
        bias, activation, scatter_dim, tokens_per_rank, algo, config, after, mesh: as of
            `matmul_reduce_scatter`.

    Returns, Raises: as `matmul_reduce_scatter`.
    """
    options = _options(out_dtype, activation, transpose_b, algo, tokens_per_rank)
    scales = a_scale, b_scale
    return Product(
        *_run.product(
            _run.REDUCE_SCATTER, a, b, bias, scatter_dim, options, config, after, mesh, scales
        )
    )


def scaled_matmul_all_reduce(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    bias: jax.Array | None = None,
    out_dtype: npt.DTypeLike = jnp.bfloat16,
    activation: Activation | None = None,
    transpose_b: bool = False,
    algo: Algo = "auto",
    config: GemmConfig | None = None,
    after: Any = None,
    mesh: TpMesh | None = None,
) -> Product:
    """`matmul_all_reduce` of fp8. It has no derivative.

    Args:
        a, b, a_scale, b_scale, out_dtype, transpose_b: as of `scaled_matmul_reduce_scatter`.
        bias, activation, algo, config, after, mesh: as of `matmul_all_reduce`.

    Returns, Raises: as `matmul_all_reduce`.
    """
    options, scales = _options(out_dtype, activation, transpose_b, algo), (a_scale, b_scale)
    return Product(
        *_run.product(_run.ALL_REDUCE, a, b, bias, 0, options, config, after, mesh, scales)
    )


def _options(
    out_dtype: npt.DTypeLike,
    activation: Activation | None,
    transpose_b: bool,
    algo: Algo,
    tokens_per_rank: Sequence[int] | None = None,
) -> _run.Options:
    tokens = _run.tokens_of(tokens_per_rank)
    return _run.Options(
        transpose_b,
        activation,
        False,
        algo,
        out_dtype=np.dtype(out_dtype),
        tokens_per_rank=tokens,
    )
