"""A Buffer's results are tensors like any of torch's; and symmetric memory becomes such tensors."""

from __future__ import annotations

import contextlib
import ctypes
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing

import deep_ep_cases as cases
from crossdock import _core
from crossdock.deep_ep import Buffer, _memory
from crossdock.deep_ep._memory import ReceiveMemory, set_bytes
from crossdock.errors import OutOfMemory
from deep_ep_cases import on_buffers
from deep_ep_reference import make_batch

SEED = 80
MIB = 1 << 20
CPU = torch.device("cpu")


@on_buffers(2)
def test_results_behave_like_torchs_tensors(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size, hidden=256))
    pair = (caller.x.to(torch.float8_e4m3fn), torch.rand(len(caller.x), 2))
    (x, scales), idx, weights, _, handle, _ = caller.dispatch(pair, **caller.topk())
    combined, combined_weights, _ = buffer.combine(x.to(torch.bfloat16), handle, weights.clone())
    for tensor in (x, scales, idx, weights, combined, combined_weights, *handle):
        assert type(tensor) is torch.Tensor and tensor.is_leaf
        assert tensor._base is None and tensor.storage_offset() == 0, tensor
        torch.save(tensor, io.BytesIO())
        view = tensor[:, :1] if tensor.ndim > 1 else tensor[:1]
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    kept = x.view(torch.uint8).clone()
    for tensor in (scales, idx, weights):
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().nbytes() == 0
    # Nothing of another tensor went with it.
    cases.same("recv_x", x.view(torch.uint8), kept)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(x.numel())
    caller.cached_checked(handle)


@on_buffers(1)
def test_results_on_the_cpu_can_be_sent_to_other_processes(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size))
    x, *_ = caller.dispatch(**caller.topk())
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(x)
    cases.same("through a queue", queue.get(), x)


# ---- Segments ------------------------------------------------------------------------------------

_take, _give_back = _core.segment_functions()
take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(_take)
give_back = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
)(_give_back)


def test_a_segment_is_taken_once_by_who_was_offered_it() -> None:
    assert take(100, 0, None) is None
    _core.offer_segment(0x1000, 100)
    assert not _core.segment_taken(0x1000)
    assert take(100, 0, None) == 0x1000
    assert _core.segment_taken(0x1000)
    assert take(100, 0, None) is None
    give_back(0x1000, 100, 0, None)
    assert not _core.segment_taken(0x1000)
    _core.offer_segment(0x1000, 100)
    assert take(101, 0, None) is None  # too large; and the offer is gone
    assert take(1, 0, None) is None
    _core.offer_segment(0x1000, 100)
    _core.offer_segment(0, 0)
    assert take(1, 0, None) is None


# ---- Sets, with a stand-in for the caching allocator of torch ----------------------------------


class Heap:
    """The part of a communicator that ReceiveMemory uses, with memory that there is not."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes
        self.begin = 1 << 40
        self.closed = False

    def mem_alloc(self, size: int) -> int:
        if size > self.left:
            raise OutOfMemory("no memory", status="XD_ERROR_OUT_OF_MEMORY")
        self.left -= size
        self.begin += size
        return self.begin - size

    def mem_free(self, address: int) -> None:
        raise AssertionError("a set is never given back")

    def mem_grow(self, size: int) -> None:
        self.left += size

    def close(self) -> None:
        self.closed = True


class Storage:
    """The memory that a tensor lies in."""

    def __init__(self, address: int) -> None:
        self.address = address


class Pool:
    """torch's pool: cuts the segments that it is offered, each for the stream that it came on."""

    def __init__(self, memory: ReceiveMemory) -> None:
        self.stream = 0
        self.free: dict[int, list[tuple[int, int]]] = {}  # by stream: address, bytes
        self.segments: list[int] = []
        self.alive: set[int] = set()
        self.failures = 0
        memory._allocate = self.allocate  # type: ignore[method-assign]
        memory._allocating = contextlib.nullcontext  # type: ignore[method-assign]

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int) -> Any:
        size = max(num_bytes, MIB + 512)
        blocks = self.free.setdefault(self.stream, [])
        for number, (address, room) in enumerate(blocks):
            if room >= size:
                blocks[number] = (address + size, room - size)
                self.alive.add(address)
                return self.tensor(address)
        address = take(size, 0, None)
        if address is None:
            self.failures += 1
            return None
        self.segments.append(address)
        blocks.append((address, size))  # as if it had died at once
        return self.tensor(address)

    def tensor(self, address: int) -> Any:
        return SimpleNamespace(untyped_storage=lambda: Storage(address), data_ptr=lambda: address)

    def die(self, tensor: Any, size: int) -> None:
        self.alive.discard(tensor.data_ptr())
        self.free[self.stream].append((tensor.data_ptr(), size))


