// Local calls on the CPU. They have finished when they return.
#pragma once

#include "ep/bulk/local_calls.h"
#include "ep/plan/plan.h"

namespace xd::ep::cpu {

// Throws INVALID_ARGUMENT if the plan does not belong to `binding`'s group.
void fill_row_experts(const RowExpertsCall& call, const PlanBinding& binding);

void fill_routing_layout(const RoutingLayoutCall& call);

}  // namespace xd::ep::cpu
