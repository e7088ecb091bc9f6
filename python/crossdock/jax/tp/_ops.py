"""The three products with their derivatives, on one rank's matrices ``[rows, columns]``.

Each takes an order and returns it, forward and backward, as the operations of expert parallelism
do: see ``crossdock/jax/_order.py``. A backward product comes behind the operations that make what
it needs of its own operation, and that take no part in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._calls import uniform, varying
from .._order import kept
from .._where import checks_varying
from . import _calls, _fp8
from ._calls import Array, Way

__all__ = [
    "all_gather_matmul",
    "all_gather_matmul_and_rows",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]

_ACTIVATIONS: dict[str | None, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


# ---- Column-parallel -----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_gather_matmul(
    way: Way, a: Array, b: Array, bias: Array | None, order: Array
) -> tuple[Array, Array]:
    """``[M, N]`` of ``a [m, K]`` gathered over the ranks, and the order."""
    d, _, _, order = _gather(way, a, b, bias, order, gathered=False, activation=False)
    return d, order


def _gather(
    way: Way, a: Array, b: Array, bias: Array | None, order: Array, **wanted: Any
) -> tuple[Any, ...]:
    """As `_calls.all_gather`, of operands that are made fp8 where the way says so."""
    if not way.fp8:
        return _calls.all_gather(way, a, b, bias, order, **wanted)
    made, rows, columns, scales = _fp8.operands(way, a, b)
    return _calls.all_gather(made, rows, columns, bias, order, **wanted, scales=scales)


def _wide(way: Way, rows: Any, dtype: Any) -> Array:
    """The rows that have been kept, perhaps in fp8, in a wide type."""
    return _fp8.widened(way, _fp8.Narrow(*rows), dtype) if isinstance(rows, tuple) else rows


def _all_gather_fwd(way, a, b, bias, order):
    active = way.activation is not None
    d, gathered, before, done = _gather(
        way, a, b, bias, order, gathered=way.save_gathered, activation=active
    )
    rows = gathered if way.save_gathered else a
    return (d, done), (rows, b, bias, before, kept(done, order))


def _all_gather_bwd(way, saved, grads):
    rows, b, bias, before, order = saved
    rows = _wide(way, rows, b.dtype)
    grad = _before_activation(way, grads[0], before)
    order = grads[1] + order
    grad_bias = None if bias is None else _column_sums(grad, bias)
    if way.save_gathered:
        grad_a, _, order = _calls.reduce_scatter(way.backward, grad, b, None, order, False, rows)
        return grad_a, _of_weights(way, rows, grad), grad_bias, order
    # The rows come again beside the product that needs none of them.
    parts, gathered, order = _calls.bulk_gather(way.backward, grad, b, rows, order)
    grad_a, grad_b, order = _of_both(way, parts, gathered, grad, order)
    return grad_a, grad_b, grad_bias, order


def _of_both(
    way: Way, parts: Array, gathered: Array, grad: Array, order: Array
) -> tuple[Array, Array, Array]:
    """The gradient of a, whose parts are summed over the ranks beside that of b, b's, the order."""
    left, right = (grad, gathered) if way.transpose_b else (gathered, grad)
    grad_b, grad_a, order = _calls.bulk_reduce(way.backward, left, right, parts, order)
    return grad_a, grad_b, order


all_gather_matmul.defvjp(_all_gather_fwd, _all_gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def all_gather_matmul_and_rows(
    way: Way, alike: bool, a: Array, b: Array, bias: Array | None, order: Array
) -> tuple[Array, Array, Array]:
    """As `all_gather_matmul`; and, before the order, the gathered a ``[M, K]``.

    Args:
        alike: whether that is one array which all ranks have, and so is its gradient. Otherwise
            each rank has a copy of its own, and gradients of the copies are summed.
    """
    d, rows, _, done = _gather(way, a, b, bias, order, gathered=True, activation=False)
    rows = _wide(way, rows, a.dtype)
    return d, rows if alike else uniform(rows, d)[0], done


def _and_rows_fwd(way, alike, a, b, bias, order):
    active = way.activation is not None
    d, kept_rows, before, done = _gather(way, a, b, bias, order, gathered=True, activation=active)
    rows = _wide(way, kept_rows, a.dtype)
    saved = kept_rows if way.save_gathered else a, b, bias, before, kept(done, order)
    return (d, rows if alike else uniform(rows, d)[0], done), saved


def _and_rows_bwd(way, alike, saved, grads):
    of_d, of_rows, of_order = grads
    if alike:
        grad_a, *others = _all_gather_bwd(way, saved, (of_d, of_order))
        of_rows, grad_a = uniform(_own_part(way, of_rows, len(grad_a)), grad_a)
        return grad_a + of_rows, *others
    rows, b, bias, before, order = saved
    rows = _wide(way, rows, b.dtype)
    grad, order = _before_activation(way, of_d, before), of_order + order
    if way.save_gathered:
        parts = _product(way, grad, b, (1,), (0 if way.transpose_b else 1,), grad.dtype)
    else:
        parts, rows, order = _calls.bulk_gather(way.backward, grad, b, rows, order)
    grad_a, grad_b, order = _of_both(way, parts + of_rows, rows, grad, order)
    return grad_a, grad_b, None if bias is None else _column_sums(grad, bias), order


all_gather_matmul_and_rows.defvjp(_and_rows_fwd, _and_rows_bwd)


def _own_part(way: Way, rows: Array, own: int) -> Array:
    """This rank's rows of those of all ranks; with `own` of them, what is behind is anything."""
    rank = jax.lax.axis_index(way.context.place.axes)
    if way.tokens is None:
        first = rank * own
    else:
        first = jnp.array([sum(way.tokens[:r]) for r in range(len(way.tokens))])[rank]
        rows = jnp.pad(rows, ((0, own), (0, 0)))  # a slice that goes too far would begin elsewhere
    rows, first = uniform(rows, first)
    return jax.lax.dynamic_slice_in_dim(rows, first, own)


# ---- Row-parallel --------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_reduce_scatter(
    way: Way, a: Array, b: Array, bias: Array | None, order: Array
) -> tuple[Array, Array]:
    """This rank's rows ``[m, N]`` of the sum over ranks of products, and the order."""
    d, _, order, _ = _scatter(way, a, b, bias, order, activation=False)
    return d, order


