#include "operations.h"

namespace xdjax {
namespace {

xd_status prepare(xd_ep_group* group, const Operands& operands, xd_stream stream) {
  xd_ep_prepare_args args XD_EP_PREPARE_ARGS_INIT;
  args.topk_idx = operands.find("topk_idx");
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.alignment = operands.alignment();
  args.counts = operands.find("counts");
  args.padded_counts = operands.find("padded_counts");
  args.offsets = operands.find("offsets");
  args.total = operands.find("total");
  args.rank_rows = operands.find("rank_rows");
  return xd_ep_prepare(group, &args, stream);
}

xd_status dispatch(xd_ep_group* group, const Operands& operands, xd_stream stream) {
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
  args.quantise = operands.quantise();
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

xd_status ll_dispatch(xd_ep_group* group, const Operands& operands, xd_stream stream) {
  xd_ep_ll_dispatch_args args XD_EP_LL_DISPATCH_ARGS_INIT;
  args.phase = operands.phase();
  args.tokens = operands.find("tokens");
  args.topk_idx = operands.find("topk_idx");
  args.topk_weights = operands.find("topk_weights");
  args.quantise = operands.quantise();
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.recv_tokens = operands.find("recv_tokens");
  args.recv_scales = operands.find("recv_scales");
  args.counts = operands.find("counts");
  return xd_ep_ll_dispatch(group, &args, stream);
}

xd_status ll_combine(xd_ep_group* group, const Operands& operands, xd_stream stream) {
  xd_ep_ll_combine_args args XD_EP_LL_COMBINE_ARGS_INIT;
  args.phase = operands.phase();
  args.plan = operands.data("plan");
  args.plan_bytes = operands.bytes("plan");
  args.expert_out = operands.find("expert_out");
  args.topk_weights = operands.find("topk_weights");
  args.out = operands.find("out");
  return xd_ep_ll_combine(group, &args, stream);
}

}  // namespace

xd_status run(xd_ep_operation operation, xd_ep_group* group, const Operands& operands,
              xd_stream stream) {
  switch (operation) {
    case XD_EP_PREPARE:
      return prepare(group, operands, stream);
    case XD_EP_DISPATCH:
      return dispatch(group, operands, stream);
    case XD_EP_COMBINE:
      return combine(group, operands, stream);
    case XD_EP_DISPATCH_BWD:
      return dispatch_bwd(group, operands, stream);
    case XD_EP_COMBINE_BWD:
      return combine_bwd(group, operands, stream);
    case XD_EP_LL_DISPATCH:
      return ll_dispatch(group, operands, stream);
    case XD_EP_LL_COMBINE:
      return ll_combine(group, operands, stream);
    case XD_EP_LL_RESET:
      break;
  }
  return XD_ERROR_INTERNAL;
}

}  // namespace xdjax
