#include "cuda/virtual_memory.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>

#include "base/error.h"
#include "base/math.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/error.h"

namespace xd::cuda {
namespace {

constexpr CUmemAllocationHandleType kSharedAs = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

std::uint64_t granularity_of(const CUmemAllocationProp& properties) {
  std::size_t granularity = 0;
  XD_CUDA_CHECK(driver().cuMemGetAllocationGranularity(&granularity, &properties,
                                                       CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  return granularity;
}

CUdeviceptr address_of(const void* ptr) { return reinterpret_cast<CUdeviceptr>(ptr); }

}  // namespace

Allocation Allocation::create(int device, std::size_t bytes, const char* what) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  properties.requestedHandleTypes = kSharedAs;
  Allocation made;
  made.bytes_ = round_up(bytes, granularity_of(properties));
  // Rounding up may have wrapped.
  const CUresult error = made.bytes_ < bytes
                             ? CUDA_ERROR_OUT_OF_MEMORY
                             : driver().cuMemCreate(&made.handle_, made.bytes_, &properties, 0);
  if (error == CUDA_ERROR_OUT_OF_MEMORY) {
    std::size_t available = 0, total = 0;
    XD_CUDA_CHECK(cudaMemGetInfo(&available, &total));
    fail(XD_ERROR_OUT_OF_MEMORY, what, ": asked ", bytes, " bytes of ", describe_device(device),
         ", available ", available);
  }
  check(error, "cuMemCreate");
  return made;
}

Allocation Allocation::at(CUdeviceptr address) {
  Allocation found;
  const CUresult error = driver().cuMemRetainAllocationHandle(&found.handle_, as_pointer(address));
  if (error != CUDA_SUCCESS) found.handle_ = 0;
  return found;
}

Allocation Allocation::import(const UniqueFd& fd) {
  Allocation imported;
  XD_CUDA_CHECK(driver().cuMemImportFromShareableHandle(
      &imported.handle_, as_pointer(static_cast<std::uint64_t>(fd.get())), kSharedAs));
  return imported;
}

Allocation::~Allocation() {
  if (handle_ != 0) driver().cuMemRelease(handle_);
}

bool Allocation::shareable() const {
  CUmemAllocationProp properties{};
  XD_CUDA_CHECK(driver().cuMemGetAllocationPropertiesFromHandle(&properties, handle_));
  return (properties.requestedHandleTypes & kSharedAs) != 0;
}

UniqueFd Allocation::share() const {
  int fd = -1;
  XD_CUDA_CHECK(driver().cuMemExportToShareableHandle(&fd, handle_, kSharedAs, 0));
  return UniqueFd(fd);
}

Mapping::Mapping(int device, const Allocation& allocation, std::size_t bytes)
    : device_(device), bytes_(bytes) {
  XD_CUDA_CHECK(driver().cuMemAddressReserve(&base_, bytes, 0, 0, 0));
  const CUresult error = driver().cuMemMap(base_, bytes, 0, allocation.get(), 0);
  if (error != CUDA_SUCCESS) {
    driver().cuMemAddressFree(base_, bytes);
    check(error, "cuMemMap");
  }
}

Mapping::~Mapping() {
  try_on_device(device_, [this] {
    driver().cuMemUnmap(base_, bytes_);
    driver().cuMemAddressFree(base_, bytes_);
  });
}

std::byte* Mapping::base() const { return as_pointer(base_); }

StitchedMapping::StitchedMapping(int device, const std::vector<const std::byte*>& parts,
                                 std::size_t bytes)
    : device_(device), part_bytes_(bytes), bytes_(bytes * parts.size()) {
  XD_CUDA_CHECK(driver().cuMemAddressReserve(&base_, bytes_, 0, 0, 0));
  try {
    map(parts);
  } catch (...) {
    release();
    throw;
  }
}

void StitchedMapping::map(const std::vector<const std::byte*>& parts) {
  for (const std::byte* part : parts) {
    const Allocation allocation = Allocation::at(address_of(part));
    if (!allocation) fail(XD_ERROR_INTERNAL, "the driver knows no allocation of shared memory");
    XD_CUDA_CHECK(driver().cuMemMap(base_ + mapped_, part_bytes_, 0, allocation.get(), 0));
    mapped_ += part_bytes_;
  }
  const CUmemAccessDesc access{.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device_},
                               .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  XD_CUDA_CHECK(driver().cuMemSetAccess(base_, bytes_, &access, 1));
}

void StitchedMapping::release() noexcept {
  for (std::size_t at = 0; at < mapped_; at += part_bytes_) {
    driver().cuMemUnmap(base_ + at, part_bytes_);
  }
  driver().cuMemAddressFree(base_, bytes_);
}

StitchedMapping::~StitchedMapping() {
  try_on_device(device_, [this] { release(); });
}

std::byte* StitchedMapping::base() const { return as_pointer(base_); }

void allow_access(void* base, std::size_t bytes, int device) {
  const CUmemLocation where{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  // The driver refuses a grant that another thread has made between our question and our grant.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  unsigned long long flags = 0;
  XD_CUDA_CHECK(driver().cuMemGetAccess(&flags, &where, address_of(base)));
  if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return;
  const CUmemAccessDesc access{.location = where, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  XD_CUDA_CHECK(driver().cuMemSetAccess(address_of(base), bytes, &access, 1));
}

}  // namespace xd::cuda
