// Elements between memory and float32, by vectors of kWidth elements of one row.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "base/dtype.h"
#include "cuda/ptx.cuh"

namespace xd::gemm::cuda {

// The type in which partial sums lie, and the number of elements that fill 16 bytes.
template <DType kType>
inline constexpr int kWidth = kType == DType::f32 ? 4 : 8;

__device__ inline float bf16_low(std::uint32_t v) { return __uint_as_float(v << 16); }
__device__ inline float bf16_high(std::uint32_t v) { return __uint_as_float(v & 0xFFFF0000u); }
__device__ inline float2 f16_pair(std::uint32_t v) {
  return __half22float2(*reinterpret_cast<const __half2*>(&v));
}

// 16 bytes of partial sums as float32.
template <DType kType>
__device__ inline void widen(const uint4& v, float (&to)[kWidth<kType>]) {
  const std::uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kType == DType::f32) {
      to[i] = __uint_as_float(word[i]);
    } else if constexpr (kType == DType::bf16) {
      to[2 * i] = bf16_low(word[i]);
      to[2 * i + 1] = bf16_high(word[i]);
    } else {
      const float2 pair = f16_pair(word[i]);
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  }
}

// Loads kCount elements of bf16, fp16 or fp32 that begin at element `at`, a multiple of kCount.
template <int kCount>
__device__ inline void load(const std::byte* from, DType type, std::int64_t at,
                            float (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    if (type == DType::f32) {
      const auto pair = reinterpret_cast<const float2*>(from)[(at + i) / 2];
      to[i] = pair.x;
      to[i + 1] = pair.y;
      continue;
    }
    const std::uint32_t v = reinterpret_cast<const std::uint32_t*>(from)[(at + i) / 2];
    const float2 pair = type == DType::bf16 ? make_float2(bf16_low(v), bf16_high(v)) : f16_pair(v);
    to[i] = pair.x;
    to[i + 1] = pair.y;
  }
}

// The same from a tensor whose elements alone are aligned.
template <int kCount>
__device__ inline void load_any(const std::byte* from, DType type, std::int64_t at,
                                float (&to)[kCount]) {
  if (reinterpret_cast<std::uintptr_t>(from) % 8 == 0) return load(from, type, at, to);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (type == DType::f32) {
      to[i] = reinterpret_cast<const float*>(from)[at + i];
    } else {
      const std::uint32_t v = reinterpret_cast<const std::uint16_t*>(from)[at + i];
      to[i] = type == DType::bf16 ? bf16_low(v) : f16_pair(v).x;
    }
  }
}

// Rounds kCount elements to `type`, to nearest, ties to even, fp8 with saturation, and stores them
// from element `at` on, a multiple of kCount.
template <int kCount>
__device__ inline void store(std::byte* to, DType type, std::int64_t at,
                             const float (&from)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float* f = from + i;
    const std::int64_t group = (at + i) / 4;
    if (type == DType::f32) {
      reinterpret_cast<float4*>(to)[group] = make_float4(f[0], f[1], f[2], f[3]);
    } else if (type == DType::bf16) {
      reinterpret_cast<uint2*>(to)[group] =
          make_uint2(ptx::pack_bf16(f[0], f[1]), ptx::pack_bf16(f[2], f[3]));
    } else if (type == DType::f16) {
      reinterpret_cast<uint2*>(to)[group] =
          make_uint2(ptx::pack_f16(f[0], f[1]), ptx::pack_f16(f[2], f[3]));
    } else {
      const bool e4m3 = type == DType::e4m3;
      const std::uint32_t low = e4m3 ? ptx::pack_e4m3(f[0], f[1]) : ptx::pack_e5m2(f[0], f[1]);
      const std::uint32_t high = e4m3 ? ptx::pack_e4m3(f[2], f[3]) : ptx::pack_e5m2(f[2], f[3]);
      reinterpret_cast<std::uint32_t*>(to)[group] = low | high << 16;
    }
  }
}

}  // namespace xd::gemm::cuda
