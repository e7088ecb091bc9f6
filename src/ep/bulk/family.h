// The operations of ep.h as a family that takes turns (turn/family.h): its records and how two of
// them compare, and its non-fatal errors, in words that are the same on every executor.
#pragma once

#include <crossdock/ep.h>

#include <cstdint>
#include <string>

#include "ep/bulk/wire.h"
#include "ep/family.h"

namespace xd::ep {

// The names of the C functions without their prefix, in the order of xd_ep_operation.
inline constexpr const char* kOperationNames[] = {"prepare", "dispatch", "combine", "dispatch_bwd",
                                                  "combine_bwd"};

// Numbers beside the text of an operation error.
struct Facts {
  std::int64_t bad_ids = 0;      // INVALID_ARGUMENT only, where bad ids are the mistake
  std::int64_t needed_rows = 0;  // OVERFLOW only, with its capacity
  std::int64_t capacity_rows = 0;
};

inline constexpr Operations::Rare kRareOperations[] = {{XD_EP_SET_PLACEMENT, "group_set_placement"},
                                                       {XD_EP_ENTER_VIEW, "group_enter_view"}};

struct Family {
  using Record = ep::Record;
  using Facts = ep::Facts;
  using Status = xd_ep_status;

  static constexpr CollectiveCall kCreate{"xd_ep_group_create"};
  static constexpr Operations kOperations{.prefix = "xd_ep_",
                                          .type = "an xd_ep_operation",
                                          .first = XD_EP_PREPARE,
                                          .names = kOperationNames,
                                          .rare = kRareOperations};

  static constexpr bool same_operation(const Record& a, const Record& b) {
    return ep::same_operation(a, b);
  }
  static std::string difference(const Record& mine, const Record& theirs);

  static constexpr Status no_error() { return XD_EP_STATUS_INIT; }
  static void tell(const turn::OperationError<Family>& operation_error, Status& status) {
    status.needed_rows = operation_error.facts.needed_rows;
    status.capacity_rows = operation_error.facts.capacity_rows;
  }
  // A group's status counts the bad ids of all its plans instead.
  static void tell_caller(const turn::OperationError<Family>& operation_error, Status& status) {
    status.bad_ids = operation_error.facts.bad_ids;
  }
};

using OperationError = turn::OperationError<Family>;

struct Overflow {
  int rank;  // the lowest rank that overflows
  std::int64_t needed_rows, capacity_rows;
};
OperationError overflow(const Overflow& overflow);

}  // namespace xd::ep
