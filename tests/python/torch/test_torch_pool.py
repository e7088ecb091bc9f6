"""The symmetric pool: reuse, exhaustion, growth, and lifetimes of tensors and communicators."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import InvalidArgument
from crossdock.torch._pool import block_bytes
from support import Rank, on_ranks
from torch_support import Batch, poison, ragged, where

SEED = 3


@pytest.fixture
def comm():
    with xd.init(heap_bytes=1 << 20) as made:
        yield made


def make_group(**options) -> xd.EpGroup:
    return xd.EpGroup(num_experts=4, hidden=32, max_topk=2, dtype=torch.float32, **options)


def test_memory_is_reused_when_a_tensor_dies(comm):
    tensor = comm.empty_symmetric((100, 7), torch.float32)
    address = tensor.data_ptr()
    assert tensor.shape == (100, 7) and tensor.is_contiguous() and address % 256 == 0
    other = comm.empty_symmetric((100, 7), torch.float32)
    assert other.data_ptr() != address
    part = tensor[3:5]
    del tensor
    assert comm.empty_symmetric((100, 7), torch.float32).data_ptr() != address  # a view lives
    del part
    again = comm.empty_symmetric((50, 7), torch.int64)  # as many bytes, another type
    assert again.data_ptr() == address


def test_every_dtype(comm):
    floats = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
    for dtype in (*floats, torch.int32, torch.int64, torch.uint8, torch.int8):
        tensor = comm.empty_symmetric((3, 16), dtype)
        assert tensor.dtype == dtype and tensor.shape == (3, 16) and comm.pool.owns(tensor)
        tensor.view(torch.uint8).fill_(0x41)
        assert bool((tensor.view(torch.uint8) == 0x41).all())


def test_empty_tensors_and_scalars(comm):
    assert comm.empty_symmetric((0, 5), torch.float32).shape == (0, 5)
    assert comm.empty_symmetric((), torch.float32).shape == ()


def test_exhausted_pool_gives_ordinary_memory_and_never_grows(comm):
    total = comm.core.mem_info()["total_bytes"]
    tensors = []
    while comm.pool.owns(tensor := comm.empty_symmetric((1 << 16,), torch.float32)):
        tensors.append(tensor)
    assert len(tensors) == total // (1 << 18)
    assert tensor.shape == (1 << 16,) and tensor.device == comm.device
    assert comm.core.mem_info()["total_bytes"] == total
    del tensor
    # Freed blocks of one size become blocks of other sizes.
    tensors.clear()
    whole = comm.empty_symmetric((total // 4,), torch.float32)
    assert comm.pool.owns(whole)
    del whole
    assert comm.pool.owns(comm.empty_symmetric((100,), torch.float32))


def test_reserve_grows(comm):
    before = comm.core.mem_info()["total_bytes"]
    comm.reserve(1 << 21)
    assert comm.core.mem_info()["total_bytes"] == before + (1 << 21)
    assert comm.pool.owns(comm.empty_symmetric((1 << 21,), torch.uint8))


def test_room_for_more_groups_than_growths():
    with xd.init() as comm:
        groups, needed = [], 0
        for number in range(150):
            before = comm.core.mem_info()["total_bytes"]
            groups.append(make_group(max_tokens_per_rank=64 + number))
            needed += 4 * (block_bytes(groups[-1].rows * 32 * 4) + block_bytes(groups[-1].rows * 4))
            if number < 32:
                assert comm.core.mem_info()["total_bytes"] > before
        assert needed * 0.95 < comm.core.mem_info()["total_bytes"] < needed * 1.25


def test_tensors_outlive_their_communicator():
    comm = xd.init(heap_bytes=1 << 20)
    tensor = comm.empty_symmetric((1000,), torch.float32).fill_(3)
    comm.close()
    core = comm.core
    assert not core.closed
    assert float(tensor.sum()) == 3000
    del tensor
    assert core.closed
    comm.close()  # does nothing
    with pytest.raises(InvalidArgument, match="closed"):
        comm.empty_symmetric((1,), torch.float32)


def test_default_comm_is_the_first_that_is_open():
    with xd.init() as first:
        with xd.init(name="second") as second:
            assert xd.default_comm() is first
            group = make_group(max_tokens_per_rank=4, comm=second)
            assert group.comm is second
            assert xd.empty_symmetric((4,), torch.float32).shape == (4,)
    with pytest.raises(RuntimeError, match="no communicator"):
        xd.default_comm()


def test_communicator_is_freed_when_nobody_refers_to_it():
    with xd.init():  # the default one, which keeps itself
        comm = xd.init(name="dropped", heap_bytes=1 << 20)
        core = weakref.ref(comm.core)
        tensor = comm.empty_symmetric((4,), torch.float32)
        del comm
        gc.collect()
        assert core() is not None
        del tensor
        gc.collect()
        assert core() is None


@pytest.mark.parametrize("num_bytes", [0, 1, 511, 512, 513, 1 << 20, (1 << 20) + 1])
def test_blocks_hold_what_was_asked(num_bytes):
    assert block_bytes(num_bytes) >= max(1, num_bytes)
    assert block_bytes(num_bytes) <= num_bytes + (512 if num_bytes < 1 << 20 else 1 << 16)


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
@on_ranks(4)
def test_staged_and_zero_copy_give_the_same(me: Rank, layout: str) -> None:
    """The same results with no symmetric memory at all, with little, and with enough."""
    batch = Batch(SEED, ragged(me), layout)
    for symmetric_tensors in (0, 1, 8):
        with xd.init() as comm:
            group = batch.group(symmetric_tensors=symmetric_tensors)
            total = comm.core.mem_info()["total_bytes"]
            hold = []
            if symmetric_tensors == 0:
                while comm.pool.owns(block := comm.empty_symmetric((512,), torch.uint8)):
                    hold.append(block)
            else:
                poison(comm)
            topk_idx, x, weights, _ = batch.local(me.rank)
            plan = group.prepare(topk_idx)
            received = xd.dispatch(plan, x.detach(), weights.detach())
            assert comm.pool.owns(received.tokens) == (symmetric_tensors > 0)
            del received
            batch.check_layer(me.rank, plan, f"with {symmetric_tensors}")
            assert comm.core.mem_info()["total_bytes"] == total


@on_ranks(4)
def test_without_staging_ordinary_receive_tensors_are_refused(me: Rank) -> None:
    batch = Batch(SEED + 1, ragged(me))
    with xd.init() as comm, torch.no_grad():
        group = batch.group(staging="none")
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights)
        own = comm.empty_symmetric(received.tokens.shape, torch.float32).copy_(received.tokens)
        out = xd.combine(plan, own)
        assert torch.equal(out, xd.combine(plan, received.tokens))
        if where().type == "cuda":  # this rank alone reads it
            assert torch.equal(out, xd.combine(plan, received.tokens.clone()))
            return
        with pytest.raises(InvalidArgument, match="expert_out"):
            xd.combine(plan, received.tokens.clone())


@on_ranks(2)
def test_a_pool_that_is_used_up_says_so_once(me: Rank) -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    log = logging.getLogger("crossdock")
    log.addHandler(handler)
    try:
        batch = Batch(SEED + 3, ragged(me))
        with xd.init() as comm, torch.no_grad():
            group = batch.group()
            topk_idx, x, weights, _ = batch.local(me.rank)
            plan = group.prepare(topk_idx)
            xd.dispatch(plan, x, weights)
            assert group.stats().staged_tensors == 0 and not said
            held = [comm.empty_symmetric((4096,), torch.uint8)]
            while comm.pool.owns(held[-1]):
                held.append(comm.empty_symmetric((4096,), torch.uint8))
            (record,) = said
            total = comm.core.mem_info()["total_bytes"]
            assert f"tensor of 4096 bytes finds no room in symmetric memory of {total} bytes" in (
                record.getMessage()
            )
            received = xd.dispatch(plan, x, weights)
            assert not comm.pool.owns(received.tokens)
            xd.combine(plan, received.tokens, received.weights)
            # A GPU sums its own rows where they lie.
            staged = 1 if where().type == "cuda" else 2
            assert group.stats().staged_tensors == staged * (len(received.tokens) > 0)
            assert len(said) == 1
    finally:
        log.removeHandler(handler)


@on_ranks(4)
def test_poisoned_memory_reaches_no_gradient(me: Rank) -> None:
    """Tails of receive tensors and of gradients are zero although the memory was full of NaN."""
    batch = Batch(SEED + 2, ragged(me), alignment=4)
    with xd.init() as comm:
        group = batch.group(symmetric_tensors=12)
        poison(comm)
        topk_idx, x, weights, grad_out = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights)
        assert comm.pool.owns(received.tokens)
        # Whole tensors times a matrix: one NaN anywhere would spread over its gradient.
        matrix = torch.eye(32, requires_grad=True)
        seen = []
        rows = received.tokens @ matrix
        rows.register_hook(seen.append)
        xd.combine(plan, rows, received.weights).backward(grad_out)
        assert comm.pool.owns(seen[0])
        for name, tensor in (
            ("rows", rows),
            ("gradient of rows", seen[0]),
            ("x", x.grad),
            ("weights", weights.grad),
            ("matrix", matrix.grad),
        ):
            assert bool(torch.isfinite(tensor).all()), f"{name} is not finite"
        assert int(torch.count_nonzero(seen[0][int(plan.total) :])) == 0
        # Without zero_tail the same memory shows through: the test would notice.
        bare = batch.group(zero_tail=False, symmetric_tensors=12)
        comm.empty_symmetric((bare.rows, 32), torch.float32).fill_(torch.nan)
        tokens = xd.dispatch(bare.prepare(topk_idx), x.detach()).tokens
        assert bool(tokens[batch.routing.total(me.rank) :].isnan().all())
