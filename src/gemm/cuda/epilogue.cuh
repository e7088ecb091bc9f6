// The steps of a float32 sum on its way into D: see xd_gemm_epilogue.
#pragma once

#include "gemm/cuda/elements.cuh"
#include "gemm/cuda/params.h"

namespace xd::gemm::cuda {

// sqrt(2/pi), and the factor of the cube, of gelu's tanh form.
inline constexpr float kGeluScale = 0.7978845608028654f;
inline constexpr float kGeluCube = 0.044715f;

__device__ inline float gelu(float x) {
  return 0.5f * x * (1.0f + tanhf(kGeluScale * (x + kGeluCube * x * x * x)));
}

__device__ inline float gelu_slope(float x) {
  const float t = tanhf(kGeluScale * (x + kGeluCube * x * x * x));
  return 0.5f * (1.0f + t) +
         0.5f * x * (1.0f - t * t) * kGeluScale * (1.0f + 3.0f * kGeluCube * x * x);
}

// Applies the epilogue to kCount sums at element `at` of D, column `column`; stores the value
// before the activation where that is wanted. Stores nothing else.
template <int kCount>
__device__ inline void activate(const Epilogue& e, std::int64_t at, std::int64_t column,
                                float (&x)[kCount]) {
  float other[kCount];
  if (e.c != nullptr) {
    load(e.c, e.c_type, at, other);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += e.beta * other[i];
  }
  if (e.bias != nullptr) {
    load_any(e.bias, e.bias_type, column, other);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += other[i];
  }
  const bool backward =
      e.activation == XD_GEMM_EPILOGUE_DGELU || e.activation == XD_GEMM_EPILOGUE_DRELU;
  if (backward) {
    load(e.pre_activation, e.pre_type, at, other);
  } else if (e.pre_activation != nullptr) {
    store(e.pre_activation, e.pre_type, at, x);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    switch (e.activation) {
      case XD_GEMM_EPILOGUE_NONE:
        break;
      case XD_GEMM_EPILOGUE_GELU:
        x[i] = gelu(x[i]);
        break;
      case XD_GEMM_EPILOGUE_DGELU:
        x[i] *= gelu_slope(other[i]);
        break;
      // A NaN stays one, and zero stays positive.
      case XD_GEMM_EPILOGUE_RELU:
        x[i] = x[i] <= 0.0f ? 0.0f : x[i];
        break;
      case XD_GEMM_EPILOGUE_DRELU:
        x[i] = other[i] > 0.0f ? x[i] : 0.0f;
        break;
    }
  }
}

// The largest |x| of a thread so far, as bits: those of a NaN are larger than those of any number.
template <int kCount>
__device__ inline void note_largest(const float (&x)[kCount], std::uint32_t& largest) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7FFFFFFFu);
}

// All threads of a block, when they have noted all they have.
__device__ inline void keep_largest(const Epilogue& e, std::uint32_t largest) {
  if (e.d_amax == nullptr) return;
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  // Relaxed: the next kernel reads it.
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<std::uint32_t*>(e.d_amax), largest);
}

// The whole way from sums to D.
template <int kCount>
__device__ inline void finish(const Epilogue& e, std::int64_t at, std::int64_t column,
                              float (&x)[kCount], std::uint32_t& largest) {
  activate(e, at, column, x);
  if (e.d_amax != nullptr) note_largest(x, largest);
  if (e.exact != nullptr) store(reinterpret_cast<std::byte*>(e.exact), DType::f32, at, x);
  if (e.d_scale != nullptr) {
    const float scale = *e.d_scale;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= scale;
  }
  store(e.d, e.d_type, at, x);
}

}  // namespace xd::gemm::cuda
