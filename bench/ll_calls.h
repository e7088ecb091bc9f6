// One rank's group, plan and tensors of a low-latency batch, and the library's operations on them.
#pragma once

#include <crossdock/low_latency.h>

#include "ep_calls.h"
#include "rank.h"

namespace bench {

class LlCalls {
 public:
  // Collective. All arguments outlive the object. `sets`: of plans and outputs.
  LlCalls(const Workload& workload, const Rank& at, const EpInputs& inputs, int sets = 1);

  // Experts return their rows unchanged, in their place.
  void dispatch(xd_ll_phase phase = XD_LL_PHASE_BOTH, int set = 0);
  void dispatch_fp8(xd_ll_phase phase = XD_LL_PHASE_BOTH);
  void combine(xd_ll_phase phase = XD_LL_PHASE_BOTH, int set = 0);
  // Partial sums cross as codes.
  void combine_fp8(xd_ll_phase phase = XD_LL_PHASE_BOTH);

  // Throws if an operation of this rank has failed on the device. The stream must have come to
  // rest.
  void check_status() const;
  xd_ll_memory memory() const;

  const Tensor& recv() const { return recv_; }                // [L,S,H], or [N,H]
  const Tensor& recv_fp8() const { return recv_fp8_; }        // likewise
  const Tensor& counts() const { return counts_; }            // [L]
  const Tensor& row_offsets() const { return row_offsets_; }  // where rows have no slots
  const Tensor& out() const { return out_; }                  // [T,H]

 private:
  void use(int set);

  const Rank& at_;
  const xd_ll_config config_;
  const Tensor recv_, recv_fp8_, scales_, counts_, row_offsets_, recv_topk_idx_, out_;
  LlGroup group_;
  const std::size_t plan_bytes_;
  const Memory plans_;
  xd_ll_dispatch_args dispatch_ = XD_LL_DISPATCH_ARGS_INIT;
  xd_ll_combine_args combine_ = XD_LL_COMBINE_ARGS_INIT;
};

}  // namespace bench
