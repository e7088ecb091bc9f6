// Puts reports of the kernels of EXPERT_SLOTS into words.
#pragma once

#include "ep/cuda/ll_params.h"
#include "ep/group.h"

namespace xd::ep::cuda {

Setback setback_of(const LlReport& report, const Group& group);

}  // namespace xd::ep::cuda
