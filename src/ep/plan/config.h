// A group's sizes, validated, with every default filled in: those that groups of both kinds have,
// and those of the groups of ep.h. ep/slots/config.h has those of low latency.
#pragma once

#include <crossdock/ep.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/options.h"
#include "base/tensor.h"
#include "ep/plan/expert_map.h"
#include "ep/plan/parts.h"
#include "ep/plan/quantise.h"
#include "ep/plan/receive_layout.h"
#include "ep/plan/wire_format.h"

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

// The sizes that groups of both kinds have.
struct CommonConfig {
  int ranks = 0;
  int experts = 0;
  int logical_experts = 0;  // the ids that a router gives are theirs; 0 = the experts' own
  ExpertTables expert_tables;
  // Of this rank; where no rank is meant, the largest number of any.
  int local_experts = 0;
  int max_topk = 0;
  int max_tokens = 0;
  std::uint64_t max_row_bytes = 0;
  bool collapse = false;           // duplicate ids are not bad
  bool fatal_errors = false;       // errors finish the communicator
  int device_type = 0;             // as given
  int num_sms = 0;                 // multiprocessors; 0 = chosen by the library
  std::uint32_t wire_formats = 0;  // bits of the wires that combine may have

  // The most ranks that hold rows of one token, and so the most partial sums it can have.
  int most_cells_per_token() const { return std::min(max_topk, ranks); }
  const ExpertMap& map() const { return expert_tables.map(); }
  // The number of ids that a router chooses among.
  int num_ids() const { return logical_experts > 0 ? logical_experts : experts; }
  // Bytes of the longest partial sum of combine on its way.
  std::uint64_t max_wire_bytes() const { return longest_wire_row(wire_formats, max_row_bytes); }
  // Of any rank. Sizes that ranks must agree about follow from it.
  int most_local_experts() const { return expert_tables.most_local_experts(); }
};

struct Config : CommonConfig {
  std::uint64_t max_scale_bytes = 0;  // bytes of scales that callers give
  Layout layout = Layout::of(XD_EP_EXPERT_MAJOR);
  std::int64_t alignment = 1;  // alignment of plans: the largest, and the default
  std::int64_t capacity = 0;   // this rank's, as configured
  xd_ep_overflow overflow = XD_EP_OVERFLOW_ERROR;
  bool staging = true;
  // True if any rank stages. Until the ranks have agreed: whether this one does.
  bool any_staging = true;
  bool zero_tail = false;
  bool outlives_losses = false;        // XD_EP_PEER_LOSS_RESUME
  Keeps keeps;                         // as the executor says
  std::uint64_t net_buffer_bytes = 0;  // of links to all other machines; 0 = usual frames

  // The most rows that one rank can have here.
  std::uint64_t rows_per_source() const {
    return static_cast<std::uint64_t>(max_tokens) *
           static_cast<std::uint64_t>(std::min(max_topk, most_local_experts()));
  }
  // The parts that a plan may have.
  int most_parts() const {
    return layout.has_zones ? std::clamp(expert_tables.least_local_experts(), 1, kMaxParts) : 1;
  }
  // True if some executor pushes sums of this rank's rows to the tokens' ranks, for which plans
  // have room: also in RANK_MAJOR where peers cannot read the rows, or sums have another form.
  bool pushes_sums() const { return layout.row_per_expert || staging || wire_formats != 0; }
  // Bytes per row of staged scales, which callers give or dispatch makes.
  std::uint64_t scale_room() const {
    return std::max(max_scale_bytes, quantised_scale_bytes(max_row_bytes));
  }
  // Values per receive row in a weights tensor.
  std::uint64_t weights_per_row() const {
    return static_cast<std::uint64_t>(layout.weights_per_row(max_topk));
  }
};

// The fields that xd_ep_config and xd_ll_config have both.
struct CommonFields {
  std::int32_t num_ranks, num_experts, max_topk, max_tokens_per_rank, hidden;
  DLDataType dtype;
  std::int32_t duplicate_ids, on_error;  // enumerators, if they are good
  std::int32_t num_sms, device_type;
  const std::int32_t* expert_ranks;
  std::uint32_t wire_formats;
  std::int64_t num_logical_experts;

  template <class User>
  static CommonFields of(const User& user) {
    return {user.num_ranks,
            user.num_experts,
            user.max_topk,
            user.max_tokens_per_rank,
            user.hidden,
            user.dtype,
            raw_enum(user.duplicate_ids),
            raw_enum(user.on_error),
            user.num_sms,
            user.device_type,
            user.expert_ranks,
            user.wire_formats,
            user.num_logical_experts};
  }
};

// The types of rows that a kind of groups takes, and their names for texts.
struct Payloads {
  std::span<const DType> types;
  std::string_view names;
};

// Validates a config, which is not that of one rank. `comm_ranks` = 0 where there is no
// communicator: config.num_ranks must then be set. Throws INVALID_ARGUMENT naming the field, what
// was expected and what came.
Config read_config(const xd_ep_config* user, int comm_ranks);
CommonConfig read_common(const CommonFields& user, int comm_ranks, const Payloads& payloads);

// Reads the wire of a call. Throws INVALID_ARGUMENT unless it is SAME or one of the config's.
WireFormat read_wire(const xd_ep_wire& given, const CommonConfig& config);
// Throws INVALID_ARGUMENT unless rows of so many columns fit the wire.
void require_wire_fits(const WireFormat& wire, const char* tensor, std::int64_t columns);

// Throws UNSUPPORTED if combine may have another wire than SAME, which no group on CUDA devices of
// several machines has so far.
void require_no_wires(const CommonConfig& config);

// Throws INVALID_ARGUMENT unless the group has logical experts.
void require_logical_experts(const CommonConfig& config);

// Throws INVALID_ARGUMENT unless the group outlives the loss of ranks.
void require_outlives_losses(const Config& config);
// Throws UNSUPPORTED if it does, which no group on CUDA devices does so far.
void require_no_resume(const Config& config);

// Throws INVALID_ARGUMENT, naming config.<field>, unless the value is within the bounds.
void require_range(const char* field, std::int64_t value, std::int64_t low, std::int64_t high);

// The smallest capacity that no routing of so many tokens per rank can overflow, on any rank.
std::int64_t recv_bound(const CommonConfig& sizes, int tokens_per_rank, const Layout& layout,
                        std::int64_t alignment);
// The same for all tokens that a group of `config` may have.
inline std::int64_t recv_bound(const Config& config) {
  return recv_bound(config, config.max_tokens, config.layout, config.alignment);
}

}  // namespace xd::ep
