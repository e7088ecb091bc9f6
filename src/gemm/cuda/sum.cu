// Sums the partial products that all ranks have stored for the rows of this one, by ascending rank
// in float32, and finishes them.
//
//   block of this rank                                  block of a peer
//   (its products have ended: stream)
//   leave(): the last block to come raises `done` ────► waits for it, then reads the cell of this
//   waits for the done flags of all peers                 rank
//   reads cells of all sources, stores D
//   end()
//
// Products and copies that filled the peers' cells have ended before this kernel begins, so the
// release of the done flag covers them. A cell is filled again in a later operation, after this
// rank's record of it, so after the end of this kernel. All blocks are resident: a block waits for
// blocks of peers, and these for all blocks of this launch.
#include "gemm/cuda/epilogue.cuh"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/launch.cuh"
#include "gemm/cuda/turn.cuh"

namespace xd::gemm::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kAnyRanks = 0;  // a number of ranks that has no kernel of its own

// The sum of the vectors at byte `at` of all sources' cells. Words that peers have stored are never
// loaded through the read-only path.
template <DType kType, int kRanks>
__device__ inline void sum_sources(const SumParams& p, std::uint64_t at,
                                   float (&sum)[kWidth<kType>]) {
  float part[kWidth<kType>];
#pragma unroll
  for (int i = 0; i < kWidth<kType>; ++i) sum[i] = 0;
  const auto add = [&](const uint4& v) {
    widen<kType>(v, part);
#pragma unroll
    for (int i = 0; i < kWidth<kType>; ++i) sum[i] += part[i];
  };
  if constexpr (kRanks == kAnyRanks) {
    for (int r = 0; r < p.turn.group.ranks(); ++r) {
      add(ptx::ld_streaming(p.partials + static_cast<std::uint64_t>(r) * p.stride + at));
    }
  } else {
    uint4 v[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) v[r] = ptx::ld_streaming(p.partials + r * p.stride + at);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) add(v[r]);
  }
}

template <DType kType, int kRanks>
__device__ inline void sum_rows(const SumParams& p) {
  constexpr int kElements = kWidth<kType>;
  const std::int64_t row = p.columns / kElements, pitch = p.pitch / kElements;
  const std::int64_t vectors = p.rows * row;
  std::uint32_t largest = 0;
  for (std::int64_t i = Turn::first(); i < vectors; i += Turn::stride()) {
    const std::int64_t y = i / row, x = i - y * row;
    float sum[kElements];
    sum_sources<kType, kRanks>(p, static_cast<std::uint64_t>(y * pitch + x) * 16, sum);
    finish(p.epilogue, i * kElements, x * kElements, sum, largest);
  }
  keep_largest(p.epilogue, largest);
}

template <DType kType, int kRanks>
__global__ void __launch_bounds__(kThreads, kSumsPerMultiprocessor)
    sum_kernel(const __grid_constant__ SumParams p) {
  __shared__ TurnShared shared;
  Turn turn(p.turn, shared);
  if (turn.begin()) turn.await();
  turn.leave();
  if (turn.verdict() == Verdict::go && turn.await_done(p.aliased)) sum_rows<kType, kRanks>(p);
  turn.settle();
}

template <DType kType, int kRanks>
__global__ void __launch_bounds__(kThreads, kSumsPerMultiprocessor)
    part_sum_kernel(const __grid_constant__ SumParams p) {
  if (p.turn.group.control->agreed != 0) sum_rows<kType, kRanks>(p);
}

template <DType kType, int kRanks, class Do>
void with_both(Do&& act) {
  act(sum_kernel<kType, kRanks>, part_sum_kernel<kType, kRanks>);
}

template <DType kType, class Do>
void with_ranks(int ranks, Do&& act) {
  switch (ranks) {
    case 2:
      return with_both<kType, 2>(act);
    case 4:
      return with_both<kType, 4>(act);
    case 8:
      return with_both<kType, 8>(act);
    default:
      return with_both<kType, kAnyRanks>(act);
  }
}

template <class Do>
void with_kernel(DType type, int ranks, Do&& act) {
  switch (type) {
    case DType::f32:
      return with_ranks<DType::f32>(ranks, act);
    case DType::f16:
      return with_ranks<DType::f16>(ranks, act);
    default:
      return with_ranks<DType::bf16>(ranks, act);
  }
}

}  // namespace

namespace {

int blocks_of(const SumParams& params, DType type, int most) {
  const std::int64_t vectors =
      params.rows * params.columns * static_cast<std::int64_t>(dtype_bytes(type)) / 16;
  return blocks_for(vectors, kThreads, most);
}

}  // namespace

void launch_sum(const SumParams& params, DType type, int most_blocks, cudaStream_t stream) {
  with_kernel(type, params.turn.group.ranks(), [&](auto* kernel, auto*) {
    launch_cooperative(kernel, params, blocks_of(params, type, most_blocks), kThreads, stream);
  });
}

void launch_part_sum(const SumParams& params, DType type, int most_blocks, cudaStream_t stream) {
  with_kernel(type, params.turn.group.ranks(), [&](auto*, auto* kernel) {
    launch_plain(kernel, params, blocks_of(params, type, most_blocks), kThreads, stream);
  });
}

void load_sum() {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const int ranks : {2, 4, 8, 1}) {
      with_kernel(type, ranks, [](auto* whole, auto* part) {
        load_kernel(whole);
        load_kernel(part);
      });
    }
  }
}

}  // namespace xd::gemm::cuda
