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

// The magnitudes of a word's two numbers, in the halves of the result; 0 for those not finite.
__device__ inline std::uint32_t finite_magnitudes(std::uint32_t pair) {
  const std::uint32_t magnitudes = pair & 0x7FFF7FFFu;
  // In the top bit of each half: at least infinity.
  const std::uint32_t far = (magnitudes + (0x8000u - 0x7F80u) * 0x10001u) & 0x80008000u;
  return magnitudes & ~((far >> 15) * 0xFFFFu);
}

// The conversion limits to +-448; NaN keeps its sign, which the conversion would not.
__device__ inline std::uint32_t e4m3_pair(std::uint32_t pair, float inverse) {
  const std::uint32_t converted =
      ptx::pack_e4m3(__fmul_rn(bf16_low(pair), inverse), __fmul_rn(bf16_high(pair), inverse));
  return converted | (pair >> 8 & 0x80u) | (pair >> 16 & 0x8000u);
}

// Of the numbers of a block with this largest finite magnitude.
__device__ inline float scale_of(float most) {
  constexpr float kLeastScale = 1.17549435e-38f;  // 2^-126
  return most == 0.0f ? 1.0f : fmaxf(__fdiv_rn(most, 448.0f), kLeastScale);
}

// All lanes of a warp; `columns` a multiple of 128. In shared memory. Sixteen lanes share a block,
// so a warp has two at a time; some pairs of blocks are on their way at once.
__device__ inline void quantise_piece(std::byte* out, float* scales, const std::byte* in,
                                      std::uint32_t columns) {
  constexpr std::uint32_t kLanesPerBlock = 16, kColumnsPerLane = 8;
  constexpr int kAtOnce = 4;
  const std::uint32_t lane = threadIdx.x % 32, half = lane / kLanesPerBlock;
  const std::uint32_t blocks = columns / 128;
  for (std::uint32_t first = 0; first < blocks; first += 2 * kAtOnce) {
    uint4 x[kAtOnce];
    std::uint32_t most[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::uint32_t block = first + 2 * i + half;
      const std::uint32_t column = block * 128 + lane % kLanesPerBlock * kColumnsPerLane;
      x[i] = block < blocks ? *reinterpret_cast<const uint4*>(in + column * 2) : uint4{0, 0, 0, 0};
      most[i] = __vmaxu2(__vmaxu2(finite_magnitudes(x[i].x), finite_magnitudes(x[i].y)),
                         __vmaxu2(finite_magnitudes(x[i].z), finite_magnitudes(x[i].w)));
    }
    for (std::uint32_t step = kLanesPerBlock / 2; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        most[i] = __vmaxu2(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], step));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::uint32_t block = first + 2 * i + half;
      const float scale = scale_of(bf16_low(max(most[i] & 0xFFFFu, most[i] >> 16)));
      const float inverse = __fdiv_rn(1.0f, scale);
      if (block >= blocks) continue;
      const std::uint32_t low = e4m3_pair(x[i].x, inverse) | e4m3_pair(x[i].y, inverse) << 16;
      const std::uint32_t high = e4m3_pair(x[i].z, inverse) | e4m3_pair(x[i].w, inverse) << 16;
      const std::uint32_t column = block * 128 + lane % kLanesPerBlock * kColumnsPerLane;
      *reinterpret_cast<uint2*>(out + column) = make_uint2(low, high);
      if (lane % kLanesPerBlock == 0) scales[block] = scale;
    }
  }
}

}  // namespace xd::ep::cuda
