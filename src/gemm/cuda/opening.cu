// The small kernels around copies and products: they open and close turns, and wait for rows.
//
//   stream of the copies           stream of the products
//   open_kernel                    product of the own rows
//   event ───────────────────────► (behind open_kernel)
//   copy of rows to peer p, copy   landed_kernel: waits for sources
//     of the flag behind them      product of their rows ..
//   close_kernel
//   event ───────────────────────► (joined)
//
// The flag that a copy takes to a peer is Control::opened, which open_kernel has written in the
// same stream. Copies of one stream end one after the other, and the end of a copy says that its
// bytes are in the peer's memory, so a peer that finds the flag finds the rows.
//
// A rank opens operation n + 1 when its stream has ended the products of operation n, and that is
// what its record of n + 1 says: peers may store over the rows of n.
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/launch.cuh"
#include "gemm/cuda/turn.cuh"

namespace xd::gemm::cuda {

void load_sum();
void load_words();
void load_push();
void load_gather_words();
void load_finish();
void load_columns();
void load_block_scales();

namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads, 1) open_kernel(const __grid_constant__ TurnParams p) {
  __shared__ TurnShared shared;
  Turn turn(p, shared);
  if (turn.begin()) {
    turn.enter();
    turn.await();
  }
  if (threadIdx.x == 0) turn.tell_opened();
}

// The peers' records have come already.
__global__ void __launch_bounds__(kThreads, 1) close_kernel(const __grid_constant__ TurnParams p) {
  __shared__ TurnShared shared;
  Turn turn(p, shared);
  if (turn.begin()) turn.await();
  turn.leave();
  turn.settle();
}

// One thread, on the stream of an operation: the operation before was enqueued on another one. If
// the caller has ordered the two streams, that one has ended.
__global__ void __launch_bounds__(1, 1) expect_idle_kernel(const __grid_constant__ TurnParams p) {
  const Control& control = *p.group.control;
  if (static_cast<std::uint32_t>(ptx::ld_relaxed_sys(&control.owner)) == 0) return;
  const std::uint64_t epoch = ptx::ld_relaxed_sys(&control.epoch) + 1;
  const device::KernelWait here{XD_PHASE_NONE, p.group.number, p.record.call.operation, epoch};
  const DeviceComm& comm = p.group.comm;
  device::raise(comm, device::error_at(comm, here, XD_ERROR_BUSY, comm.rank),
                device::Spread::everywhere);
}

__global__ void __launch_bounds__(kThreads, 1) failed_kernel(const __grid_constant__ TurnParams p) {
  __shared__ TurnShared shared;
  Turn turn(p, shared);
  if (turn.begin()) {
    turn.enter();
    turn.await();
  }
  turn.leave();
  turn.settle();
}

// One warp. Where ranks disagree no rows need come, and nothing is waited for; the operation ends
// with an error, and products of its rows mean nothing.
__global__ void __launch_bounds__(32, 1) landed_kernel(const __grid_constant__ LandedParams p) {
  const Control& control = *p.group.control;
  if (control.agreed == 0) return;
  const std::uint64_t expected = control.opened;
  const int ranks = p.group.ranks();
  const std::byte* const own = p.group.areas[p.group.rank()].base;
  for (int i = static_cast<int>(threadIdx.x); i < p.count; i += 32) {
    const int source = (p.first + i) % ranks;
    if (source == p.group.rank()) continue;
    const auto* flag =
        reinterpret_cast<const std::uint64_t*>(own + ContextMap::flag_of(p.flags, source));
    const bool here = device::wait_until(
        p.group.comm, {XD_PHASE_ROWS, p.group.number, p.operation, expected}, source,
        [=] { return ptx::ld_acquire_sys(flag) == expected; },
        [=] { return ptx::ld_acquire_sys(flag); });
    if (!here) return;
  }
}

}  // namespace

void launch_open(const TurnParams& params, cudaStream_t stream) {
  launch_plain(open_kernel, params, 1, kThreads, stream);
}

void launch_close(const TurnParams& params, cudaStream_t stream) {
  launch_plain(close_kernel, params, 1, kThreads, stream);
}

void launch_expect_idle(const TurnParams& params, cudaStream_t stream) {
  launch_plain(expect_idle_kernel, params, 1, 1, stream);
}

void launch_failed(const TurnParams& params, cudaStream_t stream) {
  launch_plain(failed_kernel, params, 1, kThreads, stream);
}

void launch_landed(const LandedParams& params, cudaStream_t stream) {
  launch_plain(landed_kernel, params, 1, 32, stream);
}

void load_kernels() {
  load_kernel(open_kernel);
  load_kernel(close_kernel);
  load_kernel(expect_idle_kernel);
  load_kernel(failed_kernel);
  load_kernel(landed_kernel);
  load_sum();
  load_words();
  load_push();
  load_gather_words();
  load_finish();
  load_columns();
  load_block_scales();
}

}  // namespace xd::gemm::cuda