def _scatter(
    way: Way, a: Array, b: Array, bias: Array | None, order: Array, activation: bool
) -> tuple[Array, Array | None, Array, Any]:
    """As `_calls.reduce_scatter`, and what is kept of a: made fp8 where the way says so."""
    if not way.fp8:
        return *_calls.reduce_scatter(way, a, b, bias, order, activation), a
    made, rows, columns, scales = _fp8.operands(way, a, b)
    found = _calls.reduce_scatter(made, rows, columns, bias, order, activation, scales=scales)
    return *found, (rows, scales.a_scale)


def _reduce_scatter_fwd(way, a, b, bias, order):
    active = way.activation is not None
    d, before, done, a = _scatter(way, a, b, bias, order, activation=active)
    return (d, done), (a, b, bias, before, kept(done, order))


def _reduce_scatter_bwd(way, saved, grads):
    a, b, bias, before, order = saved
    a = _wide(way, a, b.dtype)
    own = _calls.own_rows(way, _before_activation(way, grads[0], before))
    order = grads[1] + order
    grad_a, grad, _, order = _calls.all_gather(
        way.backward, own, b, None, order, gathered=True, activation=False, behind=a
    )
    grad_bias = None
    if bias is not None:
        # A bias that is the same on all ranks has one gradient, which all can tell from the rows
        # that they have gathered. Otherwise each rank's own is asked for.
        axes = way.context.place.axes
        shared = checks_varying() and not varying(bias) & frozenset(axes)
        grad_bias = _column_sums(grad if shared else own, bias)
    return grad_a, _of_weights(way, a, grad), grad_bias, order


matmul_reduce_scatter.defvjp(_reduce_scatter_fwd, _reduce_scatter_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_all_reduce(
    way: Way, a: Array, b: Array, bias: Array | None, order: Array
) -> tuple[Array, Array]:
    """The sum ``[M, N]`` over ranks of products, and the order."""
    d, _, order = _calls.all_reduce(way, a, b, bias, order, activation=False)
    return d, order


def _all_reduce_fwd(way, a, b, bias, order):
    if not checks_varying() and way.context.place.num_ranks > 1:
        raise ValueError(
            "matmul_all_reduce: expected shard_map(check_vma=True) where it is differentiated, got "
            "check_vma=False, with which JAX does not tell whether gradients of an array that all "
            "ranks have are whole or parts"
        )
    active = way.activation is not None
    d, before, done = _calls.all_reduce(way, a, b, bias, order, activation=active)
    return (d, done), (a, b, bias, before, kept(done, order))


def _all_reduce_bwd(way, saved, grads):
    a, b, bias, before, order = saved
    grad = _before_activation(way, grads[0], before)
    # Every rank has the whole gradient: nothing is left to transfer.
    grad_a = _product(way, grad, b, (1,), (0 if way.transpose_b else 1,), a.dtype)
    grad_bias = None if bias is None else _column_sums(grad, bias)
    return grad_a, _of_weights(way, a, grad), grad_bias, grads[1] + order


matmul_all_reduce.defvjp(_all_reduce_fwd, _all_reduce_bwd)


# ---- Of one rank ---------------------------------------------------------------------------------


def _before_activation(way: Way, grad: Array, before: Array | None) -> Array:
    """The gradient of what the activation was applied to."""
    if before is None:
        return grad
    _, backward = jax.vjp(_ACTIVATIONS[way.activation], before.astype(jnp.float32))
    return backward(grad.astype(jnp.float32))[0].astype(grad.dtype)


def _column_sums(grad: Array, bias: Array) -> Array:
    return grad.sum(0, dtype=jnp.float32).astype(bias.dtype)


def _of_weights(way: Way, rows: Array, grad: Array) -> Array:
    """The gradient of b, as it is stored."""
    left, right = (grad, rows) if way.transpose_b else (rows, grad)
    return _product(way, left, right, (0,), (0,), rows.dtype)


def _product(
    way: Way, left: Array, right: Array, of_left: tuple[int], of_right: tuple[int], dtype: Any
) -> Array:
    """A product of this rank's, summed over these dimensions in float32."""
    return jax.lax.dot_general(
        left,
        right,
        ((of_left, of_right), ((), ())),
        precision=None if way.allow_tf32 else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).astype(dtype)
