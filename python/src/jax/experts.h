// The operations of crossdock/ep.h and moe.h on buffers that have their names.
#pragma once

#include <crossdock/crossdock.h>

#include <cstdint>
#include <optional>

#include "../arguments.h"
#include "operands.h"

namespace xdjax {

// The family of expert parallelism, which runs on groups.
struct Experts {
  using Handle = xd_ep_group;
  using Config = xdpy::Given<xd_ep_config>;
  static constexpr const char* word = "group";
  static constexpr const char* init = "crossdock.jax.init";

  // The operations of custom calls.
  enum class Operation : std::uint8_t {
    prepare,
    dispatch,
    combine,
    dispatch_bwd,
    combine_bwd,
    moe_forward,
    moe_backward,
  };

  // The arguments of a call beside buffers. Each number is for the operations that it names.
  struct Numbers {
    std::int32_t alignment = 0;                     // of the plan that prepare makes
    xd_ep_quantise quantise = XD_EP_QUANTISE_NONE;  // how dispatch quantises
    xd_ep_wire wire = XD_EP_WIRE_SAME;              // of combine
    // Of the plan that prepare makes, or the schedule of moe_forward and moe_backward.
    std::int32_t parts = 0;
    std::int32_t num_sms = 0;                        // of the latter two
    xd_gated_activation activation = XD_GATED_SILU;  // likewise
  };

  static xd_status create(xd_comm* comm, const Config& config, Handle** group);
  static constexpr auto set_placement = &xd_ep_group_set_placement;
  static xd_status fail_set_placement(Handle* group, const char* text) {
    return xd_ep_join_failed(group, XD_EP_SET_PLACEMENT, text, nullptr);
  }
  static xd_status destroy(Handle* group) { return xd_ep_group_destroy(group); }

  // Whether a recorded command buffer may do again what a call does.
  static bool replayable(Operation) { return true; }

  // Runs `operation`, which on CUDA means that it is enqueued on `stream`. Tensors that `operands`
  // lacks are absent in the call.
  static xd_status run(Operation operation, const Numbers& numbers, Handle* group,
                       const Operands& operands, xd_stream stream);

  // Fails the operation on all ranks.
  static std::optional<xd_status> fail(Operation operation, const Numbers& numbers, Handle* group,
                                       const char* text, xd_stream stream);
};

}  // namespace xdjax
