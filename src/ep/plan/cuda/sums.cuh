// Arithmetic on rows, in 16-byte vectors, with the order and the rounding of ep.h and the bits of
// the CPU executor. A NaN that comes out of arithmetic is the quiet one without sign and payload; a
// row that is only copied keeps its NaNs, made quiet. The code is compiled without fused
// multiply-add. Only the terms of dot products are added in another order than the CPU's.
#pragma once

#include <cuda_fp16.h>

#include "ep/plan/cuda/quantise.cuh"
#include "ep/plan/cuda/row_pieces.h"

namespace xd::ep::cuda {

// Vectors of numbers that are halves of words; `Half` says what a half means.
template <class Half>
struct Halves {
  static constexpr int kPerVector = 8, kBytes = 2;
  __device__ static void unpack(const uint4& v, float* x) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = Half::low(words[i]);
      x[2 * i + 1] = Half::high(words[i]);
    }
  }
};

struct Bf16 : Halves<Bf16> {
  // A half with a magnitude above kInfinity is a NaN.
  static constexpr std::uint32_t kInfinity = 0x7F80, kQuiet = 0x40;
  __device__ static float low(std::uint32_t word) { return bf16_low(word); }
  __device__ static float high(std::uint32_t word) { return bf16_high(word); }
  __device__ static std::uint32_t round(float low, float high) { return ptx::pack_bf16(low, high); }
};

struct F16 : Halves<F16> {
  static constexpr std::uint32_t kInfinity = 0x7C00, kQuiet = 0x200;
  __device__ static float low(std::uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xFFFFu)));
  }
  __device__ static float high(std::uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
  __device__ static std::uint32_t round(float low, float high) { return ptx::pack_f16(low, high); }
};

struct F32 {
  static constexpr int kPerVector = 4, kBytes = 4;
  __device__ static void unpack(const uint4& v, float* x) {
    x[0] = __uint_as_float(v.x);
    x[1] = __uint_as_float(v.y);
    x[2] = __uint_as_float(v.z);
    x[3] = __uint_as_float(v.w);
  }
};

// Sets the top bit of each half that is a NaN.
template <class T>
__device__ std::uint32_t nan_halves(std::uint32_t word) {
  return ((word & 0x7FFF7FFFu) + (0x7FFFu - T::kInfinity) * 0x10001u) & 0x80008000u;
}

// Rounds sums to a vector. NaNs are rare, so the code looks for them in the result, all at once.
template <class T>
__device__ uint4 pack(const float* x) {
  uint4 v;
  if constexpr (T::kBytes == 4) {
    v = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                   __float_as_uint(x[3]));
    const auto fix = [](std::uint32_t w) {
      return (w & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : w;
    };
    return make_uint4(fix(v.x), fix(v.y), fix(v.z), fix(v.w));
  } else {
    v = make_uint4(T::round(x[0], x[1]), T::round(x[2], x[3]), T::round(x[4], x[5]),
                   T::round(x[6], x[7]));
    const std::uint32_t nans =
        nan_halves<T>(v.x) | nan_halves<T>(v.y) | nan_halves<T>(v.z) | nan_halves<T>(v.w);
    if (nans == 0) return v;
    const auto fix = [](std::uint32_t w) {
      const std::uint32_t halves = (nan_halves<T>(w) >> 15) * 0xFFFFu;
      return (w & ~halves) | ((T::kInfinity | T::kQuiet) * 0x10001u & halves);
    };
    return make_uint4(fix(v.x), fix(v.y), fix(v.z), fix(v.w));
  }
}

// Copies a vector. Its NaNs become quiet and keep sign and payload.
template <class T>
__device__ uint4 quiet(uint4 v) {
  const auto fix = [](std::uint32_t w) -> std::uint32_t {
    if constexpr (T::kBytes == 4) {
      return (w & 0x7FFFFFFFu) > 0x7F800000u ? w | 0x400000u : w;
    } else {
      return w | (nan_halves<T>(w) >> 15) * T::kQuiet;
    }
  };
  return make_uint4(fix(v.x), fix(v.y), fix(v.z), fix(v.w));
}

