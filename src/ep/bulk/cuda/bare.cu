// The kernel of turns that move no rows. A call that failed on the host takes its rank's turn, so
// that the peers learn of the failure at once; a change of the table of slots takes one in which
// all agree about it. The kernels are also loaded here.
#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/remote/work.cuh"
#include "ep/bulk/cuda/turn.cuh"
#include "ep/experts/cuda/experts.h"
#include "ep/plan/cuda/device_slot_table.h"
#include "ep/plan/cuda/launch.cuh"
#include "ep/plan/cuda/slot_table.cuh"

namespace xd::ep::cuda {

void load_prepare(std::size_t shared_bytes, bool remote);
void load_dispatch(std::size_t shared_bytes, bool remote);
void load_combine(std::size_t shared_bytes, bool remote);
void load_combine_wire(std::size_t shared_bytes);
void load_local();

namespace {

constexpr int kBareThreads = 128;

// It has nothing for other machines but its entry, since nobody moves anything.
class RemoteNothing : public RemoteWork<RemoteNothing> {
 public:
  using Shared = RemoteShared;

  __device__ RemoteNothing(const BareParams& params, Turn& turn, TurnShared& turn_shared,
                           Shared& shared)
      : RemoteWork(params.turn, turn, turn_shared, shared) {}
  __device__ void meet() const { meet_remote(remote_turn_, turn_); }
  __device__ void clear() const {}
  __device__ bool do_all() const { return true; }
};

template <bool kRemote>
__global__ void __launch_bounds__(kBareThreads, 1)
    bare_kernel(const __grid_constant__ BareParams p) {
  __shared__ TurnShared shared;
  Turn turn(p.turn, shared);
  fetch_params(p);
  auto remote = make_remote_work<kRemote, RemoteNothing>(p, turn, shared);
  bool agreed = false;
  if (turn.begin()) {
    turn.enter();
    if constexpr (kRemote) remote.meet();
    agreed = turn.await({0, 0, 0, 0, 0}) && turn.verdict() == Verdict::go;
  }
  end_change(p.change, agreed);
  turn.leave_and_end(remote);
}

}  // namespace

void launch(const BareParams& params, bool remote, cudaStream_t stream) {
  constexpr LaunchShape kShape{
      .blocks = 1, .first_blocks = 0, .threads = kBareThreads, .shared_bytes = 0};
  launch_cooperative(remote ? bare_kernel<true> : bare_kernel<false>, params, kShape, stream);
}

void load_kernels(const LaunchLimits& device, bool remote, bool wires) {
  load_kernel(remote ? bare_kernel<true> : bare_kernel<false>, device.shared_bytes);
  load_prepare(device.shared_bytes, remote);
  load_dispatch(device.shared_bytes, remote);
  load_combine(device.shared_bytes, remote);
  if (wires) load_combine_wire(device.shared_bytes);
  load_local();
  load_slot_table();
  load_experts();
}

}  // namespace xd::ep::cuda
