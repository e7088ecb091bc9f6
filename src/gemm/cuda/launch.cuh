// Loads kernels and starts them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/error.h"

namespace xd::gemm::cuda {

// Starts a cooperative launch: all blocks are resident or none is, so that blocks may wait for
// blocks of peers which wait for blocks of this launch.
template <class Params>
void launch_cooperative(void (*kernel)(Params), const Params& params, int blocks, int threads,
                        cudaStream_t stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  XD_CUDA_CHECK(cudaLaunchCooperativeKernel(
      reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
      dim3(static_cast<unsigned>(threads)), arguments, 0, stream));
}

// The blocks of a launch whose threads share `work` pieces: one at least, and `most` at most. Small
// launches leave room on the device, so that those of several contexts are there at once.
inline int blocks_for(std::int64_t work, int threads, int most) {
  const std::int64_t blocks = (work + threads - 1) / threads;
  return static_cast<int>(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

template <class Params>
void launch_plain(void (*kernel)(Params), const Params& params, int blocks, int threads,
                  cudaStream_t stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  XD_CUDA_CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                                 dim3(static_cast<unsigned>(blocks)),
                                 dim3(static_cast<unsigned>(threads)), arguments, 0, stream));
}

// Loads a kernel on the current device. One that is loaded when it is first launched would wait for
// kernels that spin.
template <class Params>
void load_kernel(void (*kernel)(Params)) {
  static_assert(sizeof(Params) <= 4096);  // the limit of every device
  cudaFuncAttributes attributes{};
  XD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
}

}  // namespace xd::gemm::cuda
