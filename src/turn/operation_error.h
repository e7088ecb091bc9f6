// An operation error: a non-fatal error of one operation, on its way to the caller and into the
// status.
#pragma once

#include <crossdock/status.h>

#include <array>
#include <cstddef>
#include <new>
#include <span>
#include <string>

#include "base/error.h"
#include "turn/entry.h"
#include "turn/family.h"

namespace xd::turn {

template <class Family>
struct OperationError {
  xd_status status = XD_SUCCESS;
  std::string text;
  int rank = -1;  // the lowest rank that it is about
  typename Family::Facts facts{};
  bool met_by_all = false;  // every rank meets an error of its own in this operation

  explicit operator bool() const { return status != XD_SUCCESS; }
};

// The exception in flight, as an operation error of `rank`'s own call. Call it inside a catch
// block.
template <class Family>
OperationError<Family> current_operation_error(int rank) noexcept {
  std::array<char, 1024> text;
  OperationError<Family> operation_error;
  operation_error.status = caught(text).status;
  operation_error.rank = rank;
  try {
    operation_error.text = text.data();
  } catch (const std::bad_alloc&) {
    operation_error.text = "(no memory)";  // short enough to fit into the string itself
  }
  return operation_error;
}

// The difference of `theirs` from `mine` in words; empty if there is none.
template <class Family, class Record>
std::string difference(const Record& mine, const Record& theirs) {
  if (theirs.call.status != XD_SUCCESS) {
    return concat("its call failed with ", status_name(theirs.call.status),
                  " (its own error text says why)");
  }
  if (theirs.call.operation != mine.call.operation) {
    return concat("operation ", Family::kOperations.name(theirs.call.operation), ", here ",
                  Family::kOperations.name(mine.call.operation));
  }
  return Family::same_operation(mine, theirs) ? "" : Family::difference(mine, theirs);
}

// The disagreement between one operation's records, as `rank` sees it; none if all agree. Ranks for
// which takes_part(rank) is false have no record.
template <class Family, class Record, class TakesPart>
OperationError<Family> disagreement(std::span<const Record> records, int rank,
                                    TakesPart&& takes_part) {
  OperationError<Family> found;
  const auto self = static_cast<std::size_t>(rank);
  for (std::size_t r = 0; r < records.size(); ++r) {
    if (r == self || !takes_part(static_cast<int>(r))) continue;
    const std::string what = difference<Family>(records[self], records[r]);
    if (what.empty()) continue;
    if (!found) {
      found.status = XD_ERROR_MISMATCH;
      found.text = "ranks disagree";
      found.rank = static_cast<int>(r);
      found.met_by_all = true;
    }
    found.text += concat("; rank ", r, ": ", what);
  }
  return found;
}
template <class Family>
OperationError<Family> disagreement(std::span<const typename Family::Record> records, int rank) {
  return disagreement<Family, typename Family::Record>(records, rank, [](int) { return true; });
}

}  // namespace xd::turn
