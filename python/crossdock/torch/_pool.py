"""Tensors in symmetric memory, with the reuse rules of torch's caching allocator.

Peers move rows straight into and out of symmetric memory. Its size is fixed between collective
growths, so nothing here ever waits for a peer: what does not fit becomes ordinary memory, which the
operations copy through staging memory of the group.

A block belongs to the stream that was current when it was made. When its tensor dies the block
serves the next tensor of that stream at once: work of one stream runs in order, and an operation
ends only when its peers have finished with this rank's memory. A use on another stream is told by
`record_stream`, or noticed when the tensor dies while another stream is current, as in autograd's
threads; such a block waits for an event. Blocks taken during the capture of a CUDA graph belong to
that capture for ever, and serve each other's successors within it.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from sys import is_finalizing as _is_finalizing
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from crossdock import _core
from crossdock._comm_arguments import grow
from crossdock._core import as_dlpack
from crossdock.errors import OutOfMemory

from ._calls import DTYPE_CODES, capture_id, is_capturing, stream_source

__all__ = ["SymmetricPool", "block_bytes"]

_BYTE = DTYPE_CODES[torch.uint8]
_log = logging.getLogger("crossdock")

# Communicators whose last use went while a CUDA graph was captured, when nothing may wait for the
# device: they leave with the process.
_left_by_captures: list[_core.Comm] = []


def block_bytes(num_bytes: int) -> int:
    """Bytes that a tensor of `num_bytes` takes: few sizes, so that blocks fit more tensors."""
    granule = 512 if num_bytes < 1 << 20 else 1 << 16
    return max(granule, (num_bytes + granule - 1) // granule * granule)


@functools.lru_cache
def _sizes(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """The bytes of a tensor and of its block."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return num_bytes, block_bytes(num_bytes)


class _Block:
    """A piece of the heap. `stream`: whose work may use it next without waiting."""

    __slots__ = ("address", "size", "stream", "capture", "other_streams")

    def __init__(self, address: int, size: int, stream: int, capture: int) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.capture = capture
        self.other_streams: set[int] = set()


