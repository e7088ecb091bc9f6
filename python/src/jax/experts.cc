#include "experts.h"

namespace xdjax {
namespace {

using Operation = Experts::Operation;

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
  return xd_ep_group_create(comm, config.get(), group);
}

std::optional<xd_status> Experts::fail(Operation operation, const Numbers& /*numbers*/,
                                       Handle* group, const char* text, xd_stream stream) {
  return xd_ep_join_failed(group, turn_of(operation), text, stream);
}

xd_status Experts::run(Operation operation, const Numbers& numbers, Handle* group,
                       const Operands& operands, xd_stream stream) {
  switch (operation) {
    case Operation::prepare: {
      auto args = args_of<xd_ep_prepare_args>(operands);
      args.alignment = numbers.alignment;
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
  }
  return XD_ERROR_INTERNAL;
}

}  // namespace xdjax
