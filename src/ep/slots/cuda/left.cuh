// Words that an operation has left in its stage, since it was taken without being delivered: they
// are replaced by ones, and the stage is given back.
//
//   LlControl              written by      read by
//   left[pipeline][stage]  the last block  the last block of later launches, and the kernels of
//                                         slots/cuda/control.cu: the operation whose words lie
//                                         there, or 0
//
// A stage may be filled when all peers have said that they store nothing more there: their credits'
// `sent`. A launch that sends n waits for that word about the operations up to n - in_flight - 1,
// and fills their stages. No launch uses a stage before that: see ll_stages().
#pragma once

#include "ep/slots/cuda/agree.cuh"
#include "ep/slots/cuda/words.cuh"

namespace xd::ep::cuda {

// The operation that has left words in this pipeline's stage, or 0.
__device__ inline std::uint64_t ll_left_in_stage(const LlDevice& g, int kind) {
  return lane_id() < g.stages ? ptx::ld_relaxed_sys(&g.control->left[kind][lane_id()]) : 0;
}

// True if the launch that sends `epoch` frees the stage of an operation that has left words.
__device__ inline bool ll_frees(const LlDevice& g, std::uint64_t left, std::uint64_t epoch) {
  return left != 0 && left + static_cast<std::uint64_t>(g.in_flight) < epoch;
}

// The last operation whose stage the launch that sends `epoch` frees, or 0. All lanes of a warp of
// the last block.
inline __device__ __noinline__ std::uint64_t ll_last_freed(const LlDevice& g, int kind,
                                                           std::uint64_t epoch) {
  const std::uint64_t left = ll_left_in_stage(g, kind);
  unsigned long long last = ll_frees(g, left, epoch) ? left : 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) last = max(last, __shfl_xor_sync(kAllLanes, last, step));
  return last;
}

// The lowest of the lanes' numbers that are not 0, less 1, but at most `taken`: so many operations'
// stages are free. All lanes.
__device__ inline std::uint64_t ll_freed_below(std::uint64_t left, std::uint64_t taken) {
  unsigned long long freed = left != 0 ? left - 1 : ~0ull;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    freed = min(freed, __shfl_xor_sync(kAllLanes, freed, step));
  }
  return min(freed, static_cast<unsigned long long>(taken));
}

// Fills the stage of an operation with ones. All lanes, behind the acquire of every peer's `sent`.
inline __device__ __noinline__ void ll_fill_stage(const LlDevice& g, int kind,
                                                  std::uint64_t epoch) {
  const LlStaging staging = g.staging(kind, turn::pipeline_stage(epoch, g.stages));
#pragma unroll 1
  for (std::uint64_t i = static_cast<std::uint64_t>(lane_id()) * 16; i < staging.bytes; i += 512) {
    put_back_pair(staging.data + i);
  }
  __syncwarp();
}

// All lanes of a warp of the last block, behind the block's first barrier and the credit that this
// warp has given: fills the stages that this launch frees, and gives the credit once more. No block
// of the launch touches them.
inline __device__ __noinline__ void ll_free_left(const LlDevice& g, const LlShared& s, int kind) {
  std::uint64_t left = ll_left_in_stage(g, kind);
#pragma unroll 1
  for (int stage = 0; stage < g.stages; ++stage) {
    const std::uint64_t epoch = __shfl_sync(kAllLanes, left, stage);
    if (!ll_frees(g, epoch, s.course.send_epoch)) continue;
    ll_fill_stage(g, kind, epoch);
    if (lane_id() == stage) g.control->left[kind][stage] = left = 0;
  }
  __syncwarp();
  const std::uint64_t freed = ll_freed_below(left, s.before.taken);
  if (freed == s.freed) return;
  ll_pipeline_of(g, kind, g.areas).give_credit({freed, s.before.sent});
}

}  // namespace xd::ep::cuda
