"""Matrices in fp8 with one scale, as TransformerEngine's tensors hold them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["BYTES", "Float8Tensor", "Matrix", "matrix_of"]

BYTES = torch.uint8  # of which buffers of fp8 are made, and the data of TransformerEngine's tensors
_FP8 = {
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
}


class Float8Tensor:
    """A matrix in fp8, and the number that its elements are multiplied by.

    It has what `general_gemm` reads of TransformerEngine's tensor of this name, which it takes as
    well.
    """

    def __init__(
        self,
        *,
        data: Tensor,
        fp8_scale_inv: Tensor,
        fp8_dtype: Any = torch.float8_e4m3fn,
        data_transpose: Tensor | None = None,
    ) -> None:
        """Keeps the tensors.

        Args:
            data: uint8 ``[rows, columns]``.
            fp8_scale_inv: float32 ``[1]``.
            fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2, or TransformerEngine's name of it.
            data_transpose: uint8 ``[columns, rows]``, for products that need it so on GPUs.
        """
        self._data, self._scale_inv, self._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        self._transpose, self._transpose_invalid = data_transpose, data_transpose is None


class Matrix(NamedTuple):
    """An operand as the library takes it.

    Attributes:
        rows: its elements.
        scale: float32 ``[1]`` of fp8, else None.
        transposed: the same matrix stored the other way round, where there is one.
    """

    rows: Tensor
    scale: Tensor | None = None
    transposed: Tensor | None = None


def matrix_of(name: str, given: Any) -> Matrix:
    """An operand of `general_gemm`.

    Raises:
        TypeError: it is neither a tensor nor one in fp8 with a single scale.
    """
    fp8 = getattr(given, "_fp8_dtype", None)
    blocks = hasattr(given, "_rowwise_data")  # TransformerEngine's tensors of other scales
    if fp8 is None and isinstance(given, Tensor) and not blocks:
        return Matrix(given)
    if fp8 is None or getattr(given, "_data", None) is None:
        raise TypeError(
            f"{name}: expected a plain tensor, or a Float8Tensor, of fp8 with one scale; got "
            f"{type(given).__name__}"
        )
    dtype = fp8 if isinstance(fp8, torch.dtype) else _FP8.get(getattr(fp8, "name", ""))
    if dtype not in _FP8.values():
        raise TypeError(f"{name}: expected float8_e4m3fn or float8_e5m2, got {fp8}")
    scale = given._scale_inv
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(
            f"{name}: expected one scale of torch.float32, got {scale.dtype} of shape "
            f"{tuple(scale.shape)}"
        )
    other = None if given._transpose_invalid else given._transpose
    return Matrix(
        given._data.view(dtype), scale.reshape(1), None if other is None else other.view(dtype)
    )
