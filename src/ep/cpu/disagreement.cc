// The check that all ranks do the same thing: what makes one operation's records unequal, in words.
#include "base/error.h"
#include "ep/cpu/lockstep.h"

namespace xd::ep::cpu {
namespace {

// Flags that must be equal.
std::uint8_t shared_flags(const Record& record) {
  return static_cast<std::uint8_t>(record.flags & ~kWideIndices);
}

// What `theirs` does otherwise than `mine`; empty if nothing.
std::string difference(const Record& mine, const Record& theirs) {
  const auto of = [](const char* what, const auto& a, const auto& b) {
    return concat(what, " ", a, ", here ", b);
  };
  if (theirs.status != XD_SUCCESS) {
    return concat("its call failed with ", status_name(static_cast<xd_status>(theirs.status)),
                  " (its own error text says why)");
  }
  if (theirs.operation != mine.operation) {
    return of("operation", operation_name(theirs.operation), operation_name(mine.operation));
  }
  if (theirs.fingerprint != mine.fingerprint) return "a plan of another batch";
  if (theirs.dtype != mine.dtype) {
    return of("type", dtype_name(static_cast<DType>(theirs.dtype)),
              dtype_name(static_cast<DType>(mine.dtype)));
  }
  if (theirs.row_bytes != mine.row_bytes) return of("row bytes", theirs.row_bytes, mine.row_bytes);
  if (theirs.extra != mine.extra) {
    return of(mine.operation == XD_EP_PREPARE ? "top-k" : "scale row bytes", theirs.extra,
              mine.extra);
  }
  if (shared_flags(theirs) != shared_flags(mine)) {
    return "another set of optional tensors, or quantises where this rank does not";
  }
  return "";
}

}  // namespace

Setback disagreement(const Lockstep& lockstep, int rank, int ranks) {
  Setback found;
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    const std::string what = difference(lockstep.record_of(rank), lockstep.record_of(r));
    if (what.empty()) continue;
    if (!found) found = {.status = XD_ERROR_MISMATCH, .text = "ranks disagree", .rank = r};
    found.text += concat("; rank ", r, ": ", what);
  }
  return found;
}

}  // namespace xd::ep::cpu
