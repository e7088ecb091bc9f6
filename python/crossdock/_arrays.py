"""NumPy arrays as arguments of crossdock._core, and where new ones come from."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from crossdock import _core
from crossdock._dtypes import DLPACK, numpy_dtype

__all__ = ["Heap", "Spec", "aligned_empty", "describe"]

# (address, shape, dtype): how crossdock._core takes a tensor.
Spec = tuple[int, tuple[int, ...], int]

_ALIGNMENT = 16  # of tensors and plans, in bytes


def describe(name: str, array: Any, *, write: bool = False) -> Spec:
    """Describes a NumPy array to crossdock._core, which checks shapes and what dtype goes where.

    Args:
        name: of the argument, for errors.
        array: C-contiguous; it must stay alive during the call.
        write: whether the call writes to it.

    Raises:
        TypeError: not an array, or of a dtype that Crossdock does not move.
        ValueError: not C-contiguous, or read-only though written to.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected a NumPy array, got {type(array).__name__}")
    packed = DLPACK.get(array.dtype.name)
    if packed is None:
        raise TypeError(f"{name}: expected a dtype of {', '.join(DLPACK)}, got {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected a C-contiguous array, got strides {array.strides} "
                         f"for shape {array.shape}; numpy.ascontiguousarray makes one")
    if write and not array.flags.writeable:
        raise ValueError(f"{name}: expected an array to write to, got a read-only one")
    return array.__array_interface__["data"][0], array.shape, packed


def aligned_empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """An array of ordinary memory, aligned as the library needs it, with undefined content."""
    dtype = numpy_dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    skip = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[skip : skip + size].view(dtype).reshape(shape)


class Heap:
    """A communicator's symmetric memory on the CPU as arrays.

    An array keeps its block, a block the heap, and the heap the communicator; the block is given
    back when the last array over it dies. Closing waits for that too: an array never points to
    memory that is gone.
    """

    def __init__(self, comm: _core.Comm) -> None:
        self.comm = comm
        self._blocks = 0
        self._closing = False

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """An array with undefined content. Raises OutOfMemory."""
        dtype = numpy_dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = math.prod(shape) * dtype.itemsize
        block = _Block(self, size)
        # NumPy keeps the buffer as the base of the array and of every view of it.
        buffer = (ctypes.c_ubyte * size).from_address(block.address)
        buffer.block = block
        return np.ndarray(shape, dtype, buffer=buffer)

    def close(self) -> None:
        """Closes the communicator now, or with the last array."""
        self._closing = True
        if self._blocks == 0:
            self.comm.close()

    def allocate(self, size: int) -> int:
        address = self.comm.mem_alloc(size)
        self._blocks += 1
        return address

    def free(self, address: int) -> None:
        self._blocks -= 1
        if self.comm.closed:
            return  # at the interpreter's exit
        self.comm.mem_free(address)
        if self._closing and self._blocks == 0:
            self.comm.close()


class _Block:
    """One allocation of a heap."""

    def __init__(self, heap: Heap, size: int) -> None:
        self._heap = heap
        self.address = 0
        self.address = heap.allocate(size)

    def __del__(self) -> None:
        if self.address:
            self._heap.free(self.address)
