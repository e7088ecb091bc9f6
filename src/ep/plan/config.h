// A group's sizes, validated, with every default filled in.
#pragma once

#include <crossdock/ep.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/tensor.h"
#include "ep/plan/expert_map.h"
#include "ep/plan/quantise.h"
#include "ep/plan/receive_layout.h"

namespace xd::ep {

inline constexpr int kMaxTopk = XD_EP_MAX_TOPK;
inline constexpr int kMaxRanks = XD_MAX_RANKS;
inline constexpr int kMaxExperts = XD_EP_MAX_EXPERTS;
static_assert(kRowAlignment == XD_EP_ROW_ALIGNMENT);

// The receive rows that a plan has out of a capacity: whole multiples of its alignment, which is a
// power of two.
constexpr std::int64_t whole_rows(std::int64_t capacity, std::int64_t alignment) {
  return capacity & ~(alignment - 1);
}

// The parts of every batch that a group's executor keeps on one rank. The layouts of group memory
// and of plans follow from them.
struct Keeps {
  // EXPERT_MAJOR: which of this rank's rows are one token's, so that a row crosses once for all.
  bool lists = false;
  // Where the partial sum of each token with rows here goes: this rank sends it home itself.
  bool items = false;
  // Peers push the partial sums of this rank's tokens here.
  bool partials = false;
  // Rows are announced chunk by chunk while an operation runs.
  bool chunks = false;
};

struct Config {
  int ranks = 0;
  int experts = 0;
  ExpertTables expert_tables;
  // Of this rank; where no rank is meant, the largest number of any.
  int local_experts = 0;
  int max_topk = 0;
  int max_tokens = 0;
  std::uint64_t max_row_bytes = 0;
  std::uint64_t max_scale_bytes = 0;  // bytes of scales that callers give
  Layout layout = Layout::of(XD_EP_EXPERT_MAJOR);
  std::int64_t alignment = 1;  // alignment of plans: the largest, and the default
  std::int64_t capacity = 0;   // this rank's, as configured
  xd_ep_overflow overflow = XD_EP_OVERFLOW_ERROR;
  bool collapse = false;      // duplicate ids are not bad
  bool fatal_errors = false;  // errors finish the communicator
  bool staging = true;
  // True if any rank stages. Until the ranks have agreed: whether this one does.
  bool any_staging = true;
  bool zero_tail = false;
  int device_type = 0;                 // as given
  Keeps keeps;                         // as the executor says
  int num_sms = 0;                     // multiprocessors; 0 = chosen by the library
  std::uint64_t net_buffer_bytes = 0;  // of links to all other machines; 0 = usual slots
  // EXPERT_SLOTS only:
  int in_flight = 0;              // operations of a kind between their halves
  bool masks_lost_peers = false;  // the loss of a rank is not fatal
  int wait_timeout_ms = 0;        // 0 = the communicator's

  // The most ranks that hold rows of one token, and so the most partial sums it can have.
  int max_slots_per_token() const { return std::min(max_topk, ranks); }
  const ExpertMap& map() const { return expert_tables.map(); }
  // Of any rank. Sizes that ranks must agree about follow from it.
  int most_local_experts() const { return expert_tables.most_local_experts(); }

  // The most rows that one rank can have here.
  std::uint64_t rows_per_source() const {
    return static_cast<std::uint64_t>(max_tokens) *
           static_cast<std::uint64_t>(std::min(max_topk, most_local_experts()));
  }
  // Bytes per row of staged scales, which callers give or dispatch makes.
  std::uint64_t scale_room() const {
    return std::max(max_scale_bytes, quantised_scale_bytes(max_row_bytes));
  }
  // Values per receive row in a weights tensor.
  std::uint64_t weights_per_row() const {
    return static_cast<std::uint64_t>(layout.weights_per_row(max_topk));
  }
};

// Validates a config, which is not that of one rank. `comm_ranks` = 0 where there is no
// communicator: config.num_ranks must then be set. Throws INVALID_ARGUMENT naming the field, what
// was expected and what came.
Config read_config(const xd_ep_config* user, int comm_ranks);

// True if a config asks for EXPERT_SLOTS. It may be bad all the same: read_config() says so.
bool asks_for_slots(const xd_ep_config* user);

// The smallest capacity that no routing can overflow, on any rank.
std::int64_t recv_bound(const Config& config);

}  // namespace xd::ep
