// The CUDA executor: every operation is a kernel on the caller's stream.
#pragma once

#include "ep/executors.h"

namespace xd::ep::cuda {

extern const Executor kExecutor;

}  // namespace xd::ep::cuda
