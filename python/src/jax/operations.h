// The operations of crossdock/ep.h and low_latency.h on buffers that have their names.
#pragma once

#include <crossdock/crossdock.h>

#include <cstdint>
#include <optional>

#include "operands.h"

namespace xdjax {

// What custom calls do.
enum class Operation : std::uint8_t {
  prepare,
  dispatch,
  combine,
  dispatch_bwd,
  combine_bwd,
  ll_dispatch,
  ll_combine,
  ll_mask_get,
  ll_mask_set,
  ll_reset,
};

// The operation of the library whose turn a call takes on all ranks; none for calls that peers do
// not hear of.
std::optional<xd_ep_operation> turn_of(Operation operation);

// Runs `operation`, which on CUDA means that it is enqueued on `stream`. Tensors that `operands`
// lacks are absent in the call.
xd_status run(Operation operation, xd_ep_group* group, const Operands& operands, xd_stream stream);

}  // namespace xdjax
