// One rank's group, plan and tensors of a workload, and the library's operations on them.
#pragma once

#include <crossdock/ep.h>

#include <cstddef>
#include <optional>

#include "device.h"
#include "ranks.h"
#include "routing.h"
#include "workload.h"

namespace bench {

enum class Operation { prepare, dispatch, combine, dispatch_bwd, combine_bwd };
inline constexpr const char* kOperationNames[] = {"prepare", "dispatch", "combine", "dispatch_bwd",
                                                  "combine_bwd"};
inline const char* name_of(Operation operation) {
  return kOperationNames[static_cast<int>(operation)];
}

// The tensors that a rank dispatches. Its tokens, and the scales of fp8 tokens, are zeros at first;
// weights are there only if the workload has some.
struct EpInputs {
  EpInputs(const Workload& workload, const Traffic& traffic, xd_comm* symmetric_in,
           const ComputeDevice& device, int copies = 1);
  Tensor topk_idx, tokens, scales, topk_weights;
};

class EpCalls {
 public:
  // All arguments outlive the object, and `traffic` is this rank's. Staged tensors lie in ordinary
  // memory. Needs open().
  EpCalls(const Workload& workload, const Traffic& traffic, const EpInputs& inputs, xd_comm* comm,
          const ComputeDevice& device, bool staged, int recv_copies = 1, int sets = 1);

  // Bytes that its tensors and its inputs take of the communicator's heap, if they are not staged.
  static std::size_t heap_bytes(const Workload& workload, const Traffic& traffic,
                                int token_copies = 1, int recv_copies = 1, int sets = 1);

  // Makes a group, with this budget of multiprocessors or, for 0, the library's, and a plan.
  // Collective.
  void open(int num_sms = 0);

  // Calls an operation; `copy` is that of its tensors, and `set` of plan and combined tokens.
  // Experts return their rows unchanged.
  void call(Operation operation, int copy = 0, int set = 0);

  xd_ep_group* group() const { return group_.get(); }
  xd_ep_memory group_memory() const;
  const Tensor& recv() const { return recv_; }
  // The rows that an operation writes, dispatch or combine_bwd.
  const Tensor& received_by(Operation operation) const {
    return w_.is_scaled() && operation == Operation::combine_bwd ? grad_expert_out_ : recv_;
  }
  const Tensor& recv_scales() const { return recv_scales_; }
  const Tensor& out() const { return out_; }
  const Tensor& recv_weights() const { return recv_weights_; }
  const Tensor& grad_weights() const { return grad_weights_; }
  const Tensor& grad_topk_weights() const { return grad_topk_weights_; }
  std::size_t recv_bytes() const;  // of rows in use

 private:
  template <class Args>
  Args with_plan(Args args) const;
  void prepare();
  void dispatch(int copy);
  void combine(int copy);
  void dispatch_bwd(int copy);
  void combine_bwd(int copy);

  const Workload& w_;
  const Traffic& traffic_;
  const EpInputs& in_;
  xd_comm* const comm_;
  const ComputeDevice& device_;
  const bool staged_;
  const Tensor recv_, recv_scales_, out_;
  // Weighted batches have these, the middle two where combine multiplies by weights.
  const Tensor recv_weights_, grad_expert_out_, grad_weights_, grad_topk_weights_;
  xd_ep_config config_ = XD_EP_CONFIG_INIT;
  Group group_;
  std::size_t plan_bytes_ = 0;
  std::optional<Memory> plans_;  // one for each set, with room for their alignment
  int set_ = 0;                  // of the call
};

}  // namespace bench
