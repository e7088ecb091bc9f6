// Dispatch of rows that are given, into slots and without gaps.
#include "ep/slots/cuda/dispatch/kernel.cuh"

namespace xd::ep::cuda {
namespace {

// Profilers' users, DeepEP's tests among them, look for "::dispatch" in names of kernels.
namespace low_latency {
template <bool kMany, bool kRows>
__global__ void __launch_bounds__(kLlThreads, 1)
    dispatch_given_kernel(const __grid_constant__ LlGivenParams p) {
  __shared__ DispatchShared shared;
  fetch_params(p);
  if (p.group.dependent) ptx::let_next_kernel_start();
  ptx::wait_for_kernel_before();
  DispatchBlock<GivenRows, kMany, kRows>(p, shared).run();
}
}  // namespace low_latency

using GivenKernel = void (*)(LlGivenParams);

GivenKernel given_kernel_for(const LlDevice& group) {
  const bool small = ll_is_small(group.ranks(), group.max_topk);
  if (group.terms.layout == ll_layout(XD_LL_SLOTS)) {
    return small ? low_latency::dispatch_given_kernel<false, false>
                 : low_latency::dispatch_given_kernel<true, false>;
  }
  return small ? low_latency::dispatch_given_kernel<false, true>
               : low_latency::dispatch_given_kernel<true, true>;
}

}  // namespace

void launch(const LlGivenParams& params, const LaunchShape& shape, cudaStream_t stream) {
  if (!params.given) return launch(static_cast<const LlDispatchParams&>(params), shape, stream);
  launch_dependent(given_kernel_for(params.group), params, shape, params.group.dependent, stream);
}

void load_ll_given(const LlDevice& group, const LaunchShape& shape, std::size_t shared_bytes) {
  load_dependent(given_kernel_for(group), shape, shared_bytes);
}

}  // namespace xd::ep::cuda
