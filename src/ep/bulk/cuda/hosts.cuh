// The order of a token's partial sums where ranks have named several hosts: by ascending host, and
// on each host by ascending rank. A host's sum is rounded before it is added to the others'.
#pragma once

#include "ep/bulk/cuda/walk.cuh"
#include "ep/plan/cuda/sums.cuh"

namespace xd::ep::cuda {

struct HostPlace {
  int index;      // of this leader's partial sum among the token's
  unsigned ends;  // the places whose partial sums are the last of a host, as bits; in all lanes

  // False where sums by host are the sum without hosts: where one host has all partial sums, or
  // each host has one, as rounding a partial sum again changes nothing.
  __device__ bool needs_hosts(int count) const {
    const int hosts = __popc(ends);
    return hosts > 1 && hosts < count;
  }
};

// `keys`: host_key() by rank. All lanes call it.
__device__ inline HostPlace place_by_host(const Choice& c, const std::uint32_t* keys) {
  const std::uint32_t key = c.leader ? keys[c.rank] : 0;
  unsigned leaders = __ballot_sync(kAllLanes, c.leader);
  HostPlace place{0, 0};
  bool is_last = c.leader;
  while (leaders != 0) {
    const std::uint32_t other = __shfl_sync(kAllLanes, key, __ffs(static_cast<int>(leaders)) - 1);
    leaders &= leaders - 1;
    place.index += other < key ? 1 : 0;
    if (other > key && host_of_key(other) == host_of_key(key)) is_last = false;
  }
  place.ends = __reduce_or_sync(kAllLanes, is_last ? 1u << place.index : 0);
  return place;
}

// Writes the warp's sum of terms by host into vectors [first, last) of `out`. Weights are not used.
// `ring`: as add_up() has it.
template <class T>
__device__ void sum_by_host(std::byte* out, std::byte* ring, const WarpTerms& terms, int count,
                            unsigned ends, std::uint32_t first, std::uint32_t last) {
  constexpr int kVectors = TermPieces::kVectors;
  TermRing coming(ring, terms, count, first, last);
  const auto clear = [](float(&sum)[kVectors][T::kPerVector]) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int n = 0; n < T::kPerVector; ++n) sum[j][n] = -0.0f;
    }
  };
#pragma unroll 1
  for (; first < last; first += TermPieces::kColumns) {
    const std::uint32_t v = first + lane_id();
    float total[kVectors][T::kPerVector], of_host[kVectors][T::kPerVector];
    clear(total);
    clear(of_host);
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      uint4 x[kVectors];
      coming.take(x);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) add_term<T, false>(of_host[j], x[j], 1.0f);
      if ((ends >> r & 1) == 0) continue;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) add_term<T, false>(total[j], pack<T>(of_host[j]), 1.0f);
      clear(of_host);
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (v + j * 32 < last) {
        ptx::st_streaming(out + std::uint64_t{v + j * 32} * 16, pack<T>(total[j]));
      }
    }
  }
}

}  // namespace xd::ep::cuda