// The terms of a sum on their way to the lanes of a warp: each lane copies its own vectors of some
// terms ahead into shared memory, and takes them out in the same order. So the copies of a
// multiprocessor's warps keep its links busy while the warps add. No lane reads what another has
// copied, so nothing is waited for but the lane's own copies.
class TermRing : TermPieces {
 public:
  // Begins with the first terms of vectors [first, last). `shared`: this warp's kBytes.
  __device__ TermRing(std::byte* shared, const WarpTerms& terms, int count, std::uint32_t first,
                      std::uint32_t last)
      : own_(shared + threadIdx.x % 32 * 16),
        terms_(terms),
        count_(count),
        at_(first + threadIdx.x % 32),
        last_(last) {
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) load_next();
  }

  // Takes the vectors of the next term: of term 0 .. count - 1 of the first columns, then of the
  // next ones. Vectors behind the last one have any value.
  __device__ void take(uint4 (&x)[kVectors]) {
    ptx::copy_async_wait<kAhead - 1>();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      x[j] = *reinterpret_cast<const uint4*>(own_ + place_ + j * 512);
    }
    load_next();
  }

 private:
  // Fills the place that has just been read. There is a group for each place, also behind the end.
  __device__ void load_next() {
    if (at_ < last_) {
      const std::byte* from = terms_.row[term_] + std::uint64_t{at_} * 16;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (at_ + j * 32 < last_) ptx::copy_async(own_ + place_ + j * 512, from + j * 512);
      }
    }
    ptx::copy_async_commit();
    place_ = place_ + kColumns * 16 < kBytes ? place_ + kColumns * 16 : 0;
    if (++term_ < count_) return;
    term_ = 0;
    at_ += kColumns;
  }

  std::byte* const own_;
  const WarpTerms& terms_;
  const int count_;
  int term_ = 0;             // the next term to load,
  std::uint32_t at_;         // its vector,
  std::uint32_t place_ = 0;  // and where it goes, and where the oldest lies, as a byte offset
  const std::uint32_t last_;
};

// sum += vector, times its weight where terms have some. Sums start at -0, which adds nothing to
// any number, not even to -0.
template <class T, bool kWeighted = true>
__device__ void add_term(float* sum, const uint4& vector, float weight) {
  float x[T::kPerVector];
  T::unpack(vector, x);
#pragma unroll
  for (int n = 0; n < T::kPerVector; ++n) {
    sum[n] = __fadd_rn(sum[n], kWeighted ? __fmul_rn(weight, x[n]) : x[n]);
  }
}

// out[v] = sum of the terms' vectors v, for the warp's lanes over vectors [first, last), rounded
// once. A single term without weight is copied.
template <class T, bool kWeighted>
__device__ void sum_vectors(std::byte* out, std::byte* ring, const WarpTerms& terms, int count,
                            std::uint32_t first, std::uint32_t last) {
  constexpr int kVectors = TermPieces::kVectors;
  TermRing coming(ring, terms, count, first, last);
#pragma unroll 1
  for (; first < last; first += TermPieces::kColumns) {
    const std::uint32_t v = first + threadIdx.x % 32;
    float sum[kVectors][T::kPerVector];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int n = 0; n < T::kPerVector; ++n) sum[j][n] = -0.0f;
    }
    uint4 x[kVectors];
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      coming.take(x);
      const float weight = kWeighted ? terms.weight[r] : 1.0f;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) add_term<T, kWeighted>(sum[j], x[j], weight);
    }
    const bool copies = !kWeighted && count == 1;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (v + j * 32 < last) {
        ptx::st_streaming(out + std::uint64_t{v + j * 32} * 16,
                          copies ? quiet<T>(x[j]) : pack<T>(sum[j]));
      }
    }
  }
}

__device__ inline void zero_vectors(std::byte* out, std::uint32_t first, std::uint32_t last) {
#pragma unroll 1
  for (std::uint32_t v = first + threadIdx.x % 32; v < last; v += 32) {
    ptx::st_streaming(out + std::uint64_t{v} * 16, make_uint4(0, 0, 0, 0));
  }
}

// Writes the warp's sum of `count` terms (0 = zeros) into vectors [first, last) of `out`. `ring`:
// the warp's TermPieces::kBytes of shared memory.
template <class T>
__device__ void add_up(std::byte* out, std::byte* ring, const WarpTerms& terms, int count,
                       bool weighted, std::uint32_t first, std::uint32_t last) {
  if (count == 0) {
    zero_vectors(out, first, last);
  } else if (weighted) {
    sum_vectors<T, true>(out, ring, terms, count, first, last);
  } else {
    sum_vectors<T, false>(out, ring, terms, count, first, last);
  }
}

}  // namespace xd::ep::cuda
