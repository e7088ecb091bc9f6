#include "ep/verdict.h"

#include "base/error.h"
#include "base/math.h"
#include "comm/fatal.h"

namespace xd::ep {
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
  const bool prepares = mine.operation == XD_EP_PREPARE;
  if (theirs.row_bytes != mine.row_bytes) {
    return of(prepares ? "alignment" : "row bytes", theirs.row_bytes, mine.row_bytes);
  }
  if (theirs.extra != mine.extra) {
    if (prepares) return of("top-k", theirs.extra, mine.extra);
    const ScaleRow a = ScaleRow::of(theirs.extra), b = ScaleRow::of(mine.extra);
    if (a.quantise != b.quantise) {
      return of("quantise", quantise_name(a.quantise), quantise_name(b.quantise));
    }
    return of("scale row bytes", a.bytes, b.bytes);
  }
  if (shared_flags(theirs) != shared_flags(mine)) return "another set of optional tensors";
  return "";
}

}  // namespace

Setback disagreement(std::span<const Record> records, int rank) {
  Setback found;
  for (std::size_t r = 0; r < records.size(); ++r) {
    if (r == at(rank)) continue;
    const std::string what = difference(records[at(rank)], records[r]);
    if (what.empty()) continue;
    if (!found) {
      found = {.status = XD_ERROR_MISMATCH, .text = "ranks disagree", .rank = static_cast<int>(r)};
      found.met_by_all = true;
    }
    found.text += concat("; rank ", r, ": ", what);
  }
  return found;
}

Setback overflow(const Overflow& o) {
  return {.status = XD_ERROR_OVERFLOW,
          .text = concat("rank ", o.rank, " would receive ", o.needed_rows,
                         " rows, expected at most its recv_capacity = ", o.capacity_rows,
                         "; no row has moved"),
          .rank = o.rank,
          .needed_rows = o.needed_rows,
          .capacity_rows = o.capacity_rows,
          .met_by_all = true};
}

Setback bad_expert_ids(std::int64_t bad_ids, int lowest_rank, int experts) {
  return {.status = XD_ERROR_INVALID_ARGUMENT,
          .text = concat(
              "topk_idx: ", bad_ids, " expert ids over all ranks (the lowest rank with some is ",
              lowest_rank, ") are out of range or repeated in a row, expected -1 or 0 to ",
              experts - 1, " and each expert once; they count as -1 and the plan is usable"),
          .rank = lowest_rank,
          .bad_ids = bad_ids,
          .met_by_all = true};
}

}  // namespace xd::ep
