// The kernels of low latency as the host starts them.
#pragma once

#include <cuda_runtime_api.h>

#include "ep/plan/cuda/launch_shape.h"
#include "ep/slots/cuda/params.h"

namespace xd::ep::cuda {

// Each starts a launch on `stream` that may be a dependent one; nothing waits.
void launch(const LlDispatchParams& params, const LaunchShape& shape, cudaStream_t stream);
void launch(const LlCombineParams& params, const LaunchShape& shape, cudaStream_t stream);

// The part of launch() for dispatch without slots, and of load_ll_dispatch().
void launch_rows(const LlDispatchParams& params, const LaunchShape& shape, cudaStream_t stream);
void load_ll_rows(const LlDevice& group, const LaunchShape& shape, std::size_t shared_bytes);

// The same for dispatch of rows that are given. Where params.given is not set, launch() is that of
// other rows.
void launch(const LlGivenParams& params, const LaunchShape& shape, cudaStream_t stream);
void load_ll_given(const LlDevice& group, const LaunchShape& shape, std::size_t shared_bytes);

// The same for a combine whose wire is not SAME.
void launch_wire(const LlCombineParams& params, const LaunchShape& shape, cudaStream_t stream);
void load_ll_wire(const LaunchShape& shape);

// Masks or unmasks a rank.
void launch_mask_set(const LlDevice& group, int rank, bool masked, cudaStream_t stream);
void launch_mask_get(const LlDevice& group, std::int32_t* mask, cudaStream_t stream);
// Brings the ranks back into step.
void launch_reset(const LlDevice& group, std::uint32_t launch, cudaStream_t stream);
// Ends a change of the table of slots, behind the dispatch that has a plan where all ranks agree.
void launch_end_change(const SlotTableChange& change, const PlanHeader* plan, cudaStream_t stream);
// Checks that a stage that has been taken is free: XD_LL_VERIFY.
void launch_verify(const LlDevice& group, int pipeline, cudaStream_t stream);
void load_ll_control();

// Load the kernels of a group, and check that the device holds all blocks of such a launch at once.
// `wires`: of combine may be other ones than SAME.
void load_ll_dispatch(const LlDevice& group, const LaunchShape& shape, std::size_t shared_bytes);
void load_ll_combine(const LaunchShape& shape, bool wires);

}  // namespace xd::ep::cuda
