"""The NumPy-level API beside a GPU: what it does there, and what it refuses."""

from __future__ import annotations

import ctypes

import pytest

import crossdock

pytestmark = pytest.mark.gpu


def test_communicator_on_a_gpu_refuses_numpy_arrays() -> None:
    assert crossdock.feature_reason("cuda") == "available"
    with crossdock.Comm(
        crossdock.unique_id(), rank=0, num_ranks=1, device="cuda:0", heap_bytes=1 << 21
    ) as comm:
        assert comm.device == "cuda:0"
        assert comm.memory().largest_free_bytes == 1 << 21
        comm.grow(1 << 21)
        assert comm.memory().segments == 2
        comm.barrier()
        with pytest.raises(crossdock.Unsupported, match="NumPy arrays lie on the CPU"):
            comm.empty(1)
        with pytest.raises(crossdock.Unsupported, match="NumPy arrays lie on the CPU"):
            crossdock.EpGroup(
                comm, crossdock.EpConfig(num_experts=1, max_topk=1, max_tokens_per_rank=4, hidden=8)
            )
        with pytest.raises(crossdock.Unsupported, match="NumPy arrays lie on the CPU"):
            crossdock.GemmContext(comm, crossdock.GemmConfig(max_tokens=1, max_k=8, max_n=8))


def test_memory_of_the_caller_is_registered_and_taken_out() -> None:
    torch = pytest.importorskip("torch")
    memory = torch.zeros(1 << 20, device="cuda:0")
    on_the_host = torch.zeros(1 << 20)
    with crossdock.Comm(crossdock.unique_id(), rank=0, num_ranks=1, device="cuda:0") as comm:
        core = comm.core()
        registration = core.mem_register(memory.data_ptr(), memory.nbytes)
        core.mem_deregister(registration)
        with pytest.raises(crossdock.InvalidArgument):
            core.mem_register(on_the_host.data_ptr(), on_the_host.nbytes)


def test_memory_that_cannot_be_shared_is_refused() -> None:
    torch = pytest.importorskip("torch")
    torch.zeros(1, device="cuda:0")  # makes the device's context this thread's
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64()
    assert driver.cuMemAllocAsync(ctypes.byref(pointer), ctypes.c_size_t(1 << 20), None) == 0
    try:
        with crossdock.Comm(crossdock.unique_id(), rank=0, num_ranks=1, device="cuda:0") as comm:
            with pytest.raises(crossdock.Unsupported, match="cannot be shared"):
                comm.core().mem_register(pointer.value, 1 << 20)
    finally:
        torch.cuda.synchronize()
        assert driver.cuMemFreeAsync(pointer, None) == 0
