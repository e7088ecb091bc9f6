// Partial sums of combine as float8 e4m3 codes with scales (xd_ep_wire), with the bits of the CPU
// executor. Numbers come from float32, and an infinity becomes a NaN. A NaN's code has no sign: no
// result shows it. Scales are float32 here under every wire; one of e8m0 is the power of two that
// its byte means.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cuda/ptx.cuh"
#include "ep/plan/cuda/quantise.cuh"
#include "ep/plan/cuda/warp.cuh"

namespace xd::ep::cuda {

inline constexpr std::uint32_t kCodeBlock = 128;  // columns that share a scale

// A thread's codes of so many neighbouring columns, four or eight.
template <int kColumns>
struct alignas(kColumns) Codes {
  std::uint32_t word[kColumns / 4];
};

struct CodeScale {
  float scale, inverse;
};

// The scale of a block whose largest finite magnitude is `most`. scale_of() has been tried for all
// float32 numbers; inverse_of() has the steps of the compiler's own division, which is rounded
// right for scales as they are: normal numbers whose reciprocals are normal. It makes no call.
__device__ inline CodeScale code_scale(float most, const QuantiseFormat& format) {
  if (!format.powers) {
    const float scale = scale_of(most);
    return {scale, inverse_of(scale)};
  }
  // As power_of() has it, for a float32.
  const int up = static_cast<int>((__float_as_uint(most) + 0x1FFFFFu) >> 23) - 8;
  const int exponent = format.scale_bytes == 1 ? max(up, 0) : most == 0.0f ? 127 : max(up, 1);
  const std::uint32_t bits =
      exponent == 0 ? 0x00400000u : static_cast<std::uint32_t>(exponent) << 23;
  return {__uint_as_float(bits), __uint_as_float(static_cast<std::uint32_t>(254 - exponent) << 23)};
}

// The largest magnitude; a NaN has none.
template <int kColumns>
__device__ float largest_of(const float (&x)[kColumns]) {
  float most = 0.0f;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) most = fmaxf(fabsf(x[n]), most);
  return most;
}

__device__ inline bool is_infinite(float magnitude) {
  return __float_as_uint(magnitude) == 0x7F800000u;
}

template <int kColumns>
__device__ void make_infinities_nan(float (&x)[kColumns]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    if (is_infinite(fabsf(x[n]))) x[n] = __uint_as_float(0x7FC00000u);
  }
}

// The conversion limits to +-448.
template <int kColumns>
__device__ Codes<kColumns> codes_of(const float (&x)[kColumns], float inverse) {
  Codes<kColumns> codes;
#pragma unroll
  for (int w = 0; w < kColumns / 4; ++w) {
    codes.word[w] =
        ptx::pack_e4m3_four(__fmul_rn(x[4 * w], inverse), __fmul_rn(x[4 * w + 1], inverse),
                            __fmul_rn(x[4 * w + 2], inverse), __fmul_rn(x[4 * w + 3], inverse));
  }
  return codes;
}

// Every code is a number of float16.
template <int kColumns>
__device__ void numbers_of(const Codes<kColumns>& codes, float scale, float (&x)[kColumns]) {
#pragma unroll
  for (int w = 0; w < kColumns / 4; ++w) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::uint32_t pair =
          ptx::unpack_e4m3(static_cast<std::uint16_t>(codes.word[w] >> (16 * h)));
      const float2 numbers = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      x[4 * w + 2 * h] = __fmul_rn(numbers.x, scale);
      x[4 * w + 2 * h + 1] = __fmul_rn(numbers.y, scale);
    }
  }
}

}  // namespace xd::ep::cuda
