// Which algorithms the CPU has for an operation, which one a call takes, and what it should cost.
// Pure functions.
#pragma once

#include "gemm/calls.h"
#include "gemm/config.h"

namespace xd::gemm::cpu {

// What a rank does in a microsecond.
struct Speed {
  double flops;  // of products
  double copied_bytes;
};

// Why the CPU has no such algorithm for an operation; nullptr if it has.
const char* obstacle(xd_gemm_operation operation, xd_gemm_algo algo);

// The algorithm that a call takes. Throws UNSUPPORTED.
xd_gemm_algo choose(const Config& config, const ProductCall& call);

xd_gemm_plan_info explain(const Config& config, const ProductCall& call, const Speed& speed,
                          int rank);

}  // namespace xd::gemm::cpu
