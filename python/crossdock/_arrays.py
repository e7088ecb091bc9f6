"""NumPy arrays as arguments of crossdock._core, and where new ones come from."""

from __future__ import annotations

import ctypes
import math
import operator
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from crossdock import _core
from crossdock._core import constants
from crossdock._dtypes import DLPACK, numpy_dtype

__all__ = ["Heap", "Spec", "aligned_empty", "describe"]

# (address, shape, dtype) and perhaps strides in elements: how crossdock._core takes a tensor.
Spec = tuple[int, tuple[int, ...], int] | tuple[int, tuple[int, ...], int, tuple[int, ...]]

_IMPOSSIBLE = 1 << 62  # bytes: more than any heap has, and few enough for the library to say so
_ALIGNMENT = constants.ROW_ALIGNMENT  # alignment of tensors and plans, in bytes


def describe(
    name: str, array: Any, dtypes: Sequence[str], *, write: bool = False, strided: bool = False
) -> Spec:
    """Describes a NumPy array to crossdock._core, which checks shapes.

    Args:
        name: of the argument, for errors.
        array: C-contiguous unless `strided`; it must stay alive during the call.
        dtypes: names of those that this argument may have.
        write: whether the call writes to it.
        strided: whether it may have any strides of whole elements.

    Raises:
        TypeError: not an array, one with a mask, or of another dtype or byte order.
        ValueError: other strides, or read-only though written to.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected a NumPy array, got {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask; its filled() gives one")
    dtype = array.dtype.name
    if dtype not in dtypes:
        raise TypeError(f"{name}: expected a dtype of {', '.join(dtypes)}, got {array.dtype}")
    if not array.dtype.isnative:
        raise TypeError(
            f"{name}: expected {dtype} in this machine's byte order, got {array.dtype.str!r}; "
            f"{name}.astype({dtype!r}) converts it"
        )
    packed = array.flags.c_contiguous
    if not packed and not (
        strided and all(stride % array.itemsize == 0 for stride in array.strides)
    ):
        raise ValueError(
            f"{name}: expected a C-contiguous array, got strides {array.strides} "
            f"for shape {array.shape}; numpy.ascontiguousarray makes one"
        )
    if write and not array.flags.writeable:
        raise ValueError(f"{name}: expected an array to write to, got a read-only one")
    address = array.__array_interface__["data"][0]
    if packed:
        return address, array.shape, DLPACK[dtype]
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return address, array.shape, DLPACK[dtype], strides


def aligned_empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """An array of ordinary memory, aligned as the library needs it, with undefined content."""
    dtype = numpy_dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    skip = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[skip : skip + size].view(dtype).reshape(shape)


def _sizes(shape: Any) -> tuple[int, ...]:
    """The shape of a new array as a tuple.

    Raises:
        TypeError, ValueError: no whole numbers, or negative ones.
    """
    given = shape if isinstance(shape, (tuple, list)) else (shape,)
    try:
        sizes = tuple(operator.index(size) for size in given)
    except TypeError:
        raise TypeError(
            f"shape: expected a whole number or a tuple of them, got {shape!r}"
        ) from None
    if min(sizes, default=0) < 0:
        raise ValueError(f"shape: expected numbers of at least 0, got {shape!r}")
    return sizes


class Heap:
    """A communicator's symmetric memory on the CPU as arrays.

    Views keep their array's memory, and that the communicator; it is given back when the last view
    dies. Closing waits for that too: an array never points to memory that is gone.
    """

    def __init__(self, comm: _core.Comm) -> None:
        self._comm = comm
        self._process = os.getpid()
        self._arrays = 0  # arrays whose memory is in use
        self._closing = False

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """An array with undefined content. Raises OutOfMemory, TypeError, ValueError."""
        dtype = numpy_dtype(dtype)
        shape = _sizes(shape)
        size = math.prod(shape) * dtype.itemsize
        address = self._comm.mem_alloc(min(size, _IMPOSSIBLE))
        # NumPy keeps the buffer with the array and with every view of it.
        buffer = (ctypes.c_ubyte * size).from_address(address)
        self._arrays += 1
        weakref.finalize(buffer, self._free, address).atexit = False
        return np.ndarray(shape, dtype, buffer=memoryview(buffer))

    def close(self) -> None:
        """Closes the communicator now, or with the last array."""
        self._closing = True
        if self._arrays == 0:
            self._comm.close()

    def _free(self, address: int) -> None:
        self._arrays -= 1
        if self._comm.closed:
            return  # the interpreter's exit has closed it
        if os.getpid() == self._process:  # a forked child's copy is no symmetric memory
            self._comm.mem_free(address)
        if self._closing and self._arrays == 0:
            self._comm.close()
