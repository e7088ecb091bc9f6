"""Transformations of JAX that the operations are not made for, with errors that say so.

The operations have derivatives of reverse mode and of first order, and take leading dimensions
instead of vmap: all ranks would have to be mapped alike, in one order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax

__all__ = ["first_order_only", "refuse_forward_mode", "refuse_vmap"]

_Arrays = TypeVar("_Arrays", bound=tuple[Any, ...])
_REVERSE = "derivatives are those of reverse mode (grad, vjp, jacrev), of first order"


@functools.cache
def _unmapped(operation: str) -> Callable[..., Any]:
    @jax.custom_batching.custom_vmap
    def same(array: jax.Array) -> jax.Array:
        return array

    @same.def_vmap
    def refuse(size: int, mapped: Any, array: Any) -> NoReturn:
        raise NotImplementedError(
            f"{operation}: there is no vmap over it: give leading dimensions, [..., K] and "
            "[..., H], in place of the mapped one"
        )

    return same


def refuse_vmap(operation: str, *arrays: Any) -> None:
    """Raises NotImplementedError, now or when the program is traced, if vmap maps an array."""
    for array in arrays:
        if isinstance(array, jax.core.Tracer):
            _unmapped(operation)(jax.lax.stop_gradient(array))


@functools.cache
def _underived(operation: str) -> Callable[..., Any]:
    @jax.custom_jvp
    def same(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return arrays

    @same.defjvp
    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise NotImplementedError(f"{operation} has no derivative itself: {_REVERSE}")

    return same


def first_order_only(operation: str, arrays: _Arrays) -> _Arrays:
    """The same arrays, of which no derivative can be taken."""
    return _underived(operation)(*arrays)


@contextlib.contextmanager
def refuse_forward_mode(operation: str) -> Iterator[None]:
    """Says of an operation that jvp (jacfwd, hessian) meets what to use instead."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise NotImplementedError(f"{operation}: there is no jvp through it: {_REVERSE}") from error
