// The sizes of a group of low latency, validated, with every default filled in.
#pragma once

#include <crossdock/low_latency.h>

#include <cstddef>
#include <cstdint>

#include "ep/plan/config.h"

namespace xd::ep {

constexpr const char* receive_name(xd_ll_receive form) {
  switch (form) {
    case XD_LL_BY_EXPERT:
      return "BY_EXPERT";
    case XD_LL_BY_RANK:
      return "BY_RANK";
    default:
      return "SLOTS";
  }
}

struct LlConfig : CommonConfig {
  int in_flight = 0;              // operations of a kind between their halves
  bool masks_lost_peers = false;  // the loss of a rank is not fatal
  int wait_timeout_ms = 0;        // 0 = the communicator's
  xd_ll_receive receive = XD_LL_SLOTS;
  std::int64_t alignment = 1;  // of zones, in rows

  bool has_slots() const { return receive == XD_LL_SLOTS; }
  bool by_rank() const { return receive == XD_LL_BY_RANK; }
};

// As read_config().
LlConfig read_ll_config(const xd_ll_config* user, int comm_ranks);

std::size_t plan_size(const LlConfig& config);

// The rows that tensors of a call of so many tokens per rank need (0 = the config's): none in
// groups with slots. Throws INVALID_ARGUMENT where the number of tokens is out of bounds.
std::int64_t recv_bound(const LlConfig& config, std::int32_t max_tokens);

}  // namespace xd::ep
