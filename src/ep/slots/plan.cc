#include "ep/slots/plan.h"

#include <cstring>

#include "base/math.h"
#include "ep/plan/plan_check.h"

namespace xd::ep {

LlPlanView LlPlanView::open(const void* plan, std::size_t bytes) {
  LlPlanView view;
  view.header_ = open_plan_header(plan, bytes);
  const PlanHeader& h = view.header_;
  // Other layouts have other parts, which binding_fault() will refuse; nothing of them is read.
  if (!Layout::of(h.layout).is_slots()) return view;
  const LlPlanMap map = ll_map_of(h);
  const auto* from = static_cast<const std::byte*>(plan);
  std::memcpy(&view.facts_, from + map.facts, sizeof(view.facts_));
  view.tokens_of_ = {reinterpret_cast<const std::int32_t*>(from + map.tokens), at(h.ranks)};
  view.home_ = reinterpret_cast<const RankBits*>(from + map.home);
  view.items_ = from + map.items;
  return view;
}

void LlPlanView::require_binding(const PlanBinding& binding) const {
  const PlanTerms terms = terms_of(binding);
  require_none(binding_fault(header_, terms), terms);
}

}  // namespace xd::ep
