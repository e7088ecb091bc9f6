// bfloat16 rows to float8 e4m3 rows with a float32 scale per 128 columns, as xd_ep_dispatch
// describes it, with the bits of the CPU executor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/ptx.cuh"

namespace xd::ep::cuda {

__device__ inline float bf16_low(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float bf16_high(std::uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// NaN keeps its sign, which the conversion would not.
__device__ inline std::uint32_t e4m3_pair(float low, float high, float inverse) {
  const auto limit = [](float x) { return fminf(fmaxf(x, -448.0f), 448.0f); };
  const float a = __fmul_rn(low, inverse), b = __fmul_rn(high, inverse);
  std::uint32_t pair = ptx::pack_e4m3(limit(a), limit(b));
  if (low != low) pair = (pair & 0xFF00u) | (__float_as_uint(low) >> 31 << 7) | 0x7Fu;
  if (high != high) pair = (pair & 0x00FFu) | (__float_as_uint(high) >> 31 << 15) | 0x7F00u;
  return pair;
}

// All lanes of a warp; `columns` a multiple of 128. Sixteen lanes share a block. In shared memory.
__device__ inline void quantise_piece(std::byte* out, float* scales, const std::byte* in,
                                      std::uint32_t columns) {
  constexpr std::uint32_t kLanesPerBlock = 16, kColumnsPerLane = 8;
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t block = lane / kLanesPerBlock; block < (columns / 128 + 1) / 2 * 2;
       block += 2) {
    const bool inside = block < columns / 128;
    const std::uint32_t column = block * 128 + lane % kLanesPerBlock * kColumnsPerLane;
    uint4 x{0, 0, 0, 0};
    if (inside) x = *reinterpret_cast<const uint4*>(in + column * 2);
    const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
    float most = 0.0f;
    for (const std::uint32_t word : words) {
      const float a = fabsf(bf16_low(word)), b = fabsf(bf16_high(word));
      if (a < INFINITY) most = fmaxf(most, a);
      if (b < INFINITY) most = fmaxf(most, b);
    }
    for (std::uint32_t step = kLanesPerBlock / 2; step > 0; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
    }
    constexpr float kLeastScale = 1.17549435e-38f;  // 2^-126
    const float scale = most == 0.0f ? 1.0f : fmaxf(__fdiv_rn(most, 448.0f), kLeastScale);
    const float inverse = __fdiv_rn(1.0f, scale);
    if (!inside) continue;
    std::uint32_t packed[2];
    for (int i = 0; i < 2; ++i) {
      packed[i] = e4m3_pair(bf16_low(words[2 * i]), bf16_high(words[2 * i]), inverse) |
                  e4m3_pair(bf16_low(words[2 * i + 1]), bf16_high(words[2 * i + 1]), inverse)
                      << 16;
    }
    *reinterpret_cast<uint2*>(out + column) = make_uint2(packed[0], packed[1]);
    if (lane % kLanesPerBlock == 0) scales[block] = scale;
  }
}

}  // namespace xd::ep::cuda
