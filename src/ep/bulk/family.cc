#include "ep/bulk/family.h"

#include <algorithm>
#include <string>
#include <utility>

namespace xd::ep {

namespace {

// The optional tensors that one side alone has been given, of those in the records' flags.
std::string of_optional(int theirs, int mine) {
  const std::pair<int, const char*> named[] = {{kHasScales, "scales"},
                                               {kHasWeights, "weights"},
                                               {kHasIndices, "indices"},
                                               {kHasRows, "rows"},
                                               {kHasGradWeights, "gradients of weights"}};
  std::string text;
  for (const auto& [flag, name] : named) {
    if (((theirs ^ mine) & flag) == 0) continue;
    text += concat(text.empty() ? "" : "; ", (theirs & flag) != 0 ? "with " : "without ", name,
                   (mine & flag) != 0 ? ", here with them" : ", here without");
  }
  // Of scales that both have, one has bytes and the other float32.
  return text.empty()
             ? differs_in("scales of", (theirs & kByteScales) != 0 ? "one byte" : "float32",
                          (mine & kByteScales) != 0 ? "one byte" : "float32")
             : text;
}

}  // namespace

std::string Family::difference(const Record& mine, const Record& theirs) {
  const bool prepares = mine.call.operation == XD_EP_PREPARE;
  if (theirs.fingerprint != mine.fingerprint) {
    if (prepares || mine.call.operation == XD_EP_SET_PLACEMENT) return kOtherTable;
    if (((theirs.fingerprint ^ mine.fingerprint) & ~kPartBits) != 0)
      return "a plan of another batch";
    return differs_in("part", theirs.fingerprint & kPartBits, mine.fingerprint & kPartBits);
  }
  if (theirs.dtype != mine.dtype) return type_differs(theirs.dtype, mine.dtype);
  if (theirs.row_bytes != mine.row_bytes) {
    return differs_in(prepares ? "alignment" : "row bytes", theirs.row_bytes, mine.row_bytes);
  }
  if (theirs.extra != mine.extra) {
    if (prepares) {
      const ChoiceShape a = ChoiceShape::of(theirs.extra), b = ChoiceShape::of(mine.extra);
      if (a.topk != b.topk) return differs_in("top-k", a.topk, b.topk);
      return differs_in("parts", std::max(a.parts, 1), std::max(b.parts, 1));
    }
    if (mine.call.operation == XD_EP_COMBINE) return wire_differs(theirs.extra, mine.extra);
    const ScaleRow a = ScaleRow::of(theirs.extra), b = ScaleRow::of(mine.extra);
    if (a.quantise != b.quantise) {
      return quantise_differs(a.quantise, b.quantise);
    }
    return differs_in("scale row bytes", a.bytes, b.bytes);
  }
  return of_optional(theirs.flags, mine.flags);
}

OperationError overflow(const Overflow& o) {
  return {.status = XD_ERROR_OVERFLOW,
          .text = concat("rank ", o.rank, " would receive ", o.needed_rows,
                         " rows, expected at most its recv_capacity = ", o.capacity_rows,
                         "; no row has moved"),
          .rank = o.rank,
          .facts = {.needed_rows = o.needed_rows, .capacity_rows = o.capacity_rows},
          .met_by_all = true};
}

}  // namespace xd::ep
