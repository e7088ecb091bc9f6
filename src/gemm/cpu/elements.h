// Conversions and arithmetic on runs of elements, with equal bits on every SIMD target, in a thread
// with standard float modes (base/float_modes.h).
//
// Rounding is to nearest, ties to even. A NaN comes out of narrow() as the type's quiet NaN without
// sign and payload. Eight-bit types saturate: what is out of range becomes the largest number.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace xd::gemm::cpu {

// Between float32 and bf16, fp16, fp32, e4m3 or e5m2. Neither side needs alignment.
void widen(DType type, float* out, const void* in, std::size_t n);
void narrow(DType type, void* out, const float* in, std::size_t n);

void scale(float* x, float factor, std::size_t n);
void scale_by(float* x, const float* factors, std::size_t n);
void add(float* x, const float* y, std::size_t n);
void add_scaled(float* x, const float* y, float factor, std::size_t n);  // two roundings

// The activations of xd_gemm_epilogue. They are made of sums, products and quotients of float32
// alone, whose bits no processor may choose. Their error is below 4e-6, and below 4e-6 of a larger
// result.
void gelu(float* x, std::size_t n);
void dgelu(float* x, const float* pre_activation, std::size_t n);
void relu(float* x, std::size_t n);
void drelu(float* x, const float* pre_activation, std::size_t n);

// The bits of the largest |x|; any NaN counts as larger than all numbers.
std::uint32_t largest_magnitude(const float* x, std::size_t n);

}  // namespace xd::gemm::cpu
