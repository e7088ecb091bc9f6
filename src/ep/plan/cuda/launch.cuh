// Loads kernels and starts them; fetch_params() is one of the first steps of kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "base/error.h"
#include "cuda/error.h"
#include "cuda/ptx.cuh"
#include "ep/plan/cuda/launch_shape.h"

namespace xd::ep::cuda {

template <class Params>
void launch_with(const cudaLaunchAttribute* attributes, int count, void (*kernel)(Params),
                 const Params& params, const LaunchShape& shape, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = const_cast<cudaLaunchAttribute*>(attributes);
  config.numAttrs = static_cast<unsigned>(count);
  void* arguments[] = {const_cast<Params*>(&params)};
  XD_CUDA_CHECK(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
}

// Starts a cooperative launch: all blocks are resident or none is, so that they may wait for one
// another.
template <class Params>
void launch_cooperative(void (*kernel)(Params), const Params& params, const LaunchShape& shape,
                        cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  launch_with(&attribute, 1, kernel, params, shape, stream);
}

// Loads a kernel and lets it have all of a block's shared memory, less what it has statically.
template <class Params>
void load_kernel(void (*kernel)(Params), std::size_t shared_bytes) {
  const auto* function = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes{};
  XD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, function));
  static_assert(sizeof(Params) <= 4096);  // the limit of every device
  XD_CHECK(attributes.sharedSizeBytes <= kStaticSharedBytes);
  const auto dynamic = static_cast<int>(shared_bytes - attributes.sharedSizeBytes);
  XD_CUDA_CHECK(
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic));
}

// Starts a launch that may begin while the kernel before it in the stream still runs, and waits for
// that one's end itself (ptx::wait_for_kernel_before). Its blocks wait for peers, so the device has
// to hold all of them at once: load_dependent() checks it. `dependent` = false: it begins as others
// do.
template <class Params>
void launch_dependent(void (*kernel)(Params), const Params& params, const LaunchShape& shape,
                      bool dependent, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  launch_with(&attribute, dependent ? 1 : 0, kernel, params, shape, stream);
}

// Starts a small kernel whose blocks wait for nothing but peers.
template <class... Params>
void launch_plain(void (*kernel)(Params...), int blocks, int threads, cudaStream_t stream,
                  std::type_identity_t<Params>... arguments) {
  kernel<<<blocks, threads, 0, stream>>>(arguments...);
  XD_CUDA_CHECK(cudaGetLastError());
}

// Loads a kernel of dependent launches. `shape` is its largest launch; others may have up to
// `shared_bytes` of dynamic shared memory.
template <class Params>
void load_dependent(void (*kernel)(Params), const LaunchShape& shape, std::size_t shared_bytes) {
  const auto* function = reinterpret_cast<const void*>(kernel);
  static_assert(sizeof(Params) <= 4096);
  cudaFuncAttributes attributes{};
  XD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, function));
  XD_CHECK(attributes.sharedSizeBytes <= kStaticSharedBytes);
  XD_CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shared_bytes)));
  int device = 0, sms = 0, blocks = 0;
  XD_CUDA_CHECK(cudaGetDevice(&device));
  XD_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  XD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, shape.threads,
                                                              shape.shared_bytes));
  if (blocks * sms < shape.blocks) {
    fail(XD_ERROR_UNSUPPORTED, "this device holds ", blocks * sms,
         " thread blocks of a low-latency kernel at once, expected ", shape.blocks);
  }
}

// Prefetches a kernel's parameters. A first read of them is slow and fetches one line; here all
// warps fetch all lines at once. All threads call it.
template <class Params>
__device__ void fetch_params(const Params& p) {
  constexpr unsigned kLineWords = 16;
  const auto* words = reinterpret_cast<const std::uint32_t*>(&p);
  for (unsigned i = threadIdx.x / 32 * kLineWords; i < sizeof(Params) / 4;
       i += blockDim.x / 32 * kLineWords) {
    ptx::keep(words[i]);
  }
}

}  // namespace xd::ep::cuda
