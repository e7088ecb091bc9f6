// The hash that seals records on their way between devices (turn/device_turn.cuh has the reason).
#pragma once

#include <cstdint>

#include "turn/entry.h"

namespace xd::turn {

// A polynomial hash with an odd multiplier: changing any one word changes the hash.
__device__ inline std::uint64_t hash_of(const std::uint64_t* words) {
  std::uint64_t hash = 0;
#pragma unroll
  for (int w = 0; w < kRecordWords; ++w) hash = (hash + words[w]) * 0x9E3779B97F4A7C15u;
  return hash;
}

}  // namespace xd::turn
