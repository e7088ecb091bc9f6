// The baselines: NCCL's all-to-all and its collectives, from a library found at run time.
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

struct ncclComm;  // NCCL's

// Collectives of whole tensors, on the communicator that measure_nccl() makes. Needs a device per
// rank, and open memory. `count` is that of ncclAllGather, ncclReduceScatter and
// ncclAllReduce: elements of one rank, or for the last of all.
class NcclCollectives {
 public:
  // Collective.
  explicit NcclCollectives(const Rank& at);

  void all_gather(const void* in, void* out, std::size_t count, Element element) const;
  void reduce_scatter(const void* in, void* out, std::size_t count, Element element) const;
  void all_reduce(const void* in, void* out, std::size_t count, Element element) const;

 private:
  ncclComm* const comm_;
  const xd_stream stream_;
};

// Seconds in which every rank sends `bytes_per_peer` to each other one by ncclSend and ncclRecv in
// one group: the maximum over the ranks, on rank 0. The communicator is made at the first call and
// serves all that follow with as many ranks. Needs a device per rank. Collective.
std::vector<double> measure_nccl(const RankContext& at, std::size_t bytes_per_peer);

}  // namespace bench::gpu
