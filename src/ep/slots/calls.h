// The arguments of the operations of low latency after their checks, by halves: ep/bulk/calls.h has
// those of ep.h. Each read_* throws INVALID_ARGUMENT.
#pragma once

#include <crossdock/low_latency.h>

#include "ep/plan/call.h"
#include "ep/slots/config.h"
#include "ep/slots/slot_tensor.h"

namespace xd::ep {

using LlCallContext = CallContextOf<LlConfig>;

// The halves that a call does.
struct LlHalves {
  bool send = true, receive = true;
};

struct LlDispatchSend {
  Tensor tokens, topk_idx, topk_weights, scales;
  xd_ep_quantise quantise = XD_EP_QUANTISE_NONE;
  std::int32_t max_tokens = 0;  // as the group's default says; 0 in groups with slots
  Tensor replica_hint{};
};
struct LlDispatchReceive {
  std::byte* plan = nullptr;
  xd_ep_quantise quantise = XD_EP_QUANTISE_NONE;
  SlotTensor recv_tokens, recv_scales;
  Tensor counts, expert_load, wait_ns;
  Tensor source_ranges{}, source_tokens{};
  Tensor row_offsets{}, recv_weights{}, recv_topk_idx{};
  std::int32_t max_tokens = 0;  // as LlDispatchSend's
  bool by_rank = false;
};
struct LlCombineSend {
  PlanBytes plan;
  SlotTensor expert_out;
  Tensor topk_weights{};
  WireFormat wire{};

  // Bytes of a partial sum on its way.
  std::uint64_t sum_bytes() const {
    return wire.row_bytes(static_cast<std::uint64_t>(expert_out.cols), expert_out.row_bytes());
  }
};
struct LlCombineReceive {
  PlanBytes plan;
  Tensor out, wait_ns;
  WireFormat wire{};

  std::uint64_t sum_bytes() const {
    return wire.row_bytes(static_cast<std::uint64_t>(out.cols), out.row_bytes());
  }
};

// An args struct as this library knows it, and its halves.
template <class Args>
struct LlArgs {
  Args args;
  LlHalves halves;
};
LlArgs<xd_ll_dispatch_args> read_ll_args(const xd_ll_dispatch_args* args);
LlArgs<xd_ll_combine_args> read_ll_args(const xd_ll_combine_args* args);

LlDispatchSend read_ll_send(const xd_ll_dispatch_args& args, const LlCallContext& context);
LlDispatchReceive read_ll_receive(const xd_ll_dispatch_args& args, const LlCallContext& context);
LlCombineSend read_ll_send(const xd_ll_combine_args& args, const LlCallContext& context);
LlCombineReceive read_ll_receive(const xd_ll_combine_args& args, const LlCallContext& context);

// An output of xd_ll_mask_get.
Tensor read_ll_mask(const DLTensor* mask, const LlCallContext& context);
void require_maskable(std::int32_t rank, std::int32_t masked, int own_rank, const LlConfig& config);

}  // namespace xd::ep
