// crossdock-bench ep --device cuda.
#pragma once

#include "../workload.h"

namespace bench::gpu {

// Returns the exit code: 0 if every case was measured and right.
int run_on_cuda(const Options& options);

}  // namespace bench::gpu
