"""The memory of what a Buffer returns: tensors that are torch's own, on GPUs in symmetric memory.

Peers move rows straight into and out of symmetric memory. There a few large pieces of it, called
sets, are given to a pool of torch's caching allocator, which cuts them into tensors. So they behave
as all tensors of torch do: ``record_stream``, freeing and resizing of storages, the statistics. A
set belongs for ever to the stream that first needed it, as torch's segments do.

Nothing here waits for a peer but `reserve`. Tensors for which no set has room are ordinary memory,
which the operations copy through staging memory of the group. So are all tensors on the CPU,
tensors made while a CUDA graph is captured (torch takes them from the graph's own pool), and all
tensors where torch has no pools with an allocator of their own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

from crossdock import _core
from crossdock._comm_arguments import grow
from crossdock.errors import OutOfMemory
from crossdock.torch._calls import current_stream, is_capturing

_log = logging.getLogger("crossdock")

_MIB = 1 << 20
# torch cuts smaller tensors out of segments of their own.
_LEAST_TENSOR = _MIB + 512
# torch asks for whole segments of this unit if they have at least so many bytes.
_SEGMENT_UNIT, _LEAST_SEGMENT = 2 * _MIB, 10 * _MIB
# The memory that torch may lose by cutting: a rest of up to 1 MiB stays with the tensor.
_CUTTING = _MIB
_FEW = 16  # storages

Wanted = tuple[tuple[int, ...], torch.dtype] | None  # shape and dtype of a tensor

# All that have given memory to torch, for those who want to send tensors to other processes.
_giving: weakref.WeakSet[ReceiveMemory] = weakref.WeakSet()
# Closed ones that tensors still use.
_leaving: set[ReceiveMemory] = set()


def set_bytes(parts: list[int]) -> int:
    """Bytes of a set that has room for tensors of so many bytes at the same time."""
    needed = sum(max(part, _LEAST_TENSOR) + _CUTTING for part in parts)
    return max(_LEAST_SEGMENT, -(-needed // _SEGMENT_UNIT) * _SEGMENT_UNIT)


class ReceiveMemory:
    """Makes tensors on the device of a communicator, which it owns. Any thread.

    Args:
        comm: whose symmetric memory it takes.
        device: that communicator's.
    """

    def __init__(self, comm: _core.Comm, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._lock = threading.RLock()  # an object that dies inside it may close this one
        self._pool = _torch_pool(device)
        self._set_bytes = 0
        self._sets: list[tuple[int, int]] = []  # (address, bytes), known to torch
        self._streams: set[int] = set()  # streams that have a set
        self._full: set[int] = set()  # streams whose sets have no room until something dies
        self._alive: list[StorageWeakRef] = []  # storages in sets, some of which have died
        self._look_at = _FEW  # so many of them

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of undefined content; it belongs to the current stream."""
        made: torch.Tensor = self.tensors([(shape, dtype)])[0]
        return made

    def tensors(self, wanted: Sequence[Wanted]) -> list[Any]:
        """A tensor for each, as `empty` makes it, and None for None; faster than one by one."""
        found: list[Any] = [None] * len(wanted)
        if self._pool is not None and not is_capturing(self._device):
            self._take_from_sets(wanted, found)
        for place, one in enumerate(wanted):
            if one is not None and found[place] is None:
                shape, dtype = one
                # faster than of a tuple
                found[place] = torch.empty(*shape, dtype=dtype, device=self._device)
        return found

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in symmetric memory."""
        address = tensor.untyped_storage().data_ptr()
        return any(begin <= address < begin + size for begin, size in self._sets)

    def reserve(self, num_bytes: int, set_bytes: int) -> None:
        """Takes more symmetric memory for sets of that size. Collective, blocking.

        Raises:
            OutOfMemory: this rank has no memory left (Mismatch on the others); nothing has grown.
        """
        if self._device.type == "cuda" and num_bytes > 0:
            # Where no set can be made none is reserved, but the peers' growth needs this rank.
            grow(self._comm, 0 if self._pool is None else num_bytes)
        with self._lock:
            self._set_bytes = set_bytes
            self._full.clear()

    def close(self) -> None:
        """Closes the communicator: now, or if tensors use its memory, some time after they died.

        The scope's operations have ended.
        """
        _leaving.add(self)
        leave_unused()

    def leave(self) -> bool:
        """Closes the communicator unless its memory is in use; whether it did."""
        with self._lock:
            self._forget_dead()
            if self._alive or is_capturing(self._device):
                return False
            if self._sets:
                torch.cuda.synchronize(self._device)  # kernels may still run with tensors that died
                if self._pool is None:
                    torch.cuda.empty_cache()
                self._pool = None  # gives back its segments
                if any(_core.segment_taken(address) for address, _ in self._sets):
                    return False
            self._comm.close()
            return True

    def _take_from_sets(self, wanted: Sequence[Wanted], found: list[Any]) -> None:
        """Puts tensors in sets into `found`, as many as there is room for, in their order."""
        stream = current_stream(self._device)
        with self._lock:
            if stream in self._full or len(self._alive) >= self._look_at:
                self._forget_dead()
            if stream in self._full:
                return
            with self._allocating():
                for place, one in enumerate(wanted):
                    if one is None:
                        continue
                    num_bytes = math.prod(one[0]) * one[1].itemsize
                    if max(num_bytes, _LEAST_TENSOR) > self._set_bytes:
                        continue
                    tensor = self._allocate(*one, num_bytes) if stream in self._streams else None
                    if tensor is None and self._give_set(stream):
                        tensor = self._allocate(*one, num_bytes)
                    if tensor is None:
                        self._full.add(stream)
                        return
                    self._alive.append(StorageWeakRef(tensor.untyped_storage()))
                    found[place] = tensor

    @contextlib.contextmanager
    def _allocating(self) -> Iterator[None]:
        """Within it this thread's tensors come from torch's pool."""
        assert self._pool is not None
        place = self._device.index, self._pool.id
        torch._C._cuda_beginAllocateCurrentThreadToPool(*place)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(*place)
            torch._C._cuda_releasePool(*place)

    def _allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int
    ) -> torch.Tensor | None:
        """A tensor of torch's pool; None if that has no room and was offered no segment."""
        try:
            if num_bytes >= _LEAST_TENSOR:
                return torch.empty(*shape, dtype=dtype, device=self._device)
            # With a storage of its own, no view of another.
            least = -(-_LEAST_TENSOR // dtype.itemsize)
            return torch.empty(least, dtype=dtype, device=self._device).resize_(shape)
        except torch.cuda.OutOfMemoryError:
            return None

    def _give_set(self, stream: int) -> bool:
        """Lets torch have one more set, for this stream; whether there was one."""
        size = self._set_bytes
        try:
            address = self._comm.mem_alloc(size)
        except OutOfMemory:
            return False
        _core.offer_segment(address, size)
        whole = self._allocate((size,), torch.uint8, size)
        _core.offer_segment(0, 0)
        if not _core.segment_taken(address):
            # Settings of torch's allocator, such as expandable_segments in some releases, are at
            # odds with pools like this one.
            _tell_of_no_pool("torch's caching allocator did not take the segment that was offered")
            self._comm.mem_free(address)
            self._pool = None if not self._sets else self._pool
            return False
        self._sets.append((address, size))
        self._streams.add(stream)
        del whole  # torch keeps it, to cut tensors from
        _giving.add(self)
        _refuse_sending()
        return True

    def _forget_dead(self) -> None:
        alive = [storage for storage in self._alive if not storage.expired()]
        if len(alive) < len(self._alive):
            self._full.clear()
        self._alive = alive
        self._look_at = 2 * len(alive) + _FEW


def leave_unused() -> None:
    """Closes the communicators that only tensors had kept open which have died since."""
    if sys.is_finalizing():
        return
    for memory in list(_leaving):
        if memory.leave():
            _leaving.discard(memory)


def _torch_pool(device: torch.device) -> Any:
    """A ``torch.cuda.MemPool`` that asks for what it is offered; None where there can be none."""
    if device.type != "cuda":
        return None
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        _tell_of_no_pool(f"torch's allocator is {backend}, which has no pools")
        return None
    # Without it a pool would also serve the other threads of the process.
    if not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"):
        _tell_of_no_pool(f"torch {torch.__version__} has no pools of a thread")
        return None
    with torch.cuda.device(device):
        return torch.cuda.MemPool(_allocator())


@functools.cache
def _tell_of_no_pool(reason: str) -> None:
    """Says once that received tensors lie in ordinary memory."""
    _log.warning(
        "crossdock: %s: tensors that crossdock.deep_ep returns lie in ordinary memory, and "
        "operations copy their rows through staging memory",
        reason,
    )


@functools.cache
def _allocator() -> Any:
    """An allocator that takes the segments that are offered; it lives as long as any pool."""
    return torch._C._cuda_customAllocator(*_core.segment_functions())


@functools.cache
def _refuse_sending() -> None:
    """Sees to it that tensors in symmetric memory are not sent to other processes.

    torch sends the address in a segment of CUDA's allocator, which these are not.
    """
    ForkingPickler.register(torch.Tensor, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "cuda" and any(memory.owns(tensor) for memory in list(_giving)):
        raise RuntimeError(
            "a tensor that crossdock.deep_ep.Buffer returned lies in symmetric memory and cannot "
            "be sent to another process; send tensor.clone()"
        )
    return reduce_tensor(tensor)
