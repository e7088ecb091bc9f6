"""Element types: NumPy's (with those of ml_dtypes) as DLPack's code and bits in one number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crossdock._core import constants

__all__ = [
    "DLPACK",
    "INDICES",
    "OPERANDS",
    "PAYLOADS",
    "SCALES",
    "SUMMABLE",
    "WEIGHTS",
    "dtype_name",
    "numpy_dtype",
    "pack",
]

# By NumPy's name: DLPack's code and bits, as crossdock._core takes them.
# NumPy has no bytes of two numbers.
DLPACK = {name: code for name, code in constants.DTYPES.items() if name != "float4_e2m1fn_x2"}
# The element types that the library takes for each argument.
INDICES = ("int32", "int64")
WEIGHTS = ("float32",)
SUMMABLE = ("float32", "float16", "bfloat16")
OPERANDS = (*SUMMABLE, "float8_e4m3fn", "float8_e5m2")
PAYLOADS = (*OPERANDS, "int8", "uint8")
SCALES = ("float32", "float8_e8m0fnu", "uint8", "float8_e4m3fn")

_OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


def dtype_name(dtype: npt.DTypeLike) -> str:
    """NumPy's name of a dtype, given as such or as that name.

    Raises:
        TypeError: Crossdock does not move such elements, or not in that byte order.
    """
    if isinstance(dtype, str) and dtype in DLPACK:
        return dtype
    found = np.dtype(dtype)
    if found.name not in DLPACK:
        raise TypeError(f"dtype: expected one of {', '.join(DLPACK)}, got {found.name}")
    if not found.isnative:
        raise TypeError(f"dtype: expected this machine's byte order, got {found.str!r}")
    return found.name


def pack(dtype: npt.DTypeLike) -> int:
    """DLPack's code << 8 | bits of a dtype. Raises TypeError as dtype_name does."""
    return DLPACK[dtype_name(dtype)]


def numpy_dtype(dtype: npt.DTypeLike) -> np.dtype:
    """The NumPy dtype of a dtype or of its name.

    Raises:
        TypeError: as dtype_name does.
        ImportError: NumPy has no such type by itself, and ml_dtypes is not installed.
    """
    name = dtype_name(dtype)
    if name not in _OF_ML_DTYPES:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"dtype {name}: NumPy has it with the package ml_dtypes, which is not installed",
            name=error.name,
        ) from None
    scalar: type = getattr(ml_dtypes, name)
    return np.dtype(scalar)
