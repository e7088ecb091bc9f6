// The sizes of a group of low latency, validated, with every default filled in.
#pragma once

#include <crossdock/low_latency.h>

#include <cstddef>

#include "ep/plan/config.h"

namespace xd::ep {

struct LlConfig : CommonConfig {
  int in_flight = 0;              // operations of a kind between their halves
  bool masks_lost_peers = false;  // the loss of a rank is not fatal
  int wait_timeout_ms = 0;        // 0 = the communicator's
};

// As read_config().
LlConfig read_ll_config(const xd_ll_config* user, int comm_ranks);

std::size_t plan_size(const LlConfig& config);

}  // namespace xd::ep
