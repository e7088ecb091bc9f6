"""Operands that are made fp8 on the way to a product, with a scale per matrix of a rank.

Scales are powers of two, as large as the matrix's largest element allows: nothing is rounded but
the elements themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._calls import Array, Scales, Way

__all__ = ["Narrow", "narrowed", "operands", "widened"]

_FP8 = jnp.float8_e4m3fn
_LARGEST = 448.0  # of _FP8


class Narrow(NamedTuple):
    """Rows in fp8, and what each rank's are multiplied by: one number, or one for each rank."""

    rows: Array
    scales: Array


def narrowed(x: Array) -> Narrow:
    """A matrix in fp8; one with an element that is not finite becomes NaN as a whole."""
    most = jnp.abs(x).max().astype(np.float32)
    # 448 / most is a number from 1/2 to 1 times this power of two. Of zeros any scale will do.
    _, exponent = jnp.frexp(_LARGEST / jnp.where((most > 0) & jnp.isfinite(most), most, 1))
    exponent = jnp.clip(exponent - 1, -64, 64)
    scaled = x.astype(np.float32) * jnp.ldexp(np.float32(1), exponent)
    # Not finite: zero is NaN.
    scale = jnp.ldexp(np.float32(1), -exponent) + (most - most)
    return Narrow((scaled.clip(-_LARGEST, _LARGEST) + (most - most)).astype(_FP8), scale[None])


def widened(way: Way, narrow: Narrow, dtype: np.dtype[Any]) -> Array:
    """The rows of this rank, or of all ranks."""
    rows, scales = narrow
    if len(scales) > 1:
        ranks = way.context.place.num_ranks
        counts = way.tokens or (len(rows) // ranks,) * ranks
        scales = jnp.repeat(scales, np.array(counts), total_repeat_length=len(rows))
    # In float32, as float16 does not have the scales of small numbers.
    return (rows.astype(np.float32) * scales[:, None]).astype(dtype)


def operands(way: Way, a: Array, b: Array) -> tuple[Way, Array, Array, Scales]:
    """How the product of fp8 is made, and of what; b is transposed where it does not lie so.

    GPUs multiply no other fp8.
    """
    rows, columns = narrowed(a), narrowed(b if way.transpose_b else b.T)
    made = way._replace(transpose_b=True, out_dtype=np.dtype(a.dtype))
    return made, rows.rows, columns.rows, Scales(rows.scales, columns.scales)
