// The operations of low latency as a family that takes turns (turn/family.h), as ep/bulk/family.h
// has those of ep.h.
#pragma once

#include <crossdock/low_latency.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/rank_bits.h"
#include "comm/operations.h"
#include "ep/family.h"
#include "ep/slots/record.h"

namespace xd::ep {

// The names of the C functions without xd_, in the order of xd_ll_operation.
inline constexpr const char* kLlOperationNames[] = {"ll_dispatch", "ll_combine", "ll_reset"};

// Numbers beside the text of an operation error.
struct LlFacts {
  std::int64_t bad_ids = 0;        // INVALID_ARGUMENT only, where bad ids are the mistake
  RankBits masked{}, masked_by{};  // PEER_LOST only
};

inline constexpr Operations::Rare kLlRareOperations[] = {
    {XD_LL_SET_PLACEMENT, "ll_group_set_placement"}};

struct LlFamily {
  using Record = LlRecord;
  using Facts = LlFacts;
  using Status = xd_ll_status;

  static constexpr CollectiveCall kCreate{"xd_ll_group_create"};
  static constexpr Operations kOperations{.prefix = "xd_",
                                          .type = "an xd_ll_operation",
                                          .first = XD_LL_DISPATCH,
                                          .names = kLlOperationNames,
                                          .first_pipeline = XD_LL_DISPATCH,
                                          .rare = kLlRareOperations};

  static constexpr bool same_operation(const LlRecord& a, const LlRecord& b) {
    return ep::same_operation(a, b);
  }
  static std::string difference(const LlRecord& mine, const LlRecord& theirs);

  static constexpr Status no_error() { return XD_LL_STATUS_INIT; }
  static void tell(const turn::OperationError<LlFamily>& operation_error, Status& status) {
    tell_masks(operation_error.facts.masked, operation_error.facts.masked_by, status);
  }
  static void tell_masks(const RankBits& masked, const RankBits& masked_by, Status& status) {
    std::ranges::copy(masked.word, status.masked);
    std::ranges::copy(masked_by.word, status.masked_by);
  }
  // A group's status counts the bad ids of all its batches instead.
  static void tell_caller(const turn::OperationError<LlFamily>& operation_error, Status& status) {
    status.bad_ids = operation_error.facts.bad_ids;
  }
};

using LlOperationError = turn::OperationError<LlFamily>;

// `lost`: the ranks that an operation was to be carried out with, and was not. `gone`: those that
// the communicator knows to have ended or left.
struct LostPeers {
  RankBits lost, masked, masked_by, gone{};
};
LlOperationError lost_peers(const LostPeers& peers);

// A change of the table of slots while so many dispatches of this rank are between their halves.
LlOperationError busy_with_halves(std::int64_t dispatches, int rank);

}  // namespace xd::ep
