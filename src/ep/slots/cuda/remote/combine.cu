// Combine of groups with ranks on other machines: the near kernels in halves. They sum by host.
#include "ep/slots/cuda/combine/kernel.cuh"
#include "ep/slots/cuda/remote/guard.cuh"
#include "ep/slots/cuda/remote/kernels.h"

namespace xd::ep::cuda {
namespace {

// As of dispatch's, "::combine" is found in its name.
namespace low_latency {
template <class F>
__global__ void __launch_bounds__(kLlCombineThreads, 1)
    combine_remote_kernel(const __grid_constant__ LlRemoteCombineParams p) {
  __shared__ LlCombineShared shared;
  if (!ll_goes(p.call, shared.turn, kLlCombine, p.guarded)) return;
  // Only a head that is a plan's counts: what is wrong with another is found in any case.
  const bool fits =
      !p.checks_out || p.call.out_rows == reinterpret_cast<const PlanHeader*>(p.call.plan)->tokens;
  CombineBlock<F, LlWay::by_host>(fits ? p.call : p.unfit, shared).run();
}
}  // namespace low_latency

using RemoteKernel = void (*)(LlRemoteCombineParams);

RemoteKernel remote_kernel_for(DType type) {
  return type == DType::bf16  ? low_latency::combine_remote_kernel<LlSame<Bf16>>
         : type == DType::f16 ? low_latency::combine_remote_kernel<LlSame<F16>>
                              : low_latency::combine_remote_kernel<LlSame<F32>>;
}

}  // namespace

void launch(const LlRemoteCombineParams& params, const LaunchShape& shape, cudaStream_t stream) {
  launch_dependent(remote_kernel_for(static_cast<DType>(params.call.type)), params, shape, false,
                   stream);
}

void load_ll_remote_combine(const LaunchShape& shape) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    load_dependent(remote_kernel_for(type), shape, 0);
}

}  // namespace xd::ep::cuda
