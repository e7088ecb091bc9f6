#include "comm/cuda/registered.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/error.h"
#include "cuda/virtual_memory.h"
#include "memory/process_token.h"

namespace xd {
namespace {

using cuda::driver;

// The description that peers get of a range of an allocation.
struct Description {
  std::uint64_t process;  // the process whose addresses these are
  std::uint64_t base;     // start of the allocation
  std::uint64_t allocated;
  std::uint64_t offset;
  std::uint64_t bytes;
  cuda::Uuid device;
  std::uint64_t is_virtual;   // 1: a descriptor comes with the description
  cudaIpcMemHandle_t handle;  // if not virtual

  std::byte* address() const { return cuda::as_pointer(base + offset); }
};

// Memory of this process that the caller owns.
class LentSegment final : public Segment {
 public:
  LentSegment(std::byte* base, std::size_t bytes) : Segment(base, bytes, false) {}
};

// Memory of another process, opened by a handle. The driver counts how often a process has opened
// it.
class OpenedSegment final : public Segment {
 public:
  OpenedSegment(int device, std::byte* allocation, const Description& d)
      : Segment(allocation + d.offset, d.bytes, false), device_(device), allocation_(allocation) {}
  ~OpenedSegment() override {
    cuda::try_on_device(device_, [this] { cudaIpcCloseMemHandle(allocation_); });
  }

 private:
  int device_;
  std::byte* allocation_;
};

// Memory of another process, mapped here. It stays, whatever its owner does.
class MappedSegment final : private cuda::Mapping, public Segment {
 public:
  MappedSegment(int device, const cuda::Allocation& allocation, const Description& d)
      : Mapping(device, allocation, d.allocated),
        Segment(Mapping::base() + d.offset, d.bytes, false) {
    cuda::allow_access(Mapping::base(), d.allocated, device);
  }
};

struct Range {
  CUdeviceptr base;
  std::size_t bytes;
};

// Finds the allocation around [ptr, ptr + bytes).
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

bool has_ipc_handle(const void* ptr) {
  int has = 0;
  XD_CUDA_CHECK(driver().cuPointerGetAttribute(
      &has, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, reinterpret_cast<CUdeviceptr>(ptr)));
  return has != 0;
}

cudaIpcMemHandle_t ipc_handle(void* ptr) {
  cudaIpcMemHandle_t handle{};
  if (const cudaError_t error = cudaIpcGetMemHandle(&handle, ptr); error != cudaSuccess) {
    cudaGetLastError();
    fail(XD_ERROR_UNSUPPORTED, "ptr = ", ptr, ": cudaIpcGetMemHandle: ", cudaGetErrorString(error));
  }
  return handle;
}

UniqueFd share_virtual(const void* ptr, const Range& range) {
  const auto first = cuda::Allocation::at(range.base);
  if (!first || !first.shareable()) {
    fail(XD_ERROR_UNSUPPORTED, "ptr = ", ptr,
         ": this memory cannot be shared: it is neither cudaMalloc's nor virtual memory made for "
         "POSIX file descriptors (but cudaMallocAsync's, perhaps)");
  }
  const auto last = cuda::Allocation::at(range.base + range.bytes - 1);
  XD_REQUIRE(first.get() == last.get(), "ptr = ", ptr, ", expected memory of one allocation");
  return first.share();
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

SegmentMaker::Made CudaLender::create(std::size_t bytes, const char*) const {
  XD_REQUIRE(ptr_ != nullptr, "ptr = NULL, expected memory of ", bytes, " bytes");
  // Tensors lie at multiples of 16 bytes from the start of a segment.
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(ptr_) % 16 == 0, "ptr = ", ptr_,
             ", expected a 16-byte aligned address");
  const cuda::DeviceGuard guard(device_);
  const Range allocation = allocation_of(device_, ptr_, bytes);
  const bool is_virtual = !has_ipc_handle(ptr_);
  Made made;
  Description description{.process = process_token(),
                          .base = allocation.base,
                          .allocated = allocation.bytes,
                          .offset = reinterpret_cast<CUdeviceptr>(ptr_) - allocation.base,
                          .bytes = bytes,
                          .device = cuda::require_device(device_).uuid,
                          .is_virtual = is_virtual,
                          .handle = {}};
  if (is_virtual) {
    made.fd = share_virtual(ptr_, allocation);
  } else {
    description.handle = ipc_handle(ptr_);
  }
  made.segment = std::make_shared<LentSegment>(static_cast<std::byte*>(ptr_), bytes);
  made.description.resize(sizeof(description));
  std::memcpy(made.description.data(), &description, sizeof(description));
  return made;
}

std::shared_ptr<Segment> CudaLender::open(int owner, std::span<const std::byte> description,
                                          UniqueFd fd) const {
  Description d{};
  if (description.size() != sizeof(d)) {
    fail(XD_ERROR_MISMATCH, "rank ", owner, " sent a malformed description of its memory");
  }
  std::memcpy(&d, description.data(), sizeof(d));
  const cuda::DeviceGuard guard(device_);
  const int there = cuda::find_device(d.device);
  if (there >= 0) cuda::require_peer_access(device_, there);
  if (d.process == process_token()) {
    if (d.is_virtual != 0) {
      cuda::allow_access(cuda::as_pointer(d.base), d.allocated, device_);
    } else if (there != device_) {
      enable_peer_access(there);
    }
    return std::make_shared<LentSegment>(d.address(), d.bytes);
  }
  if (d.is_virtual != 0) {
    return std::make_shared<MappedSegment>(device_, cuda::Allocation::import(fd), d);
  }
  void* allocation = nullptr;
  const cudaError_t error =
      cudaIpcOpenMemHandle(&allocation, d.handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    cudaGetLastError();
    fail(XD_ERROR_UNSUPPORTED, "the memory of rank ", owner,
         " cannot be opened here: cudaIpcOpenMemHandle: ", cudaGetErrorString(error));
  }
  return std::make_shared<OpenedSegment>(device_, static_cast<std::byte*>(allocation), d);
}

}  // namespace xd
