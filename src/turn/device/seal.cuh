// The hash that seals records on their way between devices (turn/device/turn.cuh has the reason).
#pragma once

#include <cstdint>

#include "turn/entry.h"

namespace xd::turn {

inline constexpr std::uint64_t kSealFactor = 0x9E3779B97F4A7C15u;

// A polynomial hash with an odd multiplier: changing any one word changes the hash.
__device__ inline std::uint64_t hash_of(const std::uint64_t* words) {
  std::uint64_t hash = 0;
#pragma unroll
  for (int w = 0; w < kRecordWords; ++w) hash = (hash + words[w]) * kSealFactor;
  return hash;
}

// A word's factor in the sum over a sealed record, with the seal as its last word, that is the seal
// less the hash.
__device__ inline std::uint64_t seal_factor(int word) {
  std::uint64_t factor = word == kRecordWords ? 1 : ~std::uint64_t{0};
#pragma unroll 1
  for (int w = word; w < kRecordWords; ++w) factor *= kSealFactor;
  return factor;
}

}  // namespace xd::turn
