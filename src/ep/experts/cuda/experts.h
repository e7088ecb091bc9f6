// Operations on experts' rows on CUDA devices. Each is a kernel that waits for nothing.
#pragma once

#include <cuda_runtime_api.h>

#include "ep/experts/gated.h"
#include "ep/experts/grouped.h"

namespace xd::ep::cuda {

void start_gated(const GatedCall& call, const DLDevice& device, cudaStream_t stream);
// These throw UNSUPPORTED where the device is none of those that the kernels are made for.
void start_grouped_product(const GroupedProductCall& call, const DLDevice& device,
                           cudaStream_t stream);
void start_grouped_outer(const GroupedOuterCall& call, const DLDevice& device, cudaStream_t stream);
// Throw what these would throw of their arguments.
void check_grouped_product(const GroupedProductCall& call, const DLDevice& device);
void check_grouped_outer(const GroupedOuterCall& call, const DLDevice& device);

// Loads the kernels on the current device, which groups do when they are made: a kernel that is
// loaded when it is first launched would wait for kernels that spin.
void load_experts();
void load_gated();    // of load_experts(),
void load_grouped();  // likewise, where the device has what they need

}  // namespace xd::ep::cuda
