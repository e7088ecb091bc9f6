// Local calls on CUDA devices: kernels of their own, which wait for nothing.
#pragma once

#include <cuda_runtime_api.h>

#include "ep/local_calls.h"
#include "ep/plan.h"

namespace xd::ep::cuda {

// On the current device.
void start_row_experts(const RowExpertsCall& call, const PlanBinding& binding, cudaStream_t stream);

// Throws UNSUPPORTED for more experts than groups may have on CUDA devices.
void start_routing_layout(const RoutingLayoutCall& call, const DLDevice& device,
                          cudaStream_t stream);

}  // namespace xd::ep::cuda
