// The config of the group that a workload needs, on every device.
#pragma once

#include <crossdock/ep.h>

#include <algorithm>

#include "routing.h"
#include "workload.h"

namespace bench {

inline xd_ep_config group_config(const Workload& w, const Traffic& traffic, DLDataType dtype,
                                 bool staged) {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = w.ranks;
  config.num_experts = w.experts;
  config.max_topk = w.topk;
  config.max_tokens_per_rank = std::max(w.tokens, 1);
  config.hidden = w.hidden;
  config.dtype = dtype;
  config.layout = w.layout == Layout::expert ? XD_EP_EXPERT_MAJOR : XD_EP_RANK_MAJOR;
  config.alignment = w.alignment;
  config.recv_capacity = traffic.recv_capacity;
  config.staging = staged ? XD_EP_STAGING_AUTO : XD_EP_STAGING_NONE;
  return config;
}

}  // namespace bench
