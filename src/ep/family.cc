#include "ep/family.h"

#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/rank_list.h"

namespace xd::ep {

namespace {

template <class A, class B>
std::string of(const char* what, const A& theirs, const B& mine) {
  return concat(what, " ", theirs, ", here ", mine);
}

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
  return text.empty() ? of("scales of", (theirs & kByteScales) != 0 ? "one byte" : "float32",
                           (mine & kByteScales) != 0 ? "one byte" : "float32")
                      : text;
}

std::string of_type(std::uint8_t theirs, std::uint8_t mine) {
  return of("type", dtype_name(static_cast<DType>(theirs)), dtype_name(static_cast<DType>(mine)));
}

}  // namespace

std::string Family::difference(const LlRecord& mine, const LlRecord& theirs) {
  if (theirs.fingerprint != mine.fingerprint) return "a plan of another batch";
  if (theirs.dtype != mine.dtype) return of_type(theirs.dtype, mine.dtype);
  if (theirs.row_bytes != mine.row_bytes) return of("row bytes", theirs.row_bytes, mine.row_bytes);
  if (theirs.topk != mine.topk) return of("top-k", theirs.topk, mine.topk);
  if (theirs.quantise != mine.quantise) {
    return of("quantise", quantise_name(static_cast<xd_ep_quantise>(theirs.quantise)),
              quantise_name(static_cast<xd_ep_quantise>(mine.quantise)));
  }
  return of_optional(theirs.flags, mine.flags);
}

std::string Family::difference(const Record& mine, const Record& theirs) {
  if (theirs.fingerprint != mine.fingerprint) return "a plan of another batch";
  if (theirs.dtype != mine.dtype) return of_type(theirs.dtype, mine.dtype);
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
  return of_optional(theirs.flags, mine.flags);
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

Setback lost_peers(const LostPeers& peers) {
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

Setback bad_expert_ids(std::int64_t bad_ids, int lowest_rank, const Config& config) {
  return {.status = XD_ERROR_INVALID_ARGUMENT,
          .text = concat("topk_idx: ", bad_ids,
                         " expert ids over all ranks (the lowest rank with some is ", lowest_rank,
                         ") are out of range", config.collapse ? "" : " or repeated in a row",
                         ", expected -1 or 0 to ", config.experts - 1,
                         config.collapse ? "" : " and each expert once",
                         "; they count as -1 and the plan is usable"),
          .rank = lowest_rank,
          .facts = {.bad_ids = bad_ids},
          .met_by_all = true};
}

}  // namespace xd::ep
