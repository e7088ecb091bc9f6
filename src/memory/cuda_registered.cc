#include "memory/cuda_registered.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/error.h"
#include "memory/process_token.h"

namespace xd {
namespace {

using cuda::driver;

// What peers are told. A handle stands for a whole allocation.
struct Description {
  std::uint64_t process;  // whose addresses these are
  std::uint64_t address;
  std::uint64_t offset;  // from the start of the allocation
  std::uint64_t bytes;
  cuda::Uuid device;
  cudaIpcMemHandle_t handle;
};

// Memory of this process that somebody else owns.
class LentSegment final : public Segment {
 public:
  LentSegment(std::byte* base, std::size_t bytes) : Segment(base, bytes, false) {}
};

// Memory of another process. The driver counts how often a process has opened it.
class BorrowedSegment final : public Segment {
 public:
  BorrowedSegment(int device, std::byte* allocation, std::size_t offset, std::size_t bytes)
      : Segment(allocation + offset, bytes, false), device_(device), allocation_(allocation) {}
  ~BorrowedSegment() override {
    cuda::try_on_device(device_, [this] { cudaIpcCloseMemHandle(allocation_); });
  }

 private:
  int device_;
  std::byte* allocation_;
};

struct Range {
  CUdeviceptr base;
  std::size_t bytes;
};

// The allocation around [ptr, ptr + bytes).
Range allocation_of(int device, void* ptr, std::size_t bytes) {
  cudaPointerAttributes attributes{};
  XD_CUDA_CHECK(cudaPointerGetAttributes(&attributes, ptr));
  XD_REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == device, "ptr = ", ptr,
             ", expected memory of ", cuda::describe_device(device));
  const auto address = reinterpret_cast<CUdeviceptr>(ptr);
  Range range{};
  XD_CUDA_CHECK(driver().cuMemGetAddressRange(&range.base, &range.bytes, address));
  const std::size_t room = range.base + range.bytes - address;
  XD_REQUIRE(bytes <= room, "bytes = ", bytes, ", expected at most ", room,
             ", where the allocation of ptr ends");
  return range;
}

void require_lendable(void* ptr) {
  int lendable = 0;
  XD_CUDA_CHECK(driver().cuPointerGetAttribute(&lendable,
                                               CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                               reinterpret_cast<CUdeviceptr>(ptr)));
  if (lendable == 0) {
    fail(XD_ERROR_UNSUPPORTED, "ptr = ", ptr,
         ": CUDA IPC cannot share this memory, as it does not come from cudaMalloc (but from "
         "cudaMallocAsync or virtual memory)");
  }
}

void enable_peer_access(int owner) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(owner, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  cuda::check(error, "cudaDeviceEnablePeerAccess");
}

}  // namespace

SegmentMaker::Made lend_cuda_memory(int device, void* ptr, std::size_t bytes) {
  // Places in a segment are multiples of 16 bytes from its start.
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(ptr) % 16 == 0, "ptr = ", ptr,
             ", expected a 16-byte aligned address");
  const cuda::DeviceGuard guard(device);
  const Range allocation = allocation_of(device, ptr, bytes);
  require_lendable(ptr);
  Description description{.process = process_token(),
                          .address = reinterpret_cast<std::uint64_t>(ptr),
                          .offset = reinterpret_cast<CUdeviceptr>(ptr) - allocation.base,
                          .bytes = bytes,
                          .device = cuda::require_device(device).uuid,
                          .handle = {}};
  if (const cudaError_t error = cudaIpcGetMemHandle(&description.handle, ptr);
      error != cudaSuccess) {
    cudaGetLastError();
    fail(XD_ERROR_UNSUPPORTED, "ptr = ", ptr, ": cudaIpcGetMemHandle: ", cudaGetErrorString(error));
  }
  SegmentMaker::Made made;
  made.segment = std::make_shared<LentSegment>(static_cast<std::byte*>(ptr), bytes);
  made.description.resize(sizeof(description));
  std::memcpy(made.description.data(), &description, sizeof(description));
  return made;
}

std::shared_ptr<Segment> borrow_cuda_memory(int device, int owner,
                                            std::span<const std::byte> description) {
  Description d{};
  if (description.size() != sizeof(d)) {
    fail(XD_ERROR_MISMATCH, "rank ", owner, " sent a malformed description of its memory");
  }
  std::memcpy(&d, description.data(), sizeof(d));
  const cuda::DeviceGuard guard(device);
  const int there = cuda::find_device(d.device);
  if (there >= 0) cuda::require_peer_access(device, there);
  if (d.process == process_token()) {
    if (there != device) enable_peer_access(there);
    return std::make_shared<LentSegment>(cuda::as_pointer(d.address), d.bytes);
  }
  void* allocation = nullptr;
  const cudaError_t error =
      cudaIpcOpenMemHandle(&allocation, d.handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    cudaGetLastError();
    fail(XD_ERROR_UNSUPPORTED, "the memory of rank ", owner,
         " cannot be opened here: cudaIpcOpenMemHandle: ", cudaGetErrorString(error));
  }
  return std::make_shared<BorrowedSegment>(device, static_cast<std::byte*>(allocation), d.offset,
                                           d.bytes);
}

}  // namespace xd
