#include "ep/plan/cpu/choices.h"

#include <algorithm>

#include "base/math.h"

namespace xd::ep::cpu {
namespace {

std::uint64_t hint_of(const Tensor& hints, std::int64_t token) {
  if (!hints) return static_cast<std::uint64_t>(token);
  return hints.type == DType::i64 ? hints.as<std::uint64_t>()[token]
                                  : static_cast<std::uint64_t>(hints.as<std::int32_t>()[token]);
}

}  // namespace

Choices read_choices(const Tensor& topk_idx, const CommonConfig& config, const Router& router,
                     ChoicesMemory& memory) {
  const CountLayout layout{config.experts, config.ranks};
  const std::int64_t topk = topk_idx.cols, num_choices = topk_idx.rows * topk;
  std::vector<std::uint32_t>& counts = memory.counts;
  std::vector<std::uint32_t>& seen = memory.seen;
  std::ranges::fill(counts, 0);
  std::ranges::fill(seen, 0);
  counts[layout.tokens()] = static_cast<std::uint32_t>(topk_idx.rows);
  std::int64_t unplaced = 0;
  for (std::int64_t i = 0; i < num_choices; ++i) {
    const auto mark = static_cast<std::uint32_t>(i / topk) + 1;  // tells this token's marks apart
    const std::int64_t id = topk_idx.type == DType::i64 ? topk_idx.as<std::int64_t>()[i]
                                                        : topk_idx.as<std::int32_t>()[i];
    memory.experts[at(i)] = Choices::kNone;
    if (id == -1) continue;
    const bool inside = id >= 0 && id < config.num_ids();
    if (!inside || seen[at(id)] == mark) {
      if (!inside || !config.collapse) ++counts[layout.bad_ids()];
      continue;
    }
    seen[at(id)] = mark;
    const int physical_expert =
        config.logical_experts > 0
            ? router.slots.physical_slot_of(static_cast<int>(id),
                                            hint_of(router.replica_hint, i / topk))
            : config.map().physical_expert_of(static_cast<int>(id));
    if (physical_expert == SlotTable::kNoSlot) {
      ++unplaced;
      continue;
    }
    const int rank = config.map().rank_at(physical_expert);
    if (router.members != nullptr && !router.members->has(rank)) {
      ++unplaced;
      continue;
    }
    memory.experts[at(i)] = static_cast<std::uint32_t>(physical_expert);
    ++counts[layout.expert(physical_expert)];
    std::uint32_t& rank_seen = seen[at(config.experts + rank)];
    if (rank_seen != mark) ++counts[layout.rank(rank)];
    rank_seen = mark;
  }
  return {.experts = std::span(memory.experts).first(at(num_choices)),
          .counts = counts,
          .topk = static_cast<int>(topk),
          .unplaced = unplaced};
}

}  // namespace xd::ep::cpu
