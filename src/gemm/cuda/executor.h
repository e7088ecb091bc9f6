// The CUDA executor of products: cuBLASLt multiplies, copy engines and kernels move rows.
#pragma once

#include "gemm/executors.h"

namespace xd::gemm::cuda {

extern const Executor kExecutor;

}  // namespace xd::gemm::cuda
