// Prefix sums over the threads of a block. They touch the caller's working memory, one word per
// warp in shared memory, and the memory that `value` and `store` touch; they trust barriers of the
// block alone.
#pragma once

#include "ep/plan/cuda/warp.cuh"

namespace xd::ep::cuda {

// Computes exclusive prefix sums of value(0 .. count - 1), and calls store(i, sum before i), also
// for i = count. `partial` has a word for every warp. All threads call it; it ends with a barrier
// of the block.
template <class Value, class Store>
__device__ void scan_block(std::uint64_t* partial, int count, Value&& value, Store&& store) {
  const int each = (count + threads_per_block() - 1) / threads_per_block();
  const int begin = min(thread_in_block() * each, count), end = min(begin + each, count);
  std::uint64_t own = 0;
#pragma unroll 1
  for (int i = begin; i < end; ++i) own += value(i);
  std::uint64_t before = own;
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const std::uint64_t other = __shfl_up_sync(kAllLanes, before, step);
    if (lane_id() >= step) before += other;
  }
  __syncthreads();
  if (lane_id() == 31) partial[warp_in_block()] = before;
  __syncthreads();
  before -= own;
  before += warp_sum(lane_id() < warp_in_block() ? partial[lane_id()] : 0);
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const std::uint64_t own_value = value(i);
    store(i, before);
    before += own_value;
  }
  const bool last = count > 0 ? begin < count && end == count : thread_in_block() == 0;
  if (last) store(count, before);
  __syncthreads();
}

}  // namespace xd::ep::cuda
