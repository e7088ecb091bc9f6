#include "ep/executors.h"
#include "ep/experts/cuda/experts.h"

namespace xd::ep::cuda {

void load_experts() { load_gated(); }

const ExpertsExecutor kExperts{.device_type = kDLCUDA, .gated = start_gated};

}  // namespace xd::ep::cuda
