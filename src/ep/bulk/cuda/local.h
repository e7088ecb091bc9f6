// Local calls on CUDA devices. Each is a kernel that waits for nothing.
#pragma once

#include <cuda_runtime_api.h>

#include "ep/bulk/local_calls.h"
#include "ep/plan/plan.h"

namespace xd::ep::cuda {

inline constexpr int kMaxDeviceExperts = 4096;

// Starts the kernel on the current device.
void start_row_experts(const RowExpertsCall& call, const PlanBinding& binding, cudaStream_t stream);

// Throws UNSUPPORTED for more experts than groups may have on CUDA devices.
void start_routing_layout(const RoutingLayoutCall& call, const DLDevice& device,
                          cudaStream_t stream);

}  // namespace xd::ep::cuda
