// Pushes a rank's rows into the gathered rows of all ranks, for gathers that are too small for
// copies: the whole transfer in one launch, behind which the product follows.
//
// A peer's record says that its products of earlier operations have ended, so rows are pushed only
// after await(). They are plain stores: the done flag behind them covers the stores of all blocks,
// and end() waits for it.
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/launch.cuh"
#include "gemm/cuda/turn.cuh"

namespace xd::gemm::cuda {
namespace {

constexpr int kThreads = 512;

// A thread loads several vectors before it stores them to the ranks, this one included.
__device__ inline void push_rows(const PushParams& p, const Turn& turn) {
  constexpr int kAtOnce = 4;
  const auto vectors = static_cast<std::int64_t>(p.bytes / 16);
  for (std::int64_t i = Turn::first(); i < vectors; i += kAtOnce * Turn::stride()) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::int64_t at = i + j * Turn::stride();
      if (at < vectors) v[j] = ptx::ld_streaming(p.rows + at * 16);
    }
    for (int d = 0; d < turn.ranks(); ++d) {
      const int to = (turn.rank() + 1 + d) % turn.ranks();
      std::byte* const rows = turn.area(to).base + p.turn.group.map.gathered + p.offset;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const std::int64_t at = i + j * Turn::stride();
        if (at < vectors) ptx::st_streaming(rows + at * 16, v[j]);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) push_kernel(const __grid_constant__ PushParams p) {
  __shared__ TurnShared shared;
  Turn turn(p.turn, shared);
  if (turn.begin()) {
    turn.enter();
    turn.await();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) turn.tell_opened();
  if (turn.verdict() == Verdict::go) push_rows(p, turn);
  turn.leave_and_settle();
}

}  // namespace

void launch_push(const PushParams& params, int multiprocessors, cudaStream_t stream) {
  const auto vectors = static_cast<std::int64_t>(params.bytes / 16);
  launch_cooperative(push_kernel, params, blocks_for(vectors, kThreads, multiprocessors), kThreads,
                     stream);
}

void load_push() { load_kernel(push_kernel); }

}  // namespace xd::gemm::cuda
