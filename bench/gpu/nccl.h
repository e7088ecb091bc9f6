// The baseline: NCCL's all-to-all, from a library found at run time.
#pragma once

#include <string>

#include "rank.h"

namespace bench::gpu {

// The reason why there is no baseline, or empty; and NCCL's version. Looks for libnccl.so.2 at
// XD_NCCL_LIB (the library or its folder), where the loader finds it, and in Python's nvidia.nccl.
struct NcclState {
  std::string unavailable;
  std::string version;
};
const NcclState& nccl_state();

// Seconds in which every rank sends `bytes_per_peer` to each other one by ncclSend and ncclRecv in
// one group: the maximum over the ranks, on rank 0. The communicator is made at the first call and
// serves all that follow with as many ranks. Needs a device per rank. Collective.
std::vector<double> measure_nccl(const RankContext& context, std::size_t bytes_per_peer);

}  // namespace bench::gpu
