#include "ep/slots/plan.h"

#include <cstring>

#include "base/math.h"
#include "ep/slots/placement.h"

namespace xd::ep {

LlPlanView LlPlanView::open(const void* plan, std::size_t bytes) {
  LlPlanView view;
  view.header_ = open_plan_header(plan, bytes);
  const PlanHeader& h = view.header_;
  require_none(kind_fault(h, true));
  const LlPlanMap map = ll_map_of(h);
  const auto* from = static_cast<const std::byte*>(plan);
  std::memcpy(&view.facts_, from + map.facts, sizeof(view.facts_));
  view.home_ = reinterpret_cast<const RankBits*>(from + map.home);
  view.items_ = from + map.items;
  return view;
}

void LlPlanView::require_binding(const PlanTerms& terms) const {
  require_none(binding_fault(header_, terms), terms);
}

PlanTerms terms_of(const LlConfig& config, int rank, std::uint64_t hosts) {
  return {.rank = rank,
          .ranks = config.ranks,
          .experts = config.experts,
          .layout = ll_layout(config.receive),
          .keeps_list = 0,
          .keeps_items = 0,
          .overflow = XD_EP_OVERFLOW_ERROR,
          .max_tokens = config.max_tokens,
          .max_topk = config.max_topk,
          .alignment = config.alignment,
          .capacity = slots_per_expert(config),
          .capacities = 0,
          .local_experts = config.local_experts,
          .expert_ranks = config.expert_tables.hash(),
          .hosts = hosts};
}

std::size_t plan_size(const LlConfig& config) {
  return LlPlanMap::make({.local_experts = config.most_local_experts(),
                          .tokens = config.max_tokens,
                          .topk = config.max_topk,
                          .items = slots_per_expert(config)})
      .end;
}

}  // namespace xd::ep
