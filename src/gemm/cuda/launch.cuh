// Loads kernels and starts them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/error.h"

namespace xd::gemm::cuda {

// When a launch begins.
enum class Begin {
  behind,     // the kernel before it in the stream
  dependent,  // while that one still runs: it waits for its end by ptx::wait_for_kernel_before()
};

// Starts a cooperative launch: all blocks are resident or none is, so that blocks may wait for
// blocks of peers which wait for blocks of this launch.
template <class Params>
void launch_cooperative(void (*kernel)(Params), const Params& params, int blocks, int threads,
                        cudaStream_t stream, Begin begin = Begin::behind) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = begin == Begin::dependent ? 2 : 1;
  void* arguments[] = {const_cast<Params*>(&params)};
  XD_CUDA_CHECK(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
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
