// Operations on experts' rows on the CPU. They have finished when they return.
#pragma once

#include "ep/experts/gated.h"
#include "ep/experts/grouped.h"

namespace xd::ep::cpu {

void compute_gated(const GatedCall& call);
void compute_grouped_product(const GroupedProductCall& call);
void compute_grouped_outer(const GroupedOuterCall& call);

}  // namespace xd::ep::cpu
