// Copies to peers and within the device, and the flags that follow them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/error.h"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/schedule.h"

namespace xd::gemm::cuda {

inline std::uint64_t bytes_of(std::int64_t rows, std::uint64_t row_bytes) {
  return static_cast<std::uint64_t>(rows) * row_bytes;
}

inline void copy(void* to, const void* from, std::uint64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  XD_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

// Behind what has been copied to the peer, whose area is given: see opening.cu.
inline void send_flag(const Group& group, std::uint64_t flags, std::byte* area,
                      cudaStream_t stream) {
  copy(area + ContextMap::flag_of(flags, group.rank()), &group.control->opened,
       sizeof(std::uint64_t), stream);
}

inline void wait_landed(const Group& group, std::int32_t operation, std::uint64_t flags,
                        Sources sources, cudaStream_t stream) {
  launch_landed({.group = group,
                 .operation = operation,
                 .flags = flags,
                 .first = sources.first,
                 .count = sources.count},
                stream);
}

}  // namespace xd::gemm::cuda
