// Turns bfloat16 rows into float8 e4m3 rows with scales, as xd_ep_quantise describes it, with the
// bits of the CPU executor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/ptx.cuh"
#include "ep/plan/quantise.h"

namespace xd::ep::cuda {

__device__ inline float bf16_low(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float bf16_high(std::uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// The magnitudes of a word's two numbers, in the halves of the result.
__device__ inline std::uint32_t magnitudes(std::uint32_t pair) { return pair & 0x7FFF7FFFu; }

// Sets the top bit of each half whose magnitude is infinity or NaN.
__device__ inline std::uint32_t not_finite(std::uint32_t magnitudes) {
  return (magnitudes + (0x8000u - 0x7F80u) * 0x10001u) & 0x80008000u;
}

// The magnitudes of a word's two numbers; 0 for a number that is not finite.
__device__ inline std::uint32_t finite_magnitudes(std::uint32_t pair) {
  return magnitudes(pair) & ~((not_finite(magnitudes(pair)) >> 15) * 0xFFFFu);
}

// The larger halves of `most` and the magnitudes of four words. Where some number is not finite,
// nor are they.
__device__ inline std::uint32_t most_of(const uint4& x, std::uint32_t most) {
  most = ptx::max_magnitudes_bf16x2(x.x, ptx::max_magnitudes_bf16x2(x.y, most));
  return ptx::max_magnitudes_bf16x2(x.z, ptx::max_magnitudes_bf16x2(x.w, most));
}
// The same without numbers that are not finite.
__device__ inline std::uint32_t finite_most_of(const uint4& x, std::uint32_t most) {
  const auto larger = [&](std::uint32_t pair) { return __vmaxu2(finite_magnitudes(pair), most); };
  most = larger(x.x);
  most = larger(x.y);
  most = larger(x.z);
  return larger(x.w);
}

// Converts a vector of eight numbers; the conversion limits to +-448. A NaN keeps its sign, which
// the conversion alone would drop.
template <bool kFinite>
__device__ __forceinline__ uint2 e4m3_of(const uint4& x, float inverse) {
  const auto four = [&](std::uint32_t a, std::uint32_t b) {
    const std::uint32_t bytes =
        ptx::pack_e4m3_four(__fmul_rn(bf16_low(a), inverse), __fmul_rn(bf16_high(a), inverse),
                            __fmul_rn(bf16_low(b), inverse), __fmul_rn(bf16_high(b), inverse));
    constexpr unsigned kUpperBytes = 0x7531;  // of the four numbers
    return kFinite ? bytes : bytes | (__byte_perm(a, b, kUpperBytes) & 0x80808080u);
  };
  return make_uint2(four(x.x, x.y), four(x.z, x.w));
}

// The scale of a block whose largest finite magnitude is `most`, a bfloat16: most / 448, rounded as
// a division rounds, and at least 2^-126. The remainder of the first quotient corrects it; that all
// bfloat16 come out right has been tried.
__device__ inline float scale_of(float most) {
  constexpr float kLeastScale = 1.17549435e-38f, kInverse = 1.0f / 448.0f;
  const float quotient = __fmul_rn(most, kInverse);
  const float rest = __fmaf_rn(-quotient, 448.0f, most);
  return most == 0.0f ? 1.0f : fmaxf(__fmaf_rn(rest, kInverse, quotient), kLeastScale);
}

// 1 / scale, rounded to nearest, for every scale that scale_of() gives: likewise.
__device__ inline float inverse_of(float scale) {
  const float near = ptx::approximate_reciprocal(scale);
  return __fmaf_rn(near, __fmaf_rn(-scale, near, 1.0f), near);
}

constexpr unsigned kWholeWarp = 0xFFFFFFFFu;
constexpr std::uint32_t kColumnsPerVector = 8;

__device__ __forceinline__ uint2 quantised(const uint4& x, float inverse, bool finite) {
  return finite ? e4m3_of<true>(x, inverse) : e4m3_of<false>(x, inverse);
}

// Quantises by FP8_BLOCK128, in place: byte c of the piece becomes column c. All lanes of a warp
// call it, with `columns` a multiple of 128 and all pointers in shared memory, the piece at a
// multiple of 128. Two lanes share a block, so a warp has sixteen blocks at a time. These
// instructions keep a multiprocessor busy, so the code for numbers that are not finite runs only
// where there are some.
__device__ inline void quantise_by_quotients(std::byte* piece, float* scales,
                                             std::uint32_t columns) {
  constexpr int kVectors = 8;  // of each lane
  constexpr std::uint32_t kLanesPerBlock = 2, kBlocksAtOnce = 32 / kLanesPerBlock;
  static_assert(kVectors * kLanesPerBlock * kColumnsPerVector == 128);
  const std::uint32_t lane = threadIdx.x % 32, own = lane / kLanesPerBlock;
  const std::uint32_t blocks = columns / 128;
  // Neighbouring blocks take their vectors in different orders, and so lanes use different banks.
  const auto column_of = [&](int i) {
    return ((i ^ own % kVectors) * kLanesPerBlock + lane % kLanesPerBlock) * kColumnsPerVector;
  };
#pragma unroll 1
  for (std::uint32_t first = 0; first < blocks; first += kBlocksAtOnce) {
    const std::uint32_t block = first + own;
    const std::byte* from = piece + min(block, blocks - 1) * 256;
    uint4 x[kVectors];
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      x[i] = *reinterpret_cast<const uint4*>(from + column_of(i) * 2);
      most = most_of(x[i], most);
    }
    const bool finite = !__any_sync(kWholeWarp, not_finite(most) != 0);
    if (!finite) {
      most = 0;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) most = finite_most_of(x[i], most);
    }
    most = __vmaxu2(most, __shfl_xor_sync(kWholeWarp, most, 1));
    __syncwarp();  // all lanes have loaded theirs
    const float scale = scale_of(bf16_low(max(most & 0xFFFFu, most >> 16)));
    const float inverse = inverse_of(scale);
    if (block >= blocks) continue;
    std::byte* to = piece + block * 128;
    if (finite) {  // here alone, so that the instructions of all vectors mix
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        *reinterpret_cast<uint2*>(to + column_of(i)) = e4m3_of<true>(x[i], inverse);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        *reinterpret_cast<uint2*>(to + column_of(i)) = e4m3_of<false>(x[i], inverse);
      }
    }
    if (lane % kLanesPerBlock == 0) scales[block] = scale;
  }
}

