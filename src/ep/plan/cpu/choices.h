// The first step of prepare: reads the choices of a batch's tokens and keeps those that count.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/tensor.h"
#include "comm/views/view.h"
#include "ep/plan/config.h"
#include "ep/plan/placement.h"
#include "ep/plan/slot_table.h"

namespace xd::ep::cpu {

// Views into a ChoicesMemory. The caller's tensor is read once, so that all later steps agree about
// it.
struct Choices {
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  std::span<const std::uint32_t>
      experts;  // [T][K] physical number of each choice; kNone = does not count
  std::span<const std::uint32_t> counts;  // this rank's counts, for the others (CountLayout)
  int topk = 1;
  std::int64_t unplaced =
      0;  // choices of logical experts without a slot, or on ranks that are gone
};

// Working memory, allocated with the group.
struct ChoicesMemory {
  std::vector<std::uint32_t> experts;  // [T][K] physical experts
  std::vector<std::uint32_t> counts;   // CountLayout
  std::vector<std::uint32_t> seen;     // [E + W] the token that last named an id or a rank

  template <class Visit>
  void for_each_vector(const CommonConfig& config, Visit&& visit) {
    visit(experts,
          static_cast<std::size_t>(config.max_tokens) * static_cast<std::size_t>(config.max_topk));
    visit(counts, CountLayout{config.experts, config.ranks}.size());
    visit(seen, static_cast<std::size_t>(config.experts) + static_cast<std::size_t>(config.ranks));
  }
};

// A choice counts if its id is an expert's and its token has not named that expert before. A choice
// that does not count is an error, unless its id is "none", or it is a duplicate in a group that
// collapses them. In groups with logical experts a choice needs a slot to count.
struct Router {
  const SlotTable& slots;
  const Tensor& replica_hint;  // may be absent
  // The ranks that take part; nullptr = all. Choices of experts on others have no place.
  const Members* members = nullptr;
};
Choices read_choices(const Tensor& topk_idx, const CommonConfig& config, const Router& router,
                     ChoicesMemory& memory);

}  // namespace xd::ep::cpu
