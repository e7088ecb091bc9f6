// Expert parallelism as a family of operations that take turns (turn/family.h): its records and how
// two of them compare, and its non-fatal errors, in words that are the same on every executor.
#pragma once

#include <crossdock/ep.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/rank_bits.h"
#include "ep/bulk/wire.h"
#include "ep/plan/config.h"
#include "ep/slots/record.h"
#include "turn/setback.h"

namespace xd::ep {

// The names of the C functions without their prefix, in the order of xd_ep_operation.
inline constexpr const char* kOperationNames[] = {"prepare",      "dispatch",    "combine",
                                                  "dispatch_bwd", "combine_bwd", "ll_dispatch",
                                                  "ll_combine",   "ll_reset"};

inline constexpr CollectiveCall kCreateGroup{"xd_ep_group_create"};

// Numbers beside the text of a setback.
struct Facts {
  std::int64_t bad_ids = 0;      // INVALID_ARGUMENT only, where bad ids are the mistake
  std::int64_t needed_rows = 0;  // OVERFLOW only, with its capacity
  std::int64_t capacity_rows = 0;
  RankBits masked{}, masked_by{};  // PEER_LOST only
};

struct Family {
  using Record = ep::Record;
  using Facts = ep::Facts;
  using Status = xd_ep_status;

  static constexpr Operations kOperations{"xd_ep_", "an xd_ep_operation", XD_EP_PREPARE,
                                          kOperationNames, XD_EP_LL_DISPATCH};

  static constexpr bool same_operation(const Record& a, const Record& b) {
    return ep::same_operation(a, b);
  }
  static std::string difference(const Record& mine, const Record& theirs);
  // Operations of EXPERT_SLOTS have records of their own.
  static constexpr bool same_operation(const LlRecord& a, const LlRecord& b) {
    return ep::same_operation(a, b);
  }
  static std::string difference(const LlRecord& mine, const LlRecord& theirs);

  static constexpr Status no_error() { return XD_EP_STATUS_INIT; }
  static void tell(const turn::Setback<Family>& setback, Status& status) {
    status.needed_rows = setback.facts.needed_rows;
    status.capacity_rows = setback.facts.capacity_rows;
    tell_masks(setback.facts.masked, setback.facts.masked_by, status);
  }
  static void tell_masks(const RankBits& masked, const RankBits& masked_by, Status& status) {
    std::ranges::copy(masked.word, status.masked);
    std::ranges::copy(masked_by.word, status.masked_by);
  }
  // A group's status counts the bad ids of all its plans instead.
  static void tell_caller(const turn::Setback<Family>& setback, Status& status) {
    status.bad_ids = setback.facts.bad_ids;
  }
};

using Setback = turn::Setback<Family>;

struct Overflow {
  int rank;  // the lowest rank that overflows
  std::int64_t needed_rows, capacity_rows;
};
Setback overflow(const Overflow& overflow);

// `lost`: the ranks that an operation was to be carried out with, and was not. `gone`: those that
// the communicator knows to have ended or left.
struct LostPeers {
  RankBits lost, masked, masked_by, gone{};
};
Setback lost_peers(const LostPeers& peers);

Setback bad_expert_ids(std::int64_t bad_ids, int lowest_rank, const Config& config);

}  // namespace xd::ep
