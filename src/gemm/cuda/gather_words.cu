// Gathers a rank's rows as words, where they are few: the whole transfer in one launch, behind
// which the product follows. A peer's rows take one way over the link, without a record in front of
// them and a flag behind.
//
//   block of this rank                            the same block of a peer
//   pushes vectors of its rows ─────────────────► takes them, one by one, as they come,
//   copies them into its own gathered rows          into its gathered rows
//   takes the peers' vectors likewise
//
// Where words go, when they may be pushed and taken, and why there are no done flags: words.cu.
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/launch.cuh"
#include "gemm/cuda/turn.cuh"

namespace xd::gemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPushed = 0;  // step

__device__ inline std::byte* gathered_at(const GatherInlineParams& p, const Turn& turn) {
  return turn.area(turn.rank()).base + p.turn.group.map.gathered;
}

__device__ inline std::int64_t count(const GatherInlineParams& p, int rank) {
  return p.starts[rank + 1] - p.starts[rank];
}

__device__ void push_rows(const GatherInlineParams& p, const Turn& turn) {
  for (std::int64_t i = Turn::first(); i < count(p, turn.rank()); i += Turn::stride()) {
    const uint4 v = ptx::ld_streaming(p.rows + i * 16);
    for (int d = 1; d < turn.ranks(); ++d) {
      const int peer = (turn.rank() + d) % turn.ranks();
      push_words(turn.words_at(peer, kPushed, turn.rank()) + i * 16, v);
    }
  }
}

// Behind the pushes, which peers wait for. With the bits that peers have.
__device__ void keep_own_rows(const GatherInlineParams& p, const Turn& turn) {
  std::byte* const to = gathered_at(p, turn) + p.starts[turn.rank()] * 16;
  for (std::int64_t i = Turn::first(); i < count(p, turn.rank()); i += Turn::stride()) {
    *reinterpret_cast<ulonglong2*>(to + i * 16) = words_of(ptx::ld_streaming(p.rows + i * 16));
  }
}

// False after a fatal error; single threads.
__device__ bool take_rows(const GatherInlineParams& p, const Turn& turn) {
  for (int d = 1; d < turn.ranks(); ++d) {
    const int source = (turn.rank() + turn.ranks() - d) % turn.ranks();
    std::byte* const from = turn.words_at(turn.rank(), kPushed, source);
    std::byte* const to = gathered_at(p, turn) + p.starts[source] * 16;
    for (std::int64_t i = Turn::first(); i < count(p, source); i += Turn::stride()) {
      uint4 v;
      if (!turn.take_words(from + i * 16, source, v)) return false;
      *reinterpret_cast<uint4*>(to + i * 16) = v;
    }
  }
  return true;
}

__global__ void __launch_bounds__(kThreads, 1)
    gather_words_kernel(const __grid_constant__ GatherInlineParams p) {
  __shared__ TurnShared shared;
  Turn turn(p.turn, shared);
  if (turn.begin()) {
    turn.enter();
    push_rows(p, turn);
    turn.await();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) turn.tell_opened();
  if (turn.verdict() == Verdict::go) {
    keep_own_rows(p, turn);
    turn.any_failed(!take_rows(p, turn));
  }
  turn.settle_words();
}

}  // namespace

void launch_gather_words(const GatherInlineParams& params, int multiprocessors,
                         cudaStream_t stream) {
  const int ranks = params.turn.group.ranks();
  std::int64_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t rows = params.starts[r + 1] - params.starts[r];
    most = rows > most ? rows : most;
  }
  launch_cooperative(gather_words_kernel, params, blocks_for(most, kThreads, multiprocessors),
                     kThreads, stream);
}

void load_gather_words() { load_kernel(gather_words_kernel); }

}  // namespace xd::gemm::cuda
