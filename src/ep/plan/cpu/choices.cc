#include "ep/plan/cpu/choices.h"

#include <algorithm>

#include "base/math.h"

namespace xd::ep::cpu {

Choices read_choices(const Tensor& topk_idx, const CommonConfig& config, ChoicesMemory& memory) {
  const CountLayout layout{config.experts, config.ranks};
  const std::int64_t topk = topk_idx.cols, num_choices = topk_idx.rows * topk;
  std::vector<std::uint32_t>& counts = memory.counts;
  std::vector<std::uint32_t>& seen = memory.seen;
  std::ranges::fill(counts, 0);
  std::ranges::fill(seen, 0);
  counts[layout.tokens()] = static_cast<std::uint32_t>(topk_idx.rows);
  for (std::int64_t i = 0; i < num_choices; ++i) {
    const auto mark = static_cast<std::uint32_t>(i / topk) + 1;  // tells this token's marks apart
    const std::int64_t id = topk_idx.type == DType::i64 ? topk_idx.as<std::int64_t>()[i]
                                                        : topk_idx.as<std::int32_t>()[i];
    memory.experts[at(i)] = Choices::kNone;
    if (id == -1) continue;
    const bool inside = id >= 0 && id < config.experts;
    const int physical_expert = inside ? config.map().physical_expert_of(static_cast<int>(id)) : -1;
    if (!inside || seen[at(physical_expert)] == mark) {
      if (!inside || !config.collapse) ++counts[layout.bad_ids()];
      continue;
    }
    const int rank = config.map().rank_at(physical_expert);
    seen[at(physical_expert)] = mark;
    memory.experts[at(i)] = static_cast<std::uint32_t>(physical_expert);
    ++counts[layout.expert(physical_expert)];
    std::uint32_t& rank_seen = seen[at(config.experts + rank)];
    if (rank_seen != mark) ++counts[layout.rank(rank)];
    rank_seen = mark;
  }
  return {.experts = std::span(memory.experts).first(at(num_choices)),
          .counts = counts,
          .topk = static_cast<int>(topk)};
}

}  // namespace xd::ep::cpu
