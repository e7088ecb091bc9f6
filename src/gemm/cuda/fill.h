// Device memory that repeats a pattern from the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "cuda/error.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

namespace xd::gemm::cuda {

// Fills a buffer, and returns when that has been done. The part that is filled is copied behind
// itself, so that little goes through the host. Called with the device current.
inline void fill(const xd::cuda::DeviceBuffer& buffer, std::span<const std::byte> pattern,
                 const xd::cuda::Stream& stream) {
  std::size_t filled = std::min(pattern.size(), buffer.bytes());
  buffer.write(0, pattern.data(), filled);
  while (filled < buffer.bytes()) {
    const std::size_t more = std::min(filled, buffer.bytes() - filled);
    XD_CUDA_CHECK(cudaMemcpyAsync(buffer.data() + filled, buffer.data(), more,
                                  cudaMemcpyDeviceToDevice, stream.get()));
    filled += more;
  }
  stream.synchronize();
}

}  // namespace xd::gemm::cuda
