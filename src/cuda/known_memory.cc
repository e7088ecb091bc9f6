#include "cuda/known_memory.h"

#include <cuda_runtime_api.h>

#include <map>
#include <string>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/driver.h"

namespace xd::cuda {
namespace {

enum class Kind { here, pinned, elsewhere };

struct Found {
  Kind kind;
  AddressRange around;    // the allocation
  int other_device = -1;  // for memory elsewhere, its device; -1 = none
};

AddressRange allocation_around(std::uintptr_t address) {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  if (driver().cuMemGetAddressRange(&base, &bytes, address) != CUDA_SUCCESS) return {};
  return {base, base + bytes};
}

Found find(std::uintptr_t address, int device) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, as_pointer(address)) != cudaSuccess) {
    cudaGetLastError();
    return {Kind::elsewhere, {}};
  }
  switch (attributes.type) {
    case cudaMemoryTypeManaged:
      return {Kind::here, allocation_around(address)};
    case cudaMemoryTypeHost:
      return {Kind::pinned, allocation_around(address)};
    case cudaMemoryTypeDevice:
      if (attributes.device == device) return {Kind::here, allocation_around(address)};
      return {Kind::elsewhere, {}, attributes.device};
    default:
      return {Kind::elsewhere, {}};
  }
}

std::string describe(const Found& found) {
  if (found.kind == Kind::pinned) return "pinned host memory";
  if (found.other_device >= 0) return concat("memory of CUDA device ", found.other_device);
  return "memory that CUDA does not know";
}

}  // namespace

// The objects are never destroyed, since other static destructors may drop groups.
KnownMemory& KnownMemory::of(int device) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, KnownMemory*>& known = *new std::map<int, KnownMemory*>;
  const std::lock_guard lock(mutex);
  KnownMemory*& found = known[device];
  if (found == nullptr) found = new KnownMemory(device);
  return *found;
}

void KnownMemory::require(std::initializer_list<Claim> claims) {
  const std::lock_guard lock(mutex_);
  for (const Claim& claim : claims) {
    if (claim.bytes == 0) continue;
    const auto first = reinterpret_cast<std::uintptr_t>(claim.data);
    const AddressRange range{first, first + claim.bytes};
    XD_REQUIRE(range.first < range.end, claim.name, ": ", claim.bytes, " bytes at ", claim.data,
               ", expected them to end before the address space does");
    if (here_.contains(range) || (claim.pinned && pinned_.contains(range))) continue;
    look_up(claim, range);
  }
}

// The caller holds the lock.
void KnownMemory::look_up(const Claim& claim, AddressRange range) {
  const Found ends[] = {find(range.first, device_), find(range.end - 1, device_)};
  for (const Found& found : ends) {
    const bool good = found.kind == Kind::here || (claim.pinned && found.kind == Kind::pinned);
    XD_REQUIRE(good, claim.name, &found == ends ? ": is at " : ": ends at ",
               &found == ends ? claim.data : as_pointer(range.end - 1), ", ", describe(found),
               ", expected memory of ", describe_device(device_),
               claim.pinned ? " or pinned host memory" : "");
  }
  AddressRanges& known = ends[0].kind == Kind::here ? here_ : pinned_;
  // If the two ends are of different kinds, the middle is unknown and will be asked for again.
  if (ends[0].kind != ends[1].kind) return;
  for (const Found& found : ends) known.add(found.around);
  // The range spans several allocations that are mapped side by side.
  known.add(range);
}

}  // namespace xd::cuda
