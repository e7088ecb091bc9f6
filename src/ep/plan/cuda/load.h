// Loads kernels that are launched plainly.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/error.h"

namespace xd::ep::cuda {

// On the current device. A kernel that is loaded when it is first launched would wait for kernels
// that spin.
template <class... Kernels>
void load_plain(Kernels*... kernels) {
  cudaFuncAttributes attributes{};
  (XD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernels))), ...);
}

}  // namespace xd::ep::cuda