class SymmetricPool:
    """The symmetric memory of one communicator as a source of tensors. Any thread.

    Tensors keep the pool and its communicator alive.
    """

    def __init__(self, comm: _core.Comm, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._place = (comm.device_type, comm.device_id)  # as DLPack names the device
        self._current_stream = stream_source(device)
        self._lock = threading.RLock()  # a tensor may die, and close the pool, inside it
        # By (capture, stream, size): blocks that may be used by that stream without waiting.
        self._free: defaultdict[tuple[int, int, int], list[_Block]] = defaultdict(list)
        # Blocks of dead tensors, not sorted in yet: a tensor may die anywhere, also while this
        # thread holds the lock, and appending needs none.
        self._returned: deque[_Block] = deque()
        self._waiting: list[tuple[_Block, list[torch.cuda.Event]]] = []
        self._live: dict[int, _Block] = {}
        # By stream: behind its work with memory that has gone back to the heap.
        self._left: dict[int, torch.cuda.Event] = {}
        self._closing = False
        self._has_told = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the communicator's device, its content undefined.

        In symmetric memory, 256-byte aligned, or in ordinary memory when no block is left.
        """
        return self.tensors(((tuple(shape), dtype),))[0]

    def tensors(self, wanted: Iterable[tuple[tuple[int, ...], torch.dtype] | None]) -> list[Any]:
        """A tensor for each shape and dtype, as `empty` makes it, and None for None.

        It takes less time than as many calls of `empty`.
        """
        made: list[torch.Tensor | None] = []
        stream = self._current_stream()
        with self._lock:
            capture = capture_id(self._device, stream) if self._is_cuda else 0
            self._sort_returned(capture)
            for one in wanted:
                made.append(None if one is None else self._make(*one, stream, capture))
        return made

    def _make(
        self, shape: tuple[int, ...], dtype: torch.dtype, stream: int, capture: int
    ) -> torch.Tensor:
        num_bytes, size = _sizes(shape, dtype)
        fitting = self._free.get((capture, stream, size))
        block = fitting.pop() if fitting else self._allocate(size, stream, capture)
        if block is None:
            self._tell_of_no_room(num_bytes)
            return torch.empty(shape, dtype=dtype, device=self._device)
        self._live[block.address] = block
        until = (*self._place, block, self._give_back)
        if dtype.itemsize > 1:
            return from_dlpack(as_dlpack(block.address, shape, DTYPE_CODES[dtype], *until))
        # As plain bytes, because DLPack in older releases of torch does not know fp8.
        flat = from_dlpack(as_dlpack(block.address, (num_bytes,), _BYTE, *until))
        return flat.view(dtype).view(shape)

    def _tell_of_no_room(self, num_bytes: int) -> None:
        """Says once that a tensor lies in ordinary memory; not where there is none but that."""
        memory = self._comm.mem_info()
        if self._has_told or not memory["total_bytes"]:
            return
        self._has_told = True
        _log.warning(
            "crossdock: rank %d of %d: a tensor of %d bytes finds no room in symmetric memory of "
            "%d bytes, of which %d are free in one piece: it lies in ordinary memory, and "
            "operations copy its rows through staging memory; raise EpGroup(symmetric_tensors=), "
            "or call Comm.reserve (said once: GroupStats.staged_tensors counts them)",
            self._comm.rank,
            self._comm.num_ranks,
            num_bytes,
            memory["total_bytes"],
            memory["largest_free_bytes"],
        )

    def _give_back(self, block: _Block) -> None:
        """Called when the last tensor in the block has died."""
        if _is_finalizing():
            return
        current = self._current_stream()
        if current != block.stream:
            block.other_streams.add(current)
        self._returned.append(block)
        if self._closing:
            self._close_if_unused()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in a block of this pool."""
        return tensor.untyped_storage().data_ptr() in self._live

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Tells that `stream` uses the tensor: its memory is not reused before that work is done.

        For tensors of this pool what ``Tensor.record_stream`` is for others, which it calls.
        """
        block = self._live.get(tensor.untyped_storage().data_ptr())
        if block is None:
            tensor.record_stream(stream)
        else:
            block.other_streams.add(stream.cuda_stream)

    def reserve(self, num_bytes: int) -> None:
        """Makes the pool larger. Collective, blocking; `num_bytes` may differ per rank.

        Raises:
            TypeError, ValueError: a bad number (Mismatch on the others); nothing has grown.
            OutOfMemory: this rank has no memory left (Mismatch on the others); nothing has grown.
        """
        grow(self._comm, num_bytes)

    def close(self) -> None:
        """Closes the communicator: now, or when the last tensor of this pool has died."""
        self._closing = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            self._sort_returned(0)
            unused = not self._live
        if unused and self._may_unmap():
            self._comm.close()

    def _may_unmap(self) -> bool:
        """Waits for what has been enqueued and may still use the heap; not in a capture."""
        if self._comm.closed:
            return False
        if is_capturing(self._device):
            _left_by_captures.append(self._comm)
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return True

    def __del__(self) -> None:
        # The communicator may go with its pool.
        if hasattr(self, "_closing") and not _is_finalizing():
            self._may_unmap()

    def _allocate(self, size: int, stream: int, capture: int) -> _Block | None:
        """A block from the heap, if need be after giving unused ones back to it."""
        for attempt in range(2):
            try:
                block = _Block(self._comm.mem_alloc(size), size, stream, capture)
            except OutOfMemory:
                if attempt or not self._trim(size, capture):
                    return None
            else:
                self._wait_for_others(stream, capture)
                return block
        return None

    def _trim(self, size: int, capture: int) -> bool:
        """Gives unused blocks to the heap; whether it is worth trying there again."""
        unused = [key for key, blocks in self._free.items() if not key[0] and blocks]
        if sum(key[2] * len(self._free[key]) for key in unused) < size:
            return False
        for key in unused:
            for block in self._free.pop(key):
                self._comm.mem_free(block.address)
        # The heap does not know streams, so the next user of this memory waits for these. A capture
        # need not wait: torch.cuda.graph has synchronised the device before it began.
        if self._device.type == "cuda" and not capture:
            for stream in {key[1] for key in unused}:
                self._left[stream] = self._event(stream)
        return True

    def _wait_for_others(self, stream: int, capture: int) -> None:
        """Puts the current stream behind others' work with memory of the heap; the host goes on."""
        if capture:
            return
        for other, event in list(self._left.items()):
            if event.query():
                del self._left[other]
            elif other != stream:
                torch.cuda.current_stream(self._device).wait_event(event)

    def _sort_returned(self, capture: int) -> None:
        """Moves blocks of dead tensors to where the next tensor finds them."""
        while self._returned:
            block = self._returned.popleft()
            self._live.pop(block.address, None)
            if not block.other_streams:
                self._free[block.capture, block.stream, block.size].append(block)
            elif block.capture:
                pass  # not used again: a capture cannot tell when the other stream is done
            elif capture:
                self._waiting.append((block, []))  # events cannot be recorded now
            else:
                self._waiting.append((block, self._events(block)))
        if self._waiting and not capture:
            self._check_waiting()

    def _check_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for block, events in waiting:
            events = events or self._events(block)
            if all(event.query() for event in events):
                block.other_streams.clear()
                self._free[block.capture, block.stream, block.size].append(block)
            else:
                self._waiting.append((block, events))

    def _events(self, block: _Block) -> list[torch.cuda.Event]:
        """One per other stream, which is behind the block's last use there."""
        return [self._event(stream) for stream in block.other_streams]

    def _event(self, stream: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.ExternalStream(stream, device=self._device))
        return event
