#include "experts.h"

namespace xdjax {
namespace {

using Operation = Experts::Operation;
using Numbers = Experts::Numbers;

xd_status prepare(const Numbers& numbers, xd_ep_group* group, const Operands& operands,
                  xd_stream stream) {
  xd_ep_prepare_args args XD_EP_PREPARE_ARGS_INIT;
  args.topk_idx = operands.find("topk_idx");
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.alignment = numbers.alignment;
  args.counts = operands.find("counts");
  args.padded_counts = operands.find("padded_counts");
  args.offsets = operands.find("offsets");
  args.total = operands.find("total");
  args.rank_rows = operands.find("rank_rows");
  return xd_ep_prepare(group, &args, stream);
}

xd_status dispatch(const Numbers& numbers, xd_ep_group* group, const Operands& operands,
                   xd_stream stream) {
  xd_ep_dispatch_args args XD_EP_DISPATCH_ARGS_INIT;
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.tokens = operands.find("tokens");
  args.scales = operands.find("scales");
  args.topk_weights = operands.find("topk_weights");
  args.recv_tokens = operands.find("recv_tokens");
  args.recv_scales = operands.find("recv_scales");
  args.recv_weights = operands.find("recv_weights");
  args.recv_topk_idx = operands.find("recv_topk_idx");
  args.quantise = numbers.quantise;
  return xd_ep_dispatch(group, &args, stream);
}

xd_status combine(xd_ep_group* group, const Operands& operands, xd_stream stream) {
  xd_ep_combine_args args XD_EP_COMBINE_ARGS_INIT;
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.expert_out = operands.find("expert_out");
  args.weights = operands.find("weights");
  args.out = operands.find("out");
  return xd_ep_combine(group, &args, stream);
}

xd_status dispatch_bwd(xd_ep_group* group, const Operands& operands, xd_stream stream) {
  xd_ep_dispatch_bwd_args args XD_EP_DISPATCH_BWD_ARGS_INIT;
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.grad_recv_tokens = operands.find("grad_recv_tokens");
  args.grad_recv_weights = operands.find("grad_recv_weights");
  args.grad_tokens = operands.find("grad_tokens");
  args.grad_topk_weights = operands.find("grad_topk_weights");
  return xd_ep_dispatch_bwd(group, &args, stream);
}

xd_status combine_bwd(xd_ep_group* group, const Operands& operands, xd_stream stream) {
  xd_ep_combine_bwd_args args XD_EP_COMBINE_BWD_ARGS_INIT;
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.grad_out = operands.find("grad_out");
  args.expert_out = operands.find("expert_out");
  args.weights = operands.find("weights");
  args.grad_expert_out = operands.find("grad_expert_out");
  args.grad_weights = operands.find("grad_weights");
  return xd_ep_combine_bwd(group, &args, stream);
}

xd_status ll_dispatch(const Numbers& numbers, xd_ep_group* group, const Operands& operands,
                      xd_stream stream) {
  xd_ep_ll_dispatch_args args XD_EP_LL_DISPATCH_ARGS_INIT;
  args.phase = numbers.phase;
  args.tokens = operands.find("tokens");
  args.topk_idx = operands.find("topk_idx");
  args.topk_weights = operands.find("topk_weights");
  args.quantise = numbers.quantise;
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.recv_tokens = operands.find("recv_tokens");
  args.recv_scales = operands.find("recv_scales");
  args.counts = operands.find("counts");
  return xd_ep_ll_dispatch(group, &args, stream);
}

xd_status ll_combine(const Numbers& numbers, xd_ep_group* group, const Operands& operands,
                     xd_stream stream) {
  xd_ep_ll_combine_args args XD_EP_LL_COMBINE_ARGS_INIT;
  args.phase = numbers.phase;
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.expert_out = operands.find("expert_out");
  args.topk_weights = operands.find("topk_weights");
  args.out = operands.find("out");
  return xd_ep_ll_combine(group, &args, stream);
}

xd_status ll_mask_get(xd_ep_group* group, const Operands& operands, xd_stream stream) {
  return xd_ep_ll_mask_get(group, operands.find("mask"), stream);
}

// The program is that of all ranks: the rank that is masked has nothing to do.
xd_status ll_mask_set(const Numbers& numbers, xd_ep_group* group, const Operands& operands,
                      xd_stream stream) {
  const Experts::Mask& mask = numbers.mask;
  if (mask.rank == operands.rank()) return XD_SUCCESS;
  return xd_ep_ll_mask_set(group, mask.rank, mask.masked ? 1 : 0, stream);
}

// The operation of the library whose turn a call takes on all ranks; none for calls that peers do
// not hear of.
std::optional<xd_ep_operation> turn_of(Operation operation) {
  switch (operation) {
    case Operation::prepare:
      return XD_EP_PREPARE;
    case Operation::dispatch:
      return XD_EP_DISPATCH;
    case Operation::combine:
      return XD_EP_COMBINE;
    case Operation::dispatch_bwd:
      return XD_EP_DISPATCH_BWD;
    case Operation::combine_bwd:
      return XD_EP_COMBINE_BWD;
    case Operation::ll_dispatch:
      return XD_EP_LL_DISPATCH;
    case Operation::ll_combine:
      return XD_EP_LL_COMBINE;
    case Operation::ll_mask_get:
    case Operation::ll_mask_set:
    case Operation::ll_reset:
      break;
  }
  return std::nullopt;
}

}  // namespace

xd_status Experts::create(xd_comm* comm, const Config& config, Handle** group) {
  const xd_ep_config fields = config.get();
  return xd_ep_group_create(comm, &fields, group);
}

bool Experts::replayable(Operation operation) { return turn_of(operation).has_value(); }

std::optional<xd_status> Experts::fail(Operation operation, const Numbers& numbers, Handle* group,
                                       const char* text, xd_stream stream) {
  const std::optional<xd_ep_operation> turn = turn_of(operation);
  if (!turn || numbers.phase == XD_EP_PHASE_RECEIVE) return std::nullopt;
  return xd_ep_join_failed(group, *turn, text, stream);
}

xd_status Experts::run(Operation operation, const Numbers& numbers, Handle* group,
                       const Operands& operands, xd_stream stream) {
  switch (operation) {
    case Operation::prepare:
      return prepare(numbers, group, operands, stream);
    case Operation::dispatch:
      return dispatch(numbers, group, operands, stream);
    case Operation::combine:
      return combine(group, operands, stream);
    case Operation::dispatch_bwd:
      return dispatch_bwd(group, operands, stream);
    case Operation::combine_bwd:
      return combine_bwd(group, operands, stream);
    case Operation::ll_dispatch:
      return ll_dispatch(numbers, group, operands, stream);
    case Operation::ll_combine:
      return ll_combine(numbers, group, operands, stream);
    case Operation::ll_mask_get:
      return ll_mask_get(group, operands, stream);
    case Operation::ll_mask_set:
      return ll_mask_set(numbers, group, operands, stream);
    case Operation::ll_reset:
      return xd_ep_ll_reset(group, stream);
  }
  return XD_ERROR_INTERNAL;
}

}  // namespace xdjax
