// The operations' arguments after their checks. These are all checks that need neither the plan nor
// any tensor's content, so every executor shares them. Each read_* throws INVALID_ARGUMENT.
#pragma once

#include <crossdock/ep.h>

#include <cstddef>

#include "ep/plan/call.h"

namespace xd::ep {

struct PrepareCall {
  Tensor topk_idx;
  std::byte* plan;
  int alignment;  // alignment of the plan
  int parts;      // of the plan, at least 1
  Tensor counts, padded_counts, offsets, total, rank_rows;
  Tensor replica_hint;
};
PrepareCall read_prepare(const xd_ep_prepare_args* args, const CallContext& context);

// The fields of operations on a plan that say how much of it is done, and with what.
struct Portion {
  int part = 0;     // 0 = all
  int num_sms = 0;  // 0 = as the group
};

// Whether the caller's struct has `part`, which came together with num_sms. Where structs of older
// callers ended with padding, `part` lies there.
template <class Args>
bool has_part(const Args& args) {
  return args.struct_size >= offsetof(Args, num_sms) + sizeof(args.num_sms);
}

struct DispatchCall {
  PlanBytes plan;
  Portion portion;
  Tensor tokens, scales, topk_weights;
  Tensor recv_tokens, recv_scales, recv_weights, recv_topk_idx;
  xd_ep_quantise quantise = XD_EP_QUANTISE_NONE;
};
DispatchCall read_dispatch(const xd_ep_dispatch_args* args, const CallContext& context);

struct CombineCall {
  PlanBytes plan;
  Portion portion;
  Tensor expert_out, weights, out;
  WireFormat wire{};
};
CombineCall read_combine(const xd_ep_combine_args* args, const CallContext& context);

struct DispatchBwdCall {
  PlanBytes plan;
  Portion portion;
  Tensor grad_recv_tokens, grad_recv_weights;
  Tensor grad_tokens, grad_topk_weights;
};
DispatchBwdCall read_dispatch_bwd(const xd_ep_dispatch_bwd_args* args, const CallContext& context);

struct CombineBwdCall {
  PlanBytes plan;
  Portion portion;
  Tensor grad_out, grad_out_scales, expert_out, weights;
  Tensor grad_expert_out, grad_expert_out_scales, grad_weights;
};
CombineBwdCall read_combine_bwd(const xd_ep_combine_bwd_args* args, const CallContext& context);

}  // namespace xd::ep
