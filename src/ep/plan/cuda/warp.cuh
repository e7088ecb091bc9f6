// A thread's place in its block, and questions that the lanes of a warp answer together. They touch
// no memory; "all lanes" means that all 32 lanes of the warp call the function.
#pragma once

#include <cstdint>

namespace xd::ep::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int warp_in_block() { return static_cast<int>(threadIdx.x / 32); }
__device__ inline int warps_per_block() { return static_cast<int>(blockDim.x / 32); }
__device__ inline int thread_in_block() { return static_cast<int>(threadIdx.x); }
__device__ inline int threads_per_block() { return static_cast<int>(blockDim.x); }

// The lanes below this one, as a mask.
__device__ inline unsigned lower_lanes() { return (1u << lane_id()) - 1; }

// The active lanes whose key equals this lane's, as a mask; a lane that is not active equals itself
// alone. Keys are below 2^31. All lanes. It takes the longer the more different keys there are.
__device__ inline unsigned equal_lanes(unsigned key, bool active) {
  const unsigned same = __match_any_sync(kAllLanes, active ? key : 0x80000000u);
  return active ? same : 1u << lane_id();
}

// The same among `count` lanes that begin with `first`, this lane's group, in a time that does not
// depend on the keys. `count` is equal in all lanes. All lanes.
__device__ inline unsigned equal_in_group(unsigned key, bool active, int first, int count) {
  constexpr int kAtOnce = 8;
  const unsigned mine = active ? key : 0x80000000u | lane_id();
  unsigned same = 0;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kAtOnce) {
#pragma unroll
    for (int i = begin; i < begin + kAtOnce; ++i) {
      const unsigned other = __shfl_sync(kAllLanes, mine, first + i);
      if (i < count && other == mine) same |= 1u << i;
    }
  }
  return same << first;
}

// True if this lane is active and the lowest of the active lanes with its key. All lanes call it.
__device__ inline bool first_of_equals(unsigned key, bool active) {
  const unsigned same = equal_lanes(key, active);
  return active && (same & lower_lanes()) == 0;
}

// The sum of all lanes' values, on every lane. All lanes.
template <class Number>
__device__ Number warp_sum(Number value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Two halves of a sum over a block, without additions of 64 bits in shared memory, which wait for
// one another: every warp keeps the sum of its lanes' values in its word of `sums`, and behind a
// barrier of the block any thread adds those up. All lanes call the first.
__device__ inline void keep_sum_of_warp(std::uint64_t* sums, std::uint64_t value) {
  const std::uint64_t sum = warp_sum(value);
  if (lane_id() == 0) sums[warp_in_block()] = sum;
}
__device__ inline std::uint64_t sum_over_warps(const std::uint64_t* sums) {
  std::uint64_t sum = 0;
#pragma unroll 4
  for (int w = 0; w < warps_per_block(); ++w) sum += sums[w];
  return sum;
}

// Adds all lanes' values to a number to which many warps add, in shared or global memory. Additions
// of 64 bits in shared memory wait for one another, so most warps leave them out. All lanes.
__device__ inline void add_of_warp(unsigned long long* to, std::uint64_t value) {
  const std::uint64_t sum = warp_sum(value);
  if (lane_id() == 0 && sum != 0) atomicAdd(to, static_cast<unsigned long long>(sum));
}

}  // namespace xd::ep::cuda
