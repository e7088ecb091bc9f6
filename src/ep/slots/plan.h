// The plan of low latency: routing of one batch as plain bytes, as in ep/plan/plan.h.
//
//   PlanHeader layout = ll_layout(), alignment = the group's; recv_rows = total_rows = the sum of
//              all counts, or where rows lie without gaps the end of the last zone; list_rows =
//              number of items; capacity = S; epoch = number of the dispatch
//   LlPlanFacts
//   count[L]  int32: rows per local expert
//   home[T]   RankBits: the ranks that hold rows of this rank's token t
//   item[]    LlItem, K rows, K weights: each (source rank, token) with rows here, in any order
//
// The checksum covers what lies in front of home[]; what lies behind is checked when it is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/rank_bits.h"
#include "ep/plan/plan.h"
#include "ep/plan/plan_check.h"
#include "ep/slots/config.h"

namespace xd::ep {

// The facts about another rank's token that a rank has; behind it lie int32 row[K] and float
// weight[K]. A row is row_of_slot(), or a row of [N,H], or -1 where the choice is not this rank's;
// BY_RANK the first has the one row of all. Ranks also send their items to the owners of the rows,
// with the local expert of each choice in place of the row.
struct LlItem {
  std::uint32_t source_token;  // source rank << 16 | token
  std::uint32_t place;         // of this rank's partial sum at the source: partial_place()

  static constexpr std::uint32_t name(int source, std::int64_t token) {
    return static_cast<std::uint32_t>(source) << 16 | static_cast<std::uint32_t>(token);
  }
  constexpr int source() const { return static_cast<int>(source_token >> 16); }
  constexpr int token() const { return static_cast<int>(source_token & 0xFFFF); }

  std::int32_t* rows() { return reinterpret_cast<std::int32_t*>(this + 1); }
  const std::int32_t* rows() const { return reinterpret_cast<const std::int32_t*>(this + 1); }
  float* weights(int topk) { return reinterpret_cast<float*>(rows() + topk); }
  const float* weights(int topk) const { return reinterpret_cast<const float*>(rows() + topk); }
};

// A checked plan in the caller's memory.
class LlPlanView {
 public:
  // Throws INVALID_ARGUMENT unless the bytes are a whole, undamaged plan of this library version;
  // see ep/plan/plan_check.h.
  static LlPlanView open(const void* plan, std::size_t bytes);

  // Throws INVALID_ARGUMENT unless the plan belongs to this rank and to a group of these sizes, and
  // is within its bounds.
  void require_binding(const PlanTerms& terms) const;

  const PlanHeader& header() const { return header_; }
  const LlPlanFacts& facts() const { return facts_; }
  int tokens() const { return header_.tokens; }
  int topk() const { return header_.topk; }
  const RankBits& home(std::int64_t token) const { return home_[token]; }
  std::int64_t items() const { return header_.list_rows; }
  const LlItem& item(std::int64_t i) const {
    return *reinterpret_cast<const LlItem*>(items_ + static_cast<std::uint64_t>(i) *
                                                         ll_item_bytes(header_.topk));
  }

 private:
  PlanHeader header_{};
  LlPlanFacts facts_{};
  const RankBits* home_ = nullptr;
  const std::byte* items_ = nullptr;
};

// The values that plans of a group must agree with, on one rank. `hosts`: HostMap::fingerprint().
PlanTerms terms_of(const LlConfig& config, int rank, std::uint64_t hosts);

// The fingerprint of a dispatch's batch: equal on all ranks, and another for every other batch.
constexpr std::uint64_t ll_fingerprint(std::uint64_t group_nonce, std::uint64_t epoch) {
  return hash_combine(hash_combine(1, group_nonce), epoch);
}

}  // namespace xd::ep
