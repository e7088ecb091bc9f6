#include "ep/family.h"

#include "base/error.h"

namespace xd::ep {

std::string Family::difference(const Record& mine, const Record& theirs) {
  const auto of = [](const char* what, const auto& a, const auto& b) {
    return concat(what, " ", a, ", here ", b);
  };
  if (theirs.fingerprint != mine.fingerprint) return "a plan of another batch";
  if (theirs.dtype != mine.dtype) {
    return of("type", dtype_name(static_cast<DType>(theirs.dtype)),
              dtype_name(static_cast<DType>(mine.dtype)));
  }
  const bool prepares = mine.call.operation == XD_EP_PREPARE;
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
  return "another set of optional tensors";
}

Setback overflow(const Overflow& o) {
  return {.status = XD_ERROR_OVERFLOW,
          .text = concat("rank ", o.rank, " would receive ", o.needed_rows,
                         " rows, expected at most its recv_capacity = ", o.capacity_rows,
                         "; no row has moved"),
          .rank = o.rank,
          .facts = {.needed_rows = o.needed_rows, .capacity_rows = o.capacity_rows},
          .met_by_all = true};
}

Setback bad_expert_ids(std::int64_t bad_ids, int lowest_rank, int experts) {
  return {.status = XD_ERROR_INVALID_ARGUMENT,
          .text = concat(
              "topk_idx: ", bad_ids, " expert ids over all ranks (the lowest rank with some is ",
              lowest_rank, ") are out of range or repeated in a row, expected -1 or 0 to ",
              experts - 1, " and each expert once; they count as -1 and the plan is usable"),
          .rank = lowest_rank,
          .facts = {.bad_ids = bad_ids},
          .met_by_all = true};
}

}  // namespace xd::ep
