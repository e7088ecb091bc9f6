// A group's sizes, validated, with every default filled in.
#pragma once

#include <crossdock/ep.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace xd::ep {

inline constexpr int kMaxTopk = 32;
inline constexpr int kMaxRanks = 1024;
inline constexpr int kMaxExperts = 65536;
inline constexpr std::uint64_t kRowAlignment = 16;   // payload rows are a multiple of it
inline constexpr std::int64_t kQuantiseBlock = 128;  // columns per scale of a quantised row

struct Config {
  int ranks = 0;
  int experts = 0;
  int local_experts = 0;
  int max_topk = 0;
  int max_tokens = 0;
  std::uint64_t max_row_bytes = 0;
  std::uint64_t max_scale_bytes = 0;
  xd_ep_layout layout = XD_EP_EXPERT_MAJOR;
  std::int64_t alignment = 1;
  std::int64_t capacity = 0;  // this rank's
  xd_ep_overflow overflow = XD_EP_OVERFLOW_ERROR;
  bool staging = true;
  bool zero_tail = false;

  bool expert_major() const { return layout == XD_EP_EXPERT_MAJOR; }
  // EXPERT_MAJOR with staging: this rank knows which of its rows are one token's, so that a staged
  // row crosses once for all of them.
  bool keeps_lists() const { return expert_major() && staging; }
  // The most rows that one rank can have here.
  std::uint64_t rows_per_source() const {
    return static_cast<std::uint64_t>(max_tokens) *
           static_cast<std::uint64_t>(std::min(max_topk, local_experts));
  }
  // Values per receive row in a weights tensor.
  std::uint64_t weights_per_row() const {
    return expert_major() ? 1 : static_cast<std::uint64_t>(max_topk);
  }
};

// Validates. `comm_ranks` = 0 where there is no communicator: config.num_ranks must then be set.
// Throws INVALID_ARGUMENT naming the field, what was expected and what came.
Config read_config(const xd_ep_config* user, int comm_ranks);

// The smallest capacity that no routing can overflow.
std::int64_t recv_bound(const Config& config);

}  // namespace xd::ep
