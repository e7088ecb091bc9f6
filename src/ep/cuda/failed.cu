// The kernel of a call that failed on the host: it takes the rank's turn, so that its peers learn
// of the failure at once. The kernels are also loaded here.
#include "ep/cuda/kernels.h"
#include "ep/cuda/launch.cuh"
#include "ep/cuda/turn.cuh"

namespace xd::ep::cuda {

void load_prepare(std::size_t shared_bytes);
void load_dispatch(std::size_t shared_bytes);
void load_combine(std::size_t shared_bytes);
void load_local();

namespace {

__global__ void __launch_bounds__(128, 1) failed_kernel(const __grid_constant__ FailedParams p) {
  __shared__ TurnShared shared;
  fetch_params(p);
  Turn turn(p.turn, shared);
  if (turn.begin()) {
    turn.enter();
    turn.await({0, 0, 0, 0, 0});
  }
  turn.leave_and_end();
}

}  // namespace

void launch(const FailedParams& params, const LaunchShape& shape, cudaStream_t stream) {
  launch_cooperative(failed_kernel, params, shape, stream);
}

void load_kernels(const LaunchLimits& device) {
  load_kernel(failed_kernel, device.shared_bytes);
  load_prepare(device.shared_bytes);
  load_dispatch(device.shared_bytes);
  load_combine(device.shared_bytes);
  load_local();
}

}  // namespace xd::ep::cuda
