// The arguments of a layer's passes after their checks.
#pragma once

#include <crossdock/moe.h>

#include "ep/bulk/group.h"
#include "ep/experts/gated.h"
#include "ep/experts/grouped.h"

namespace xd::moe {

// The experts of this rank, and how their rows go through them.
struct Experts {
  int count = 0;  // L
  Tensor offsets;
  ep::Matrices w_in, w_out;  // none where L = 0
  xd_gated_activation activation = XD_GATED_SILU;
  int near_ranks = 1;

  std::int64_t ffn() const { return w_out.rows; }
};

struct Schedule {
  int parts = 0;  // 0 = serial, on the caller's stream
  int num_sms = 0;
};

struct ForwardCall {
  ep::PlanBytes plan;
  Schedule schedule;
  Experts experts;
  // The caller's, for the group's operations, which read them by themselves.
  const DLTensor *tokens, *topk_weights, *recv_tokens, *recv_weights, *expert_out, *out;
  // Of recv_tokens, inner, activated, expert_out and out.
  Tensor rows, inner, activated, results, sums;
};

struct BackwardCall {
  ep::PlanBytes plan;
  Schedule schedule;
  Experts experts;
  const DLTensor *grad_out, *recv_weights, *expert_out, *grad_expert_out, *grad_recv_weights;
  const DLTensor *grad_recv_tokens, *grad_tokens, *grad_topk_weights;
  Tensor rows, inner, activated;
  Tensor grad_results, grad_activated, grad_inner, grad_rows;
  Tensor sums, weight_sums;            // of grad_tokens and grad_topk_weights
  ep::Matrices grad_w_in, grad_w_out;  // data = nullptr: not wanted
  bool accumulate = false;
};

// Each throws INVALID_ARGUMENT.
ForwardCall read_forward(const xd_moe_forward_args* args, const ep::Group& group);
BackwardCall read_backward(const xd_moe_backward_args* args, const ep::Group& group);

// The parts that a call names, for one that fails before it has been read: 0 where that number
// cannot be read or is out of bounds.
int parts_of(const xd_moe_forward_args* args, const ep::Group& group);
int parts_of(const xd_moe_backward_args* args, const ep::Group& group);

// The operations' arguments, in one part or whole (0).
xd_ep_dispatch_args dispatch_args(const ForwardCall& call, int part);
xd_ep_combine_args combine_args(const ForwardCall& call, int part);
xd_ep_combine_bwd_args combine_bwd_args(const BackwardCall& call, int part);
xd_ep_dispatch_bwd_args dispatch_bwd_args(const BackwardCall& call, int part);

}  // namespace xd::moe
