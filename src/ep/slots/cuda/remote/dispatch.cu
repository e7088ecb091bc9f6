// Dispatch of groups with ranks on other machines: the near kernels in halves, for which those
// ranks' words lie in this rank's own memory.
#include "ep/slots/cuda/dispatch/kernel.cuh"
#include "ep/slots/cuda/remote/guard.cuh"
#include "ep/slots/cuda/remote/kernels.h"

namespace xd::ep::cuda {
namespace {

// Profilers' users, DeepEP's tests among them, look for "::dispatch" in names of kernels.
namespace low_latency {
template <class Quantiser, bool kRows>
__global__ void __launch_bounds__(kLlThreads, 1)
    dispatch_remote_kernel(const __grid_constant__ LlRemoteDispatchParams p) {
  __shared__ DispatchShared shared;
  fetch_params(p);
  const LlDispatchParams& call = p.call;
  if (!ll_goes(call, shared.turn, kLlDispatch, p.guarded)) return;
  DispatchBlock<Quantiser, true, kRows>(call, shared).run();
}
}  // namespace low_latency

using RemoteKernel = void (*)(LlRemoteDispatchParams);

template <bool kRows>
RemoteKernel remote_kernel_for(bool given, const QuantiseFormat& format) {
  return given           ? low_latency::dispatch_remote_kernel<GivenRows, kRows>
         : !format       ? low_latency::dispatch_remote_kernel<NotQuantised, kRows>
         : format.powers ? low_latency::dispatch_remote_kernel<ByPowers, kRows>
                         : low_latency::dispatch_remote_kernel<ByQuotients, kRows>;
}

RemoteKernel remote_kernel_for(const LlDevice& group, bool given, const QuantiseFormat& format) {
  return group.terms.layout == ll_layout(XD_LL_SLOTS) ? remote_kernel_for<false>(given, format)
                                                      : remote_kernel_for<true>(given, format);
}

}  // namespace

void launch(const LlRemoteDispatchParams& params, const LaunchShape& shape, cudaStream_t stream) {
  const LlGivenParams& call = params.call;
  launch_dependent(remote_kernel_for(call.group, call.given, call.format), params, shape, false,
                   stream);
}

void load_ll_remote_dispatch(const LlDevice& group, const LaunchShape& shape,
                             std::size_t shared_bytes) {
  load_dependent(remote_kernel_for(group, true, {}), shape, shared_bytes);
  for (const auto way :
       {XD_EP_QUANTISE_NONE, XD_EP_QUANTISE_FP8_BLOCK128, XD_EP_QUANTISE_FP8_BLOCK128_POW2}) {
    load_dependent(remote_kernel_for(group, false, quantise_format(way)), shape, shared_bytes);
  }
}

}  // namespace xd::ep::cuda
