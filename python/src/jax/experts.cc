#include "experts.h"

namespace xdjax {
namespace {

using Operation = Experts::Operation;

// The operation of the library whose turn a call takes on all ranks, of a call that is one.
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
    default:
      break;
  }
  return XD_EP_COMBINE_BWD;
}

bool is_layer(Operation operation) {
  return operation == Operation::moe_forward || operation == Operation::moe_backward;
}

template <class Args>
Args layer_args(const Operands& operands, const Experts::Numbers& numbers) {
  auto args = args_of<Args>(operands);
  args.activation = numbers.activation;
  args.parts = numbers.parts;
  args.num_sms = numbers.num_sms;
  return args;
}

}  // namespace

xd_status Experts::create(xd_comm* comm, const Config& config, Handle** group) {
  return xd_ep_group_create(comm, config.get(), group);
}

std::optional<xd_status> Experts::fail(Operation operation, const Numbers& numbers, Handle* group,
                                       const char* text, xd_stream stream) {
  if (is_layer(operation)) {
    // Without its tensors the call fails in every operation that the peers wait for.
    run(operation, numbers, group, Operands({}, 0), stream);
    return std::nullopt;
  }
  return xd_ep_join_failed(group, turn_of(operation), text, stream);
}

xd_status Experts::run(Operation operation, const Numbers& numbers, Handle* group,
                       const Operands& operands, xd_stream stream) {
  switch (operation) {
    case Operation::prepare: {
      auto args = args_of<xd_ep_prepare_args>(operands);
      args.alignment = numbers.alignment;
      args.parts = numbers.parts;
      return xd_ep_prepare(group, &args, stream);
    }
    case Operation::dispatch: {
      auto args = args_of<xd_ep_dispatch_args>(operands);
      args.quantise = numbers.quantise;
      return xd_ep_dispatch(group, &args, stream);
    }
    case Operation::combine: {
      auto args = args_of<xd_ep_combine_args>(operands);
      args.wire = numbers.wire;
      return xd_ep_combine(group, &args, stream);
    }
    case Operation::dispatch_bwd: {
      const auto args = args_of<xd_ep_dispatch_bwd_args>(operands);
      return xd_ep_dispatch_bwd(group, &args, stream);
    }
    case Operation::combine_bwd: {
      const auto args = args_of<xd_ep_combine_bwd_args>(operands);
      return xd_ep_combine_bwd(group, &args, stream);
    }
    case Operation::moe_forward: {
      const auto args = layer_args<xd_moe_forward_args>(operands, numbers);
      return xd_moe_forward(group, &args, stream);
    }
    case Operation::moe_backward: {
      const auto args = layer_args<xd_moe_backward_args>(operands, numbers);
      return xd_moe_backward(group, &args, stream);
    }
  }
  return XD_ERROR_INTERNAL;
}

}  // namespace xdjax
