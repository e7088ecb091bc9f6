// The kernel of the toy family (unit/toy_family.h).
//
//   memory                    written by           read by
//   mailbox of the next rank  block 0 of a rank    the next rank's host, when its turn has ended
//
// It is trusted when the done flag of the lower neighbour is there, which end() waits for.
#include "cuda/error.h"
#include "cuda/ptx.cuh"
#include "turn/device/turn.cuh"
#include "unit/toy_kernel.h"

namespace xd::toy {
namespace {

constexpr int kBlocks = 2, kThreads = 128;

struct Shared : turn::DeviceTurnShared<Record> {
  std::uint64_t* next_mailbox;
};

class DeviceToy : public turn::DeviceTurn<DeviceToy, Family, Params, Shared> {
 public:
  using DeviceTurn::DeviceTurn;

  __device__ bool await() {
    return DeviceTurn::await([&](int peer, const Record& record) {
      auto* mailbox = reinterpret_cast<std::uint64_t*>(
          find(peer, record.mailbox, sizeof(std::uint64_t), alignof(std::uint64_t)));
      if (peer == (rank() + 1) % ranks()) s_.next_mailbox = mailbox;
      return mailbox != nullptr;
    });
  }
};

// Work that says for another rank what that rank does not say itself.
struct Speaker {
  DeviceToy& turn;
  const int other;

  __device__ void before_done() {
    if (threadIdx.x != 0) return;
    ptx::st_release_sys(turn.done_at(turn.rank(), other), turn.epoch() | turn::kFoundMissing);
  }
  __device__ void after_done() {}
  __device__ bool raises_done(int rank) const { return rank != other; }
  static constexpr int kDoneTimeouts = 1;
};

__device__ void wait_for_gate(const Params& p, DeviceToy& turn) {
  bool failed = false;
  if (threadIdx.x == 0) {
    failed = !device::wait_until(
        p.group.comm, turn.site(XD_PHASE_NONE), -1,
        [&] { return ptx::ld_acquire_sys(p.gate) != 0; }, [] { return std::uint64_t{0}; });
  }
  turn.any_failed(failed);
}

// Not even an error ends it before some 10 s have passed: a look at the host takes a microsecond.
__device__ void work_until_gate(const Params& p) {
  constexpr int kMostLooks = 10'000'000;
  for (int look = 0; look < kMostLooks && ptx::ld_acquire_sys(p.gate) == 0; ++look) {
  }
}

__global__ void __launch_bounds__(kThreads) pass_kernel(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  DeviceToy turn(p, shared);
  if (turn.begin()) {
    turn.enter();
    turn.await();
  }
  if (p.ends_ahead && turn.verdict() == turn::Verdict::go) {
    turn.end_ahead();
    work_until_gate(p);
    return turn.written();
  }
  if (turn.verdict() == turn::Verdict::go && blockIdx.x == 0 && threadIdx.x == 0) {
    ptx::st_relaxed_sys(shared.next_mailbox, p.number * p.record.factor);
  }
  if (p.gate != nullptr) wait_for_gate(p, turn);
  if (p.speaks_for >= 0) {
    Speaker speaker{turn, p.speaks_for};
    turn.leave(speaker);
    return turn.end(speaker);
  }
  turn.leave();
  turn.end();
}

}  // namespace

void load_kernel() {
  cudaFuncAttributes attributes{};
  XD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(pass_kernel)));
}

void launch(const Params& params, cudaStream_t stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  // Cooperative: all blocks run at once, so that one may wait for another rank's.
  XD_CUDA_CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(pass_kernel),
                                            dim3(kBlocks), dim3(kThreads), arguments, 0, stream));
}

}  // namespace xd::toy
