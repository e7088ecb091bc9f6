// A shared library that uses the group of its process, and makes contexts for others.
#include "compat/te/library.h"

#include <crossdock/compat/te_ep.h>

namespace xd::test {

xd_ep_group* group_seen_by_library() { return crossdock::te::ep_group(); }

NVTECommGemmCtx* context_of_library(xd_comm* comm, int num_ranks, int rank) {
  return nvte_comm_gemm_ctx_create(crossdock::te::as_nccl(comm), num_ranks, rank);
}

}  // namespace xd::test
