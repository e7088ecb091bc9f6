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

// The operation of the library whose turn a call takes on all ranks.
xd_ep_operation turn_of(Operation operation) {
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
      break;
  }
  return XD_EP_COMBINE_BWD;
}

}  // namespace

xd_status Experts::create(xd_comm* comm, const Config& config, Handle** group) {
  const xd_ep_config fields = config.get();
  return xd_ep_group_create(comm, &fields, group);
}

std::optional<xd_status> Experts::fail(Operation operation, const Numbers& /*numbers*/,
                                       Handle* group, const char* text, xd_stream stream) {
  return xd_ep_join_failed(group, turn_of(operation), text, stream);
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
  }
  return XD_ERROR_INTERNAL;
}

}  // namespace xdjax
