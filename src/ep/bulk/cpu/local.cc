#include "ep/bulk/cpu/local.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/math.h"

namespace xd::ep::cpu {
namespace {

void put(const Tensor& out, std::int64_t at, std::int64_t value) {
  if (out.type == DType::i64) {
    out.as<std::int64_t>()[at] = value;
  } else {
    const std::int64_t most = INT32_MAX;
    out.as<std::int32_t>()[at] = static_cast<std::int32_t>(std::min(value, most));
  }
}

std::int64_t id_at(const Tensor& ids, std::int64_t at) {
  return ids.type == DType::i64 ? ids.as<std::int64_t>()[at] : ids.as<std::int32_t>()[at];
}

struct Counts {
  std::vector<std::int64_t> rank, expert;
  std::int64_t bad_ids = 0;
};

// Counts one token's choices. `in_rank` is [W], or null.
void count_token(const RoutingLayoutCall& call, std::int64_t token, Counts& counts,
                 std::uint8_t* in_rank) {
  const ExpertMap& map = call.expert_tables.map();
  std::array<int, kMaxTopk> experts;
  int named = 0;
  for (std::int64_t k = 0; k < call.topk_idx.cols; ++k) {
    const std::int64_t id = id_at(call.topk_idx, token * call.topk_idx.cols + k);
    if (id == -1) continue;
    if (id < 0 || id >= map.experts) {
      ++counts.bad_ids;
      continue;
    }
    const auto before = std::span(experts).first(at(named));
    if (std::ranges::find(before, static_cast<int>(id)) != before.end()) continue;
    const int rank = map.rank_of(static_cast<int>(id));
    const bool known_rank =
        std::ranges::any_of(before, [&](int other) { return map.rank_of(other) == rank; });
    experts[at(named++)] = static_cast<int>(id);
    ++counts.expert[at(id)];
    if (known_rank) continue;
    ++counts.rank[at(rank)];
    if (in_rank != nullptr) in_rank[rank] = 1;
  }
}

}  // namespace

void fill_row_experts(const RowExpertsCall& call, const PlanBinding& binding) {
  const PlanView plan = PlanView::open(call.plan.data, call.plan.bytes);
  plan.require_binding(binding);
  const int experts = binding.config->local_experts;
  std::int64_t row = 0;
  for (int e = 0; e < experts; ++e) {
    const std::int64_t end = std::min<std::int64_t>(plan.offset(e + 1), call.row_experts.rows);
    for (; row < end; ++row) put(call.row_experts, row, e);
  }
  for (; row < call.row_experts.rows; ++row) put(call.row_experts, row, -1);
}

void fill_routing_layout(const RoutingLayoutCall& call) {
  const ExpertMap& map = call.expert_tables.map();
  Counts counts{.rank = std::vector<std::int64_t>(at(map.ranks)),
                .expert = std::vector<std::int64_t>(at(map.experts))};
  std::uint8_t* flags = call.token_in_rank ? call.token_in_rank.as<std::uint8_t>() : nullptr;
  if (flags != nullptr && call.token_in_rank.bytes() > 0) {
    std::memset(flags, 0, call.token_in_rank.bytes());
  }
  for (std::int64_t t = 0; t < call.topk_idx.rows; ++t) {
    count_token(call, t, counts, flags != nullptr ? flags + t * map.ranks : nullptr);
  }
  const auto write = [](const Tensor& out, const std::vector<std::int64_t>& values) {
    for (std::int64_t i = 0; out && i < out.rows; ++i) put(out, i, values[at(i)]);
  };
  write(call.rows_per_rank, counts.rank);
  write(call.rows_per_expert, counts.expert);
  if (call.bad_ids) put(call.bad_ids, 0, counts.bad_ids);
}

}  // namespace xd::ep::cpu
