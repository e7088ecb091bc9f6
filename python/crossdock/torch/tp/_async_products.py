"""Matrix products in graphs of inductor's: what they multiply, and what becomes of the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

__all__ = ["RESHAPES", "Product", "argument", "product_that_made", "products_of", "value"]

_aten = torch.ops.aten
RESHAPES = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class _Factors(NamedTuple):
    """A product by its node. The last four are of ``_scaled_mm`` alone."""

    a: Any
    b: Any
    bias: Any = None
    scale_a: Any = None
    scale_b: Any = None
    scale_result: Any = None
    out_dtype: torch.dtype | None = None
    fast: bool = False


class Product(NamedTuple):
    """A product ``a @ b``, and perhaps a bias, whose result is `result`.

    Attributes:
        mm: its node.
        result: the product, or its reshape to the dimensions of a.
        a: of any number of dimensions.
        b: ``[K, N]``.
        bias: or None.
        scale_a, scale_b: of fp8, of one element, or of each row and each column; else None.
        scale_result, out_dtype, fast: of fp8, as of ``torch._scaled_mm``.
    """

    mm: Node
    result: Node
    a: Node
    b: Node
    bias: Any
    scale_a: Any
    scale_b: Any
    scale_result: Any
    out_dtype: torch.dtype | None
    fast: bool


def value(node: Node) -> torch.Tensor:
    """The tensor without elements that stands for the node's result."""
    return node.meta["val"]


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that is given by its place, or by its name, or not at all."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def products_of(a: Node) -> list[Product]:
    """The products with this left operand."""
    found = []
    for user in a.users:
        factors = _factors(user)
        if factors is not None and factors.a is a and factors.b is not a:
            found.append(Product(user, user, a, *factors[1:]))
        elif user.target in RESHAPES and user.args[0] is a:
            found += _reshaped_products(a, user)
    return found


def product_that_made(result: Node) -> Product | None:
    """The product, without a bias, of which this is the result."""
    mm, leading = result, None
    if result.target in RESHAPES and isinstance(result.args[0], Node):
        mm = result.args[0]
        leading = list(value(result).shape[:-1])
    factors = _factors(mm)
    if factors is None or factors.bias is not None:
        return None
    if leading is None:
        return Product(mm, result, *factors)
    if factors.a.target not in RESHAPES or not isinstance(factors.a.args[0], Node):
        return None
    source = factors.a.args[0]
    if [*leading, value(factors.a).shape[-1]] != list(value(source).shape):
        return None
    return Product(mm, result, source, *factors[1:])


def _factors(mm: Node) -> _Factors | None:
    """The factors of a product without others, which the library can make."""
    if mm.target is _aten.mm.default:
        found = _Factors(mm.args[0], mm.args[1])
    elif mm.target is _aten.addmm.default:
        if (mm.kwargs.get("alpha", 1), mm.kwargs.get("beta", 1)) != (1, 1):
            return None
        found = _Factors(mm.args[1], mm.args[2], mm.args[0])
    elif mm.target is _aten._scaled_mm.default:
        found = _scaled(mm)
    else:
        return None
    return found if _suits(found, value(mm).dtype) else None


def _scaled(mm: Node) -> _Factors:
    return _Factors(
        mm.args[0],
        mm.args[1],
        argument(mm, 4, "bias"),
        argument(mm, 2, "scale_a"),
        argument(mm, 3, "scale_b"),
        argument(mm, 5, "scale_result"),
        argument(mm, 6, "out_dtype"),
        argument(mm, 7, "use_fast_accum", False),
    )


def _suits(factors: _Factors, dtype: torch.dtype) -> bool:
    """Whether the library has such types, scales, and rows of whole 16 bytes."""
    if not isinstance(factors.a, Node) or not isinstance(factors.b, Node):
        return False
    a, b = value(factors.a), value(factors.b)
    scaled = factors.scale_a is not None
    if a.dtype not in (_FP8 if scaled else _WIDE):
        return False
    for columns in (a.shape[-1], b.shape[-1]):
        if not isinstance(columns, int) or columns * a.dtype.itemsize % 16:
            return False
    if not scaled:
        return True
    if factors.bias is not None and value(factors.bias).dtype not in (dtype, torch.float32):
        return False
    of_a, of_b = value(factors.scale_a), value(factors.scale_b)
    if not of_a.dtype == of_b.dtype == torch.float32:
        return False
    shapes = list(of_a.shape), list(of_b.shape)
    rows = [a.shape[0], 1], [1, b.shape[1]]
    return shapes == rows or all(size == 1 for shape in shapes for size in shape)


def _reshaped_products(a: Node, flat: Node) -> Iterator[Product]:
    """The products of a whose leading dimensions are made one, and of the result several again."""
    for mm in flat.users:
        factors = _factors(mm)
        if factors is None or factors.a is not flat:
            continue
        shape = [*value(a).shape[:-1], value(factors.b).shape[-1]]
        results = [
            user
            for user in mm.users
            if user.target in RESHAPES and list(value(user).shape) == shape
        ]
        if results and len(results) == len(mm.users):
            yield Product(mm, results[0], a, *factors[1:])
