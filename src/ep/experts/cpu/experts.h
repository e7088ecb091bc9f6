// Operations on experts' rows on the CPU. They have finished when they return.
#pragma once

#include "ep/experts/gated.h"

namespace xd::ep::cpu {

void compute_gated(const GatedCall& call);

}  // namespace xd::ep::cpu
