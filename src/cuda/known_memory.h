// Checks that addresses given by a caller are memory that kernels of a device may touch.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <mutex>

#include "base/address_ranges.h"
#include "base/tensor.h"

namespace xd::cuda {

// Asks the driver about every allocation once: where addresses are known, a look takes some tens of
// nanoseconds. So memory that has been given back to CUDA since is not noticed.
class KnownMemory {
 public:
  // The knowledge of this process about a device.
  static KnownMemory& of(int device);

  // The memory that an argument claims to be.
  struct Claim {
    const char* name;
    const void* data;
    std::size_t bytes;    // 0: kernels touch nothing, and CUDA is not asked
    bool pinned = false;  // true: pinned host memory is as good as the device's
  };

  // Throws INVALID_ARGUMENT naming the first claim that is wrong: its first or last byte lies
  // neither in the device's memory nor in managed memory. The device's context is current. Any
  // thread; allowed while a stream is captured.
  void require(std::initializer_list<Claim> claims);

 private:
  explicit KnownMemory(int device) : device_(device) {}
  void look_up(const Claim& claim, AddressRange range);

  const int device_;
  std::mutex mutex_;
  AddressRanges here_, pinned_;  // ranges of whole allocations
};

// A tensor's memory from its first element to its last.
inline KnownMemory::Claim claim(const Tensor& tensor, bool pinned = false) {
  const Tensor::Extent extent = tensor.extent();
  return {tensor.name, extent.first, extent.bytes, pinned};
}

}  // namespace xd::cuda
