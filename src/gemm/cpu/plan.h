// Which algorithms the CPU has for an operation, which one a call takes, and what it should cost.
// Pure functions.
#pragma once

#include "gemm/calls.h"
#include "gemm/config.h"

namespace xd::gemm::cpu {

// Why the CPU has no such algorithm for an operation; nullptr if it has.
const char* obstacle(xd_gemm_operation operation, xd_gemm_algo algo);

// The algorithm that a call takes, which all ranks must find alike: it depends on nothing that is a
// rank's own. Throws UNSUPPORTED.
xd_gemm_algo choose(const Config& config, const ProductCall& call);

// `flops`: floating-point operations of products that a rank does in a microsecond.
xd_gemm_plan_info explain(const Config& config, const ProductCall& call, double flops);

}  // namespace xd::gemm::cpu
