// The kernels of groups with ranks on other machines, as the host starts them. Nothing waits.
#pragma once

#include <cuda_runtime_api.h>

#include "ep/plan/cuda/launch_shape.h"
#include "ep/slots/cuda/remote/params.h"

namespace xd::ep::cuda {

// Halves of operations, or calls that have failed.
void launch(const LlRemoteDispatchParams& params, const LaunchShape& shape, cudaStream_t stream);
void launch(const LlRemoteCombineParams& params, const LaunchShape& shape, cudaStream_t stream);
// The messages of an operation.
void launch(const LlCarryParams& params, const LaunchShape& shape, cudaStream_t stream);

// Load the kernels, and check that the device holds all blocks of such a launch at once.
void load_ll_remote_dispatch(const LlDevice& group, const LaunchShape& shape,
                             std::size_t shared_bytes);
void load_ll_remote_combine(const LaunchShape& shape);
void load_ll_carrier(const LaunchShape& shape);

}  // namespace xd::ep::cuda
