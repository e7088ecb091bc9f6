"""Rows of 8-bit elements with scales beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["ELEMENT", "QuantisedRows"]

ELEMENT = jnp.float8_e4m3fn  # element type of rows that are quantised on the way


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedRows:
    """Rows of 8-bit elements, each group of columns with a scale. A pytree.

    The result of `ep_dispatch` with ``quantise``, and its argument and result where rows are
    quantised already.

    Attributes:
        elements: ``[..., H]`` float8_e4m3fn; given ones also float8_e5m2, int8 or uint8.
        scales: ``[..., S]`` float32 or float8_e8m0fnu; given ones also uint8. Scale s belongs to
            the columns from ``s * H / S`` on.
        link: ``[R, H]`` zeros through which the gradient of `dequantise` finds its way, as 8-bit
            elements have none that is wide enough; None of given rows, which have no gradient.
    """

    elements: jax.Array
    scales: jax.Array
    link: jax.Array | None = None

    def dequantise(self, dtype: Any = jnp.bfloat16) -> jax.Array:
        """``[..., H]``: every element times its scale, computed in float32.

        The gradient reaches what was quantised as it is, in bfloat16 (straight-through).

        Raises:
            ValueError: H is not a multiple of S.
        """
        columns, scales = self.elements.shape[-1], self.scales.shape[-1]
        if scales == 0 or columns % scales:
            raise ValueError(
                f"scales: expected a divisor of {columns} columns, got shape {self.scales.shape}"
            )
        wide = _product(self.elements, self.scales).astype(dtype)
        return wide if self.link is None else _straight_through(wide, self.link)


def _product(elements: jax.Array, scales: jax.Array) -> jax.Array:
    elements, scales = (jax.lax.stop_gradient(array) for array in (elements, scales))
    blocks = elements.astype(np.float32).reshape(*scales.shape, -1)
    return (blocks * scales.astype(np.float32)[..., None]).reshape(elements.shape)


@jax.custom_vjp
def _straight_through(wide: jax.Array, link: jax.Array) -> jax.Array:
    return wide


def _straight_through_fwd(wide: jax.Array, link: jax.Array) -> tuple[jax.Array, jax.Array]:
    return wide, link


def _straight_through_bwd(link: jax.Array, grad: jax.Array) -> tuple[None, jax.Array]:
    return None, grad.astype(link.dtype)


_straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)
