// Puts reports of the kernels of EXPERT_SLOTS into words.
#pragma once

#include "ep/group.h"
#include "ep/slots/cuda/params.h"

namespace xd::ep::cuda {

Setback setback_of(const LlReport& report, const Group& group);

}  // namespace xd::ep::cuda
