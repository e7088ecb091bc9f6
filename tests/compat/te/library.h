// A shared library, compiled by itself with hidden symbols: what it sees of its process, and makes.
#pragma once

#include <crossdock/compat/te_comm_gemm.h>
#include <crossdock/ep.h>

namespace xd::test {

// The group behind TransformerEngine's functions.
XD_API xd_ep_group* group_seen_by_library();

// A context of products, which any translation unit may use and destroy. Collective.
XD_API NVTECommGemmCtx* context_of_library(xd_comm* comm, int num_ranks, int rank);

}  // namespace xd::test
