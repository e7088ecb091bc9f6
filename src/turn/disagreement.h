// The comparison of the records of one operation, on the host: a MISMATCH names every rank that
// does something else than this one. Kernels compare them themselves (turn/device/turn.cuh, and
// ep/slots/cuda/turn.cuh for low latency); the host puts into words what they have found.
#pragma once

#include <crossdock/status.h>

#include <cstddef>
#include <span>
#include <string>

#include "base/error.h"
#include "turn/entry.h"
#include "turn/operation_error.h"

namespace xd::turn {

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
