#include "ep/plan/expert_map.h"

#include <algorithm>
#include <span>

#include "base/error.h"
#include "base/hash.h"
#include "base/math.h"

namespace xd::ep {

ExpertTables ExpertTables::even(int experts, int ranks) {
  ExpertTables result;
  const int each = experts / ranks;
  result.map_ = {.experts = experts,
                 .ranks = ranks,
                 .each = each,
                 .each_inverse = ((std::uint64_t{1} << 32) + at(each) - 1) / at(each)};
  result.most_local_experts_ = result.least_local_experts_ = each;
  return result;
}

ExpertTables ExpertTables::read(const std::int32_t* expert_ranks, int experts, int ranks,
                                const char* prefix) {
  const bool divides = experts % ranks == 0;
  if (expert_ranks == nullptr) {
    XD_REQUIRE(divides, prefix, "num_experts = ", experts,
               ", expected a multiple of num_ranks = ", ranks, ", or expert_ranks");
    return even(experts, ranks);
  }
  const std::span of_expert(expert_ranks, at(experts));
  auto tables = std::make_shared<Tables>();
  tables->firsts.resize(at(ranks) + 1);
  bool in_order = divides;
  for (int e = 0; e < experts; ++e) {
    const std::int32_t rank = of_expert[at(e)];
    XD_REQUIRE(rank >= 0 && rank < ranks, prefix, "expert_ranks[", e, "] = ", rank,
               ", expected a rank, 0 to ", ranks - 1);
    ++tables->firsts[at(rank) + 1];
    in_order = in_order && rank == e / (experts / ranks);
  }
  if (in_order) return even(experts, ranks);

  ExpertTables result;
  const std::span counts = std::span(tables->firsts).subspan(1);
  result.most_local_experts_ = static_cast<int>(std::ranges::max(counts));
  result.least_local_experts_ = static_cast<int>(std::ranges::min(counts));
  for (std::size_t d = 0; d < at(ranks); ++d) tables->firsts[d + 1] += tables->firsts[d];
  std::vector<std::uint32_t> next = tables->firsts;
  tables->physical_experts.resize(at(experts));
  tables->physical_ranks.assign(at(experts) + 1, static_cast<std::uint32_t>(ranks));
  for (int e = 0; e < experts; ++e) {
    const auto rank = static_cast<std::uint32_t>(of_expert[at(e)]);
    tables->physical_experts[at(e)] = next[rank]++;
    tables->physical_ranks[tables->physical_experts[at(e)]] = rank;
  }
  result.map_ = {.experts = experts,
                 .ranks = ranks,
                 .each = 0,
                 .physical_experts = tables->physical_experts.data(),
                 .physical_ranks = tables->physical_ranks.data(),
                 .firsts = tables->firsts.data()};
  // Never 0, which stands for E / W in order.
  result.hash_ = hash_bytes(1, of_expert.data(), of_expert.size_bytes()) | 1;
  result.tables_ = std::move(tables);
  return result;
}

}  // namespace xd::ep
