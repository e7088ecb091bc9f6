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

// Largest magnitude of the finite numbers among a word's two, in the halves of the result.
__device__ inline std::uint32_t finite_magnitudes(std::uint32_t pair) {
  constexpr std::uint32_t kInfinity = 0x7F80;
  std::uint32_t magnitudes = pair & 0x7FFF7FFFu;
  if ((magnitudes & 0xFFFFu) >= kInfinity) magnitudes &= 0xFFFF0000u;
  if (magnitudes >> 16 >= kInfinity) magnitudes &= 0x0000FFFFu;
  return magnitudes;
}

// The conversion limits to +-448; NaN keeps its sign, which the conversion would not.
__device__ inline std::uint32_t e4m3_pair(std::uint32_t pair, float inverse) {
  const std::uint32_t converted = ptx::pack_e4m3(__fmul_rn(bf16_low(pair), inverse),
                                                 __fmul_rn(bf16_high(pair), inverse));
  return converted | (pair >> 8 & 0x80u) | (pair >> 16 & 0x8000u);
}

// Of the numbers of a block with this largest finite magnitude.
__device__ inline float scale_of(float most) {
  constexpr float kLeastScale = 1.17549435e-38f;  // 2^-126
  return most == 0.0f ? 1.0f : fmaxf(__fdiv_rn(most, 448.0f), kLeastScale);
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
    std::uint32_t most = __vmaxu2(__vmaxu2(finite_magnitudes(x.x), finite_magnitudes(x.y)),
                                  __vmaxu2(finite_magnitudes(x.z), finite_magnitudes(x.w)));
    for (std::uint32_t step = kLanesPerBlock / 2; step > 0; step /= 2) {
      most = __vmaxu2(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
    }
    const float scale = scale_of(bf16_low(max(most & 0xFFFFu, most >> 16)));
    const float inverse = __fdiv_rn(1.0f, scale);
    if (!inside) continue;
    const std::uint32_t low = e4m3_pair(x.x, inverse) | e4m3_pair(x.y, inverse) << 16;
    const std::uint32_t high = e4m3_pair(x.z, inverse) | e4m3_pair(x.w, inverse) << 16;
    *reinterpret_cast<uint2*>(out + column) = make_uint2(low, high);
    if (lane % kLanesPerBlock == 0) scales[block] = scale;
  }
}

}  // namespace xd::ep::cuda