def from_sets(memory: ReceiveMemory, *sizes: int) -> Any:
    """A tensor of so many bytes, or several: what is not in a set is None."""
    found: list[Any] = [None] * len(sizes)
    memory._take_from_sets([((size,), torch.uint8) for size in sizes], found)
    return found if len(sizes) > 1 else found[0]


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A memory of two sets of 12 MiB."""
    found = SimpleNamespace(heap=Heap(0))
    found.memory = ReceiveMemory(found.heap, CPU)
    found.pool = found.memory._pool = Pool(found.memory)

    class Ref:
        def __init__(self, storage: Storage) -> None:
            self.address = storage.address

        def expired(self) -> bool:
            return self.address not in found.pool.alive

    monkeypatch.setattr(_memory, "StorageWeakRef", Ref)
    monkeypatch.setattr(_memory, "current_stream", lambda _: found.pool.stream)
    monkeypatch.setattr(_memory, "_refuse_sending", lambda: None)
    monkeypatch.setattr(_memory.torch.cuda, "synchronize", lambda _: None)
    found.heap.mem_grow(24 * MIB)
    found.memory.reserve(0, 12 * MIB)
    yield found
    for segment in found.pool.segments:
        give_back(segment, 0, 0, None)
    _memory._leaving.discard(found.memory)


def test_a_set_has_room_for_the_tensors_of_a_dispatch() -> None:
    for parts in ([1, 2, 3, 4], [200 * MIB + 17, 3 * MIB, 1000, 9 * MIB]):
        room = set_bytes(parts)
        assert room % (2 * MIB) == 0 and room >= 10 * MIB
        # torch keeps up to 1 MiB with each, and takes no less than a large block.
        assert room >= sum(max(part, MIB + 512) + MIB for part in parts)


def test_tensors_of_a_stream_come_from_its_sets_until_they_are_full(sets: SimpleNamespace) -> None:
    memory, pool = sets.memory, sets.pool
    first = [from_sets(memory, 6 * MIB) for _ in range(4)]
    assert all(first) and len(pool.segments) == 2
    failures = pool.failures
    for _ in range(5):  # without asking torch again
        assert from_sets(memory, 6 * MIB) is None
    assert pool.failures == failures + 1
    pool.die(first.pop(), 6 * MIB)
    assert from_sets(memory, 6 * MIB) is not None
    assert len(pool.segments) == 2


def test_several_tensors_are_made_in_order_as_long_as_there_is_room(sets: SimpleNamespace) -> None:
    memory, pool = sets.memory, sets.pool
    small, large, rows = from_sets(memory, 1, 12 * MIB + 1, 9 * MIB)
    assert small and rows and large is None and len(pool.segments) == 1
    first, second, third = from_sets(memory, 11 * MIB, 9 * MIB, 1)
    assert first and second is None and third is None  # no later one in the place of an earlier
    made = memory.tensors([((3, 0), torch.int64), None, ((2, 3), torch.float16)])
    assert made[1] is None and made[0].shape == (3, 0) and made[0].dtype == torch.int64
    assert made[2].shape == (2, 3) and made[2].dtype == torch.float16


def test_each_stream_has_sets_of_its_own(sets: SimpleNamespace) -> None:
    memory, pool = sets.memory, sets.pool
    assert from_sets(memory, 1) is not None
    pool.stream = 7
    assert from_sets(memory, 1) is not None
    pool.stream = 8  # the third one finds nothing, and costs torch no failure
    failures = pool.failures
    assert from_sets(memory, 1) is None
    assert pool.failures == failures
    pool.stream = 7
    assert from_sets(memory, 1) is not None


def test_what_is_larger_than_a_set_is_ordinary_memory(sets: SimpleNamespace) -> None:
    assert from_sets(sets.memory, 12 * MIB + 1) is None
    assert not sets.pool.segments
    sets.heap.mem_grow(26 * MIB)
    sets.memory.reserve(0, 26 * MIB)
    assert from_sets(sets.memory, 12 * MIB + 1) is not None


def test_a_pool_that_takes_no_segment_is_not_used(
    sets: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with settings of torch's allocator under which it gives memory of its own."""
    freed: list[int] = []
    monkeypatch.setattr(sets.heap, "mem_free", freed.append)
    sets.memory._allocate = lambda shape, dtype, num_bytes: sets.pool.tensor(77)
    tensor = sets.memory.empty((3, 5), torch.bfloat16)
    assert tensor.shape == (3, 5) and tensor.dtype == torch.bfloat16
    assert len(freed) == 1 and sets.memory._pool is None
    sets.memory.empty((3, 5), torch.bfloat16)
    assert len(freed) == 1


def test_communicator_stays_until_torch_gives_its_segments_back(
    sets: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(_memory.torch.cuda, "empty_cache", lambda: asked.append("empty_cache"))
    tensor = from_sets(sets.memory, MIB)
    sets.memory.close()
    assert not sets.heap.closed and sets.memory._pool is not None
    sets.pool.die(tensor, MIB)
    _memory.leave_unused()
    assert sets.memory._pool is None and not sets.heap.closed  # torch still has its segment
    assert asked == []
    give_back(sets.pool.segments.pop(), 0, 0, None)
    _memory.leave_unused()
    assert sets.heap.closed and asked == ["empty_cache"]
    assert sets.memory not in _memory._leaving


def test_tensors_in_symmetric_memory_are_not_sent_to_other_processes() -> None:
    tensor = torch.zeros(5)
    memory = ReceiveMemory(Heap(0), CPU)  # type: ignore[arg-type]
    assert not memory.owns(tensor)
    memory._sets.append((tensor.data_ptr() - 64, 65))
    assert memory.owns(tensor) and memory.owns(tensor[3:])
    _memory._giving.add(memory)
    on_gpu: Any = SimpleNamespace(
        device=torch.device("cuda", 0), untyped_storage=tensor.untyped_storage
    )
    with pytest.raises(RuntimeError, match=r"symmetric memory .* send tensor.clone\(\)"):
        _memory._reduce(on_gpu)
    assert _memory._reduce(torch.zeros(3))  # as torch does
