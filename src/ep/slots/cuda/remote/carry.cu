// The kernel of the carrier.
#include "ep/plan/cuda/launch.cuh"
#include "ep/slots/cuda/remote/weights.cuh"

namespace xd::ep::cuda {
namespace {

__global__ void __launch_bounds__(kLlCarrierThreads)
    ll_carry_kernel(const __grid_constant__ LlCarryParams p) {
  __shared__ LlCarrierShared shared;
  LlCarrier(p, shared).run();
}

}  // namespace

// Nothing of a launch of the near kernels is left when it begins, and the other way round.
void launch(const LlCarryParams& params, const LaunchShape& shape, cudaStream_t stream) {
  launch_dependent(ll_carry_kernel, params, shape, false, stream);
}

void load_ll_carrier(const LaunchShape& shape) { load_dependent(ll_carry_kernel, shape, 0); }

}  // namespace xd::ep::cuda
