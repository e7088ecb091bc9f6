#include "ep/slots/family.h"

#include <string>
#include <vector>

#include "base/rank_list.h"

namespace xd::ep {

std::string LlFamily::difference(const LlRecord& mine, const LlRecord& theirs) {
  if (theirs.fingerprint != mine.fingerprint) {
    return mine.call.operation == XD_LL_COMBINE ? "a plan of another batch" : kOtherTable;
  }
  if (theirs.dtype != mine.dtype) return type_differs(theirs.dtype, mine.dtype);
  if (theirs.row_bytes != mine.row_bytes) {
    return differs_in("row bytes", theirs.row_bytes, mine.row_bytes);
  }
  if (theirs.topk != mine.topk) return differs_in("top-k", theirs.topk, mine.topk);
  if (theirs.quantise != mine.quantise) {
    if (mine.call.operation == XD_LL_COMBINE) return wire_differs(theirs.quantise, mine.quantise);
    const LlScales their_scales = LlScales::of(theirs.quantise), own = LlScales::of(mine.quantise);
    if (!their_scales && !own) return quantise_differs(quantise_of(theirs), quantise_of(mine));
    if (!their_scales) return "without scales, here with them";
    if (!own) return "with scales, here without";
    if (their_scales.columns != own.columns) {
      return differs_in("columns of scales", their_scales.columns, own.columns);
    }
    return differs_in("bytes of a scale", their_scales.element, own.element);
  }
  if (theirs.max_tokens != mine.max_tokens) {
    return differs_in("max_tokens", theirs.max_tokens, mine.max_tokens);
  }
  return (theirs.flags & kWeighted) != 0 ? "with weights, here without"
                                         : "without weights, here with them";
}

LlOperationError lost_peers(const LostPeers& peers) {
  std::vector<int> gone, masking, late;
  int lowest = -1;
  for (int r = RankBits::kMostRanks - 1; r >= 0; --r) {
    if (!peers.lost.has(r)) continue;
    lowest = r;
    auto& why = peers.gone.has(r) ? gone : peers.masked_by.has(r) ? masking : late;
    why.insert(why.begin(), r);
  }
  std::string text;
  const auto tell = [&](const std::vector<int>& ranks, const char* one, const char* several) {
    if (ranks.empty()) return;
    text += concat(text.empty() ? "" : ", ", rank_list(ranks), ranks.size() == 1 ? one : several);
  };
  tell(gone, " has ended or left", " have ended or left");
  tell(masking, " has masked this rank", " have masked this rank");
  tell(late, " is late", " are late");
  return {.status = XD_ERROR_PEER_LOST,
          .text = text + ": masked from now on; the outputs lack what comes from there",
          .rank = lowest,
          .facts = {.masked = peers.masked, .masked_by = peers.masked_by}};
}

LlOperationError busy_with_halves(std::int64_t dispatches, int rank) {
  return {
      .status = XD_ERROR_BUSY,
      .text = concat(dispatches,
                     " dispatches are between their halves, expected none; peers do not hear of "
                     "this call"),
      .rank = rank};
}

}  // namespace xd::ep
