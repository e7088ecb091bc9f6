// The CPU executor: every operation has finished when its call returns.
#pragma once

#include "gemm/executors.h"

namespace xd::gemm::cpu {

extern const Executor kExecutor;

}  // namespace xd::gemm::cpu
