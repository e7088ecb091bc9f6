// The operations of crossdock/low_latency.h on buffers that have their names.
#pragma once

#include <crossdock/crossdock.h>

#include <cstdint>
#include <optional>

#include "../arguments.h"
#include "operands.h"

namespace xdjax {

// The family of low latency, which runs on groups of its own.
struct LowLatency {
  using Handle = xd_ll_group;
  using Config = xdpy::Given<xd_ll_config>;
  static constexpr const char* word = "group";
  static constexpr const char* init = "crossdock.jax.init";

  // The operations of custom calls.
  enum class Operation : std::uint8_t { dispatch, combine, mask_get, mask_set, reset };

  // A rank that is masked, or not any more.
  struct Mask {
    std::int32_t rank = -1;
    bool masked = false;
  };

  // The arguments of a call beside buffers. Each number is for some operations.
  struct Numbers {
    xd_ep_quantise quantise = XD_EP_QUANTISE_NONE;  // how dispatch quantises
    xd_ep_wire wire = XD_EP_WIRE_SAME;              // of combine
    std::int32_t max_tokens = 0;                    // of a rank in this dispatch, without slots
    xd_ll_phase phase = XD_LL_PHASE_BOTH;           // the half of dispatch or combine
    Mask mask;
  };

  static xd_status create(xd_comm* comm, const Config& config, Handle** group);
  static constexpr auto set_placement = &xd_ll_group_set_placement;
  static xd_status fail_set_placement(Handle* group, const char* text) {
    return xd_ll_join_failed(group, XD_LL_SET_PLACEMENT, text, nullptr);
  }
  static xd_status destroy(Handle* group) { return xd_ll_group_destroy(group); }

  // Whether a recorded command buffer may do again what a call does: masks are set, and ranks
  // brought back into step, once.
  static bool replayable(Operation operation);

  // Runs `operation`, which on CUDA means that it is enqueued on `stream`. Tensors that `operands`
  // lacks are absent in the call.
  static xd_status run(Operation operation, const Numbers& numbers, Handle* group,
                       const Operands& operands, xd_stream stream);

  // Fails the operation on all ranks; nothing for calls, and second halves, that no peer waits for.
  static std::optional<xd_status> fail(Operation operation, const Numbers& numbers, Handle* group,
                                       const char* text, xd_stream stream);
};

}  // namespace xdjax
