// The kernel of a call that failed on the host: it takes the rank's turn, so that its peers learn
// of the failure at once. The kernels are also loaded here.
#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/remote/work.cuh"
#include "ep/bulk/cuda/turn.cuh"
#include "ep/experts/cuda/experts.h"
#include "ep/plan/cuda/launch.cuh"

namespace xd::ep::cuda {

void load_prepare(std::size_t shared_bytes, bool remote);
void load_dispatch(std::size_t shared_bytes, bool remote);
void load_combine(std::size_t shared_bytes, bool remote);
void load_combine_wire(std::size_t shared_bytes);
void load_local();

namespace {

// It has nothing for other machines but its entry, since nobody moves anything.
class RemoteNothing : public RemoteWork<RemoteNothing> {
 public:
  using Shared = RemoteShared;

  __device__ RemoteNothing(const FailedParams& params, Turn& turn, TurnShared& turn_shared,
                           Shared& shared)
      : RemoteWork(params.turn, turn, turn_shared, shared) {}
  __device__ void meet() const { meet_remote(remote_turn_, turn_); }
  __device__ void clear() const {}
  __device__ bool do_all() const { return true; }
};

template <bool kRemote>
__global__ void __launch_bounds__(128, 1) failed_kernel(const __grid_constant__ FailedParams p) {
  __shared__ TurnShared shared;
  Turn turn(p.turn, shared);
  fetch_params(p);
  auto remote = make_remote_work<kRemote, RemoteNothing>(p, turn, shared);
  if (turn.begin()) {
    turn.enter();
    if constexpr (kRemote) remote.meet();
    turn.await({0, 0, 0, 0, 0});
  }
  turn.leave_and_end(remote);
}

}  // namespace

void launch(const FailedParams& params, bool remote, const LaunchShape& shape,
            cudaStream_t stream) {
  launch_cooperative(remote ? failed_kernel<true> : failed_kernel<false>, params, shape, stream);
}

void load_kernels(const LaunchLimits& device, bool remote, bool wires) {
  load_kernel(remote ? failed_kernel<true> : failed_kernel<false>, device.shared_bytes);
  load_prepare(device.shared_bytes, remote);
  load_dispatch(device.shared_bytes, remote);
  load_combine(device.shared_bytes, remote);
  if (wires) load_combine_wire(device.shared_bytes);
  load_local();
  load_experts();
}

}  // namespace xd::ep::cuda
