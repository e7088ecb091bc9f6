// Quantises rows in registers: 16 columns a thread, so that 8 neighbouring lanes share a block of
// 128. The arithmetic is that of ep/plan/cuda/quantise.cuh, and so are the bits.
#pragma once

#include "ep/plan/cuda/quantise.cuh"
#include "ep/plan/cuda/warp.cuh"

namespace xd::ep::cuda {

struct LlQuantised {
  uint4 elements;
  // The block's scale: bits of a float32, or an e8m0.
  std::uint32_t scale;
};

inline constexpr int kLanesPerScale = 8;

// The larger magnitude of a block, in either half; `not_finite_bits` = this lane has numbers that
// are not finite, which do not count.
__device__ inline std::uint32_t most_of_block(const uint4& a, const uint4& b, bool& finite) {
  std::uint32_t most = most_of(a, most_of(b, 0));
  finite = !__any_sync(kAllLanes, not_finite(most) != 0);
  if (!finite) most = finite_most_of(a, finite_most_of(b, 0));
#pragma unroll
  for (int step = kLanesPerScale / 2; step > 0; step /= 2) {
    most = __vmaxu2(most, __shfl_xor_sync(kAllLanes, most, step));
  }
  return max(most & 0xFFFFu, most >> 16);
}

__device__ inline uint4 e4m3_of_both(const uint4& a, const uint4& b, float inverse, bool finite) {
  const uint2 low = quantised(a, inverse, finite), high = quantised(b, inverse, finite);
  return make_uint4(low.x, low.y, high.x, high.y);
}

// All lanes of a warp. `a` and `b`: 16 columns, which follow one another.
template <class Quantiser>
__device__ LlQuantised quantise_columns(const uint4& a, const uint4& b,
                                        const QuantiseFormat& format) {
  bool finite = true;
  const std::uint32_t most = most_of_block(a, b, finite);
  if constexpr (Quantiser::kFloatScales) {
    const float scale = scale_of(bf16_low(most));
    return {e4m3_of_both(a, b, inverse_of(scale), finite), __float_as_uint(scale)};
  } else {
    const bool bytes = format.scale_bytes == 1;
    const int exponent = bytes ? power_of(most, 0) : most == 0 ? 127 : power_of(most, 1);
    const float inverse = __uint_as_float(static_cast<std::uint32_t>(254 - exponent) << 23);
    return {e4m3_of_both(a, b, inverse, finite), static_cast<std::uint32_t>(exponent)
                                                     << (bytes ? 0 : 23)};
  }
}

// Puts a block's scale into a row of scales, in shared memory.
__device__ inline void put_scale(std::byte* scales, std::uint32_t block, std::uint32_t scale,
                                 const QuantiseFormat& format) {
  if (format.scale_bytes == 1) {
    scales[block] = static_cast<std::byte>(scale);
  } else {
    reinterpret_cast<std::uint32_t*>(scales)[block] = scale;
  }
}

}  // namespace xd::ep::cuda
