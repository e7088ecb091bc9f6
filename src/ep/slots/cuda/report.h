// Puts reports of the kernels of low latency into words.
#pragma once

#include "ep/slots/cuda/params.h"
#include "ep/slots/group.h"

namespace xd::ep::cuda {

LlOperationError operation_error_of(const LlReport& report, const LlGroup& group);

}  // namespace xd::ep::cuda