// The biased exponent of the smallest power of two that most / 448 does not exceed, at least
// `bound`; `most` is the magnitude of a finite bfloat16. 448 = 1.75 * 2^8, so the addend is chosen
// such that a mantissa above 1.75 carries into the exponent.
__device__ inline int power_of(std::uint32_t most, int bound) {
  return max(static_cast<int>((most + 0x1Fu) >> 7) - 8, bound);
}

// log2 of a block's columns.
__device__ inline int block_bits(const QuantiseFormat& format) {
  return __ffs(static_cast<int>(format.block)) - 1;
}

// Quantises with scales that are powers of two, as float32 or e8m0. It is like
// quantise_by_quotients(), but a block has eight columns for each of 2, 4, 8 or 16 lanes.
__device__ inline void quantise_by_powers(std::byte* piece, std::byte* scales,
                                          std::uint32_t columns, const QuantiseFormat& format) {
  constexpr int kVectorsAtOnce = 4;  // of each lane
  constexpr std::uint32_t kColumnsPerWarp = 32 * kColumnsPerVector;
  const std::uint32_t own_column = threadIdx.x % 32 * kColumnsPerVector;
  const bool bytes = format.scale_bytes == 1;
  for (std::uint32_t first = own_column; first - own_column < columns;
       first += kVectorsAtOnce * kColumnsPerWarp) {
    uint4 x[kVectorsAtOnce];
    std::uint32_t most[kVectorsAtOnce], not_finite_bits = 0;
#pragma unroll
    for (int i = 0; i < kVectorsAtOnce; ++i) {
      const std::uint32_t column = first + i * kColumnsPerWarp;
      const std::byte* at = piece + column * 2;
      x[i] = column < columns ? *reinterpret_cast<const uint4*>(at) : uint4{0, 0, 0, 0};
      most[i] = most_of(x[i], 0);
      not_finite_bits |= not_finite(most[i]);
    }
    const bool finite = !__any_sync(kWholeWarp, not_finite_bits != 0);
    if (!finite) {
#pragma unroll
      for (int i = 0; i < kVectorsAtOnce; ++i) most[i] = finite_most_of(x[i], 0);
    }
    __syncwarp();  // all lanes have loaded theirs
    for (std::uint32_t step = format.block / kColumnsPerVector / 2; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kVectorsAtOnce; ++i) {
        most[i] = __vmaxu2(most[i], __shfl_xor_sync(kWholeWarp, most[i], step));
      }
    }
#pragma unroll
    for (int i = 0; i < kVectorsAtOnce; ++i) {
      const std::uint32_t column = first + i * kColumnsPerWarp;
      if (column >= columns) continue;
      const std::uint32_t largest = max(most[i] & 0xFFFFu, most[i] >> 16);
      const int exponent = bytes ? power_of(largest, 0) : largest == 0 ? 127 : power_of(largest, 1);
      const float inverse = __uint_as_float(static_cast<std::uint32_t>(254 - exponent) << 23);
      *reinterpret_cast<uint2*>(piece + column) = quantised(x[i], inverse, finite);
      if ((column & (format.block - 1)) != 0) continue;
      const std::uint32_t block = column >> block_bits(format);
      if (bytes) {
        scales[block] = static_cast<std::byte>(exponent);
      } else {
        reinterpret_cast<std::uint32_t*>(scales)[block] = static_cast<std::uint32_t>(exponent)
                                                          << 23;
      }
    }
  }
}

// The quantiser of a kernel that never quantises. It has no code.
struct NotQuantised {
  static constexpr bool kQuantises = false;
};
struct ByQuotients {
  static constexpr bool kQuantises = true, kFloatScales = true;
  __device__ static std::uint32_t scale_bytes(std::uint32_t columns, const QuantiseFormat&) {
    return columns / 128 * 4;
  }
  __device__ static void quantise(std::byte* piece, std::byte* scales, std::uint32_t columns,
                                  const QuantiseFormat&) {
    quantise_by_quotients(piece, reinterpret_cast<float*>(scales), columns);
  }
};
struct ByPowers {
  static constexpr bool kQuantises = true, kFloatScales = false;  // rows are not always quantised
  __device__ static std::uint32_t scale_bytes(std::uint32_t columns, const QuantiseFormat& format) {
    return (columns >> block_bits(format)) * format.scale_bytes;
  }
  __device__ static void quantise(std::byte* piece, std::byte* scales, std::uint32_t columns,
                                  const QuantiseFormat& format) {
    quantise_by_powers(piece, scales, columns, format);
  }
};

}  // namespace xd::ep::cuda
