"""The matrices of a product as the library takes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crossdock._core import constants

from .._calls import spec
from .._custom_ops import as_rows

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "BULK",
    "REDUCE_SCATTER",
    "Operands",
    "is_transposed",
]

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BULK = (
    constants.GEMM_OPERATIONS[word]
    for word in ("all_gather", "reduce_scatter", "all_reduce", "bulk")
)


def is_transposed(matrix: Tensor) -> bool:
    """Whether it is the view of a matrix that is stored the other way round."""
    return not matrix.is_contiguous() and matrix.t().is_contiguous()


class Operands:
    """Two matrices as the library takes them, with copies of those that lie otherwise.

    Whether they are transposed must be equal on all ranks, and a matrix with one row, or none, is
    not seen to be: so a is taken row by row.

    Args:
        own: the product is this rank's alone, and a may be transposed as well.
    """

    def __init__(self, a: Tensor, b: Tensor, own: bool = False) -> None:
        for name, matrix in (("a", a), ("b", b)):
            if matrix.dim() != 2:
                raise ValueError(f"{name}: expected 2 dimensions, got shape {tuple(matrix.shape)}")
        # The same bytes are a row or a column; the library takes rows of whole 16 bytes.
        column = own and a.shape[1] == 1 and a.is_contiguous()
        self.transpose_a = own and (column or is_transposed(a))
        # The library multiplies no two transposed matrices.
        other = None if self.transpose_a or b.is_contiguous() else b.t()
        self.transpose_b = other is not None and other.is_contiguous()
        self.a = as_rows(a.t() if self.transpose_a else a)
        self.b = as_rows(other if self.transpose_b else b)

    def options(self) -> dict[str, Any]:
        """As the extension takes them, while this object lives."""
        return {
            "a": spec(self.a),
            "b": spec(self.b),
            "transpose_a": int(self.transpose_a),
            "transpose_b": int(self.transpose_b),
        }
