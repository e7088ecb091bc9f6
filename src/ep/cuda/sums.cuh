// Arithmetic on rows, in 16-byte vectors, with the order and the rounding of ep.h and the bits of
// the CPU executor: NaN that comes out of arithmetic is the quiet one without sign and payload; a
// row that is only copied keeps its NaNs, made quiet. Compiled without fused multiply-add.
#pragma once

#include <cuda_fp16.h>

#include "ep/cuda/quantise.cuh"

namespace xd::ep::cuda {

struct Bf16 {
  static constexpr int kPerVector = 8, kBytes = 2;
  __device__ static void unpack(const uint4& v, float* x) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = bf16_low(words[i]);
      x[2 * i + 1] = bf16_high(words[i]);
    }
  }
  __device__ static uint4 pack(const float* x) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = x[2 * i], high = x[2 * i + 1];
      std::uint32_t w = ptx::pack_bf16(low, high);
      if (low != low) w = (w & 0xFFFF0000u) | 0x7FC0u;
      if (high != high) w = (w & 0x0000FFFFu) | 0x7FC00000u;
      words[i] = w;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ static std::uint32_t quiet(std::uint32_t w) {
    if ((w & 0x7FFFu) > 0x7F80u) w |= 0x40u;
    if ((w & 0x7FFF0000u) > 0x7F800000u) w |= 0x400000u;
    return w;
  }
};

struct F16 {
  static constexpr int kPerVector = 8, kBytes = 2;
  __device__ static void unpack(const uint4& v, float* x) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xFFFFu)));
      x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
    }
  }
  __device__ static uint4 pack(const float* x) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto half = [](float y) -> std::uint32_t {
        return y != y ? 0x7E00u : __half_as_ushort(__float2half_rn(y));
      };
      words[i] = half(x[2 * i]) | half(x[2 * i + 1]) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ static std::uint32_t quiet(std::uint32_t w) {
    if ((w & 0x7FFFu) > 0x7C00u) w |= 0x200u;
    if ((w & 0x7FFF0000u) > 0x7C000000u) w |= 0x2000000u;
    return w;
  }
};

struct F32 {
  static constexpr int kPerVector = 4, kBytes = 4;
  __device__ static void unpack(const uint4& v, float* x) {
    x[0] = __uint_as_float(v.x);
    x[1] = __uint_as_float(v.y);
    x[2] = __uint_as_float(v.z);
    x[3] = __uint_as_float(v.w);
  }
  __device__ static uint4 pack(const float* x) {
    const auto bits = [](float y) { return y != y ? 0x7FC00000u : __float_as_uint(y); };
    return make_uint4(bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3]));
  }
  __device__ static std::uint32_t quiet(std::uint32_t w) {
    return (w & 0x7FFFFFFFu) > 0x7F800000u ? w | 0x400000u : w;
  }
};

template <class T>
__device__ uint4 quiet(uint4 v) {
  return make_uint4(T::quiet(v.x), T::quiet(v.y), T::quiet(v.z), T::quiet(v.w));
}

// The rows of one sum, in order, in shared memory of the warp.
struct Terms {
  static constexpr int kMost = 32;
  const std::byte* row[kMost];
  float weight[kMost];
};

// out[v] = sum of the terms' vectors v, for the warp's lanes over vectors [first, last): rounded
// once. `weighted` multiplies each row first. The first term starts the sum. kInFlight vectors of
// kRows rows each are loaded before the first is used.
template <class T, bool weighted>
__device__ void sum_vectors(std::byte* out, const Terms& terms, int count, std::uint32_t first,
                            std::uint32_t last) {
  constexpr int kRows = 4, kInFlight = 2, kN = T::kPerVector;
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t v = first + lane; v < last; v += 32 * kInFlight) {
    float sum[kInFlight][kN];
    for (int r = 0; r < count; r += kRows) {
      uint4 x[kRows][kInFlight];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (r + i >= count) break;
        const std::byte* row = terms.row[r + i];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          const std::uint32_t at = v + j * 32;
          if (at < last) x[i][j] = ptx::ld_streaming(row + std::uint64_t{at} * 16);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (r + i >= count) break;
        const float weight = weighted ? terms.weight[r + i] : 1.0f;
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          float y[kN];
          T::unpack(x[i][j], y);
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            if (weighted) y[n] = __fmul_rn(weight, y[n]);
            sum[j][n] = r + i == 0 ? y[n] : __fadd_rn(sum[j][n], y[n]);
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const std::uint32_t at = v + j * 32;
      if (at < last) ptx::st_streaming(out + std::uint64_t{at} * 16, T::pack(sum[j]));
    }
  }
}

// out = row, NaNs made quiet.
template <class T>
__device__ void copy_vectors(std::byte* out, const std::byte* row, std::uint32_t first,
                             std::uint32_t last) {
  constexpr int kInFlight = 4;
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t v = first + lane; v < last; v += 32 * kInFlight) {
    uint4 x[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (v + j * 32 < last) x[j] = ptx::ld_streaming(row + std::uint64_t{v + j * 32} * 16);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (v + j * 32 < last) {
        ptx::st_streaming(out + std::uint64_t{v + j * 32} * 16, quiet<T>(x[j]));
      }
    }
  }
}

__device__ inline void zero_vectors(std::byte* out, std::uint32_t first, std::uint32_t last) {
  for (std::uint32_t v = first + threadIdx.x % 32; v < last; v += 32) {
    ptx::st_streaming(out + std::uint64_t{v} * 16, make_uint4(0, 0, 0, 0));
  }
}

// The warp's sum of `count` terms (0 = zeros) into vectors [first, last) of `out`.
template <class T>
__device__ void add_up(std::byte* out, const Terms& terms, int count, bool weighted,
                       std::uint32_t first, std::uint32_t last) {
  if (count == 0) {
    zero_vectors(out, first, last);
  } else if (weighted) {
    sum_vectors<T, true>(out, terms, count, first, last);
  } else if (count == 1) {
    copy_vectors<T>(out, terms.row[0], first, last);
  } else {
    sum_vectors<T, false>(out, terms, count, first, last);
  }
}

// out = weight * row, and the dot product of `other` (may be null) and row: the lanes' products by
// ascending column, then the lanes pairwise. `out` may be `row`.
template <class T>
__device__ float scale_row(std::byte* out, const std::byte* row, const std::byte* other,
                           float weight, std::uint32_t vectors) {
  float dot = 0.0f;
  for (std::uint32_t v = threadIdx.x % 32; v < vectors; v += 32) {
    float x[T::kPerVector], y[T::kPerVector];
    T::unpack(ptx::ld_streaming(row + std::uint64_t{v} * 16), x);
    if (other != nullptr) {
      T::unpack(ptx::ld_streaming(other + std::uint64_t{v} * 16), y);
#pragma unroll
      for (int n = 0; n < T::kPerVector; ++n) dot = __fadd_rn(dot, __fmul_rn(y[n], x[n]));
    }
#pragma unroll
    for (int n = 0; n < T::kPerVector; ++n) x[n] = __fmul_rn(weight, x[n]);
    ptx::st_streaming(out + std::uint64_t{v} * 16, T::pack(x));
  }
  for (int step = 16; step > 0; step /= 2) {
    dot = __fadd_rn(dot, __shfl_xor_sync(0xFFFFFFFFu, dot, step));
  }
  return dot;
}

}  // namespace xd::ep::cuda
