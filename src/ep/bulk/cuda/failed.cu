// The kernel of a call that failed on the host: it takes the rank's turn, so that its peers learn
// of the failure at once. The kernels are also loaded here.
#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/remote/work.cuh"
#include "ep/bulk/cuda/turn.cuh"
#include "ep/plan/cuda/launch.cuh"

namespace xd::ep::cuda {

void load_prepare(std::size_t shared_bytes, bool far);
void load_dispatch(std::size_t shared_bytes, bool far);
void load_combine(std::size_t shared_bytes, bool far);
void load_local();

namespace {

// It has nothing for other machines but its entry, since nobody moves anything.
class FarNothing : public FarWork<FarNothing> {
 public:
  static constexpr FarKind kKind = FarKind::rows;

  __device__ FarNothing(const FailedParams& params, Turn& turn, TurnShared& turn_shared,
                        FarShared& shared)
      : FarWork(params.turn, turn, turn_shared, shared) {}
  __device__ void meet() const { meet_far(far_turn_, turn_); }
  __device__ bool fill(int, FarHeader*) { return true; }
  __device__ void take(int, const FarHeader&) {}
};

template <bool kFar>
__global__ void __launch_bounds__(128, 1) failed_kernel(const __grid_constant__ FailedParams p) {
  __shared__ TurnShared shared;
  Turn turn(p.turn, shared);
  fetch_params(p);
  auto far = make_far_work<kFar, FarNothing>(p, turn, shared);
  if (turn.begin()) {
    turn.enter();
    if constexpr (kFar) far.meet();
    turn.await({0, 0, 0, 0, 0});
  }
  turn.leave_and_end(far);
}

}  // namespace

void launch(const FailedParams& params, bool far, const LaunchShape& shape, cudaStream_t stream) {
  launch_cooperative(far ? failed_kernel<true> : failed_kernel<false>, params, shape, stream);
}

void load_kernels(const LaunchLimits& device, bool far) {
  load_kernel(far ? failed_kernel<true> : failed_kernel<false>, device.shared_bytes);
  load_prepare(device.shared_bytes, far);
  load_dispatch(device.shared_bytes, far);
  load_combine(device.shared_bytes, far);
  load_local();
}

}  // namespace xd::ep::cuda
