// One rank's group, plan and tensors of a workload, and the library's operations on them.
#pragma once

#include <crossdock/ep.h>

#include <cstddef>
#include <vector>

#include "ranks.h"
#include "routing.h"
#include "tensor.h"
#include "workload.h"

namespace bench {

class EpCalls {
 public:
  // Collective. `traffic` is this rank's; it and the workload outlive the object. Staged tensors
  // lie in ordinary memory.
  EpCalls(const Workload& workload, const Traffic& traffic, int rank, xd_comm* comm, bool staged);

  // Bytes that its tensors take of the communicator's heap.
  static std::size_t heap_bytes(const Workload& workload, const Traffic& traffic, bool staged);

  void prepare();
  void dispatch();
  void combine();  // the experts return their rows unchanged
  void dispatch_bwd();
  void combine_bwd();

  xd_ep_group* group() const { return group_.get(); }
  const void* tokens() const { return tokens_.data(); }
  std::uint64_t recv_checksum() const;
  std::uint64_t out_checksum() const;

 private:
  struct alignas(64) PlanUnit {
    std::byte bytes[64];
  };
  template <class Args>
  Args with_plan(Args args);

  const Workload& w_;
  const Traffic& traffic_;
  Matrix topk_idx_, tokens_, out_, recv_;
  Group group_;
  std::vector<PlanUnit> plan_;
};

}  // namespace bench
