// The forms in which partial sums of a combine travel. A mover has the same columns of each row,
// and of each sum a value of 16 bytes, `partial`: two words that it polls. A form `F` says
//   T, kColumns, kBytes   the payload type, a mover's columns, and their bytes in a row
//   kWire                 it is not that of XD_EP_WIRE_SAME
//   kShared               movers of a warp poll words of others, which one of them frees
//   Place                 a mover's words in a row of partial sums
// and how rows become partial sums, and those the result.
#pragma once

#include "ep/plan/cuda/codes.cuh"
#include "ep/plan/cuda/sums.cuh"
#include "ep/slots/cuda/params.h"
#include "ep/slots/cuda/words.cuh"

namespace xd::ep::cuda {

// sum += vector.
template <class T>
__device__ void add_vector(float* sum, const uint4& vector) {
  float x[T::kPerVector];
  T::unpack(vector, x);
#pragma unroll
  for (int n = 0; n < T::kPerVector; ++n) sum[n] = __fadd_rn(sum[n], x[n]);
}

// Words that lie in a row as its vectors do.
struct LlVectorPlace {
  std::byte* at;

  __device__ LlVectorPlace(std::byte* row, std::uint32_t vector, const LlCombineParams&)
      : at(row + vector * 16) {}
  __device__ ulonglong2 load(std::uint64_t offset) const {
    return ptx::ld_relaxed_sys_pair(at + offset);
  }
  __device__ void send(const uint4& partial) const { send_pair(at, words_of(partial)); }
  __device__ void put_back(std::uint64_t offset) const { put_back_pair(at + offset); }
};

// Rounded to the payload type. A sum of one row is a copy.
template <class Payload>
struct LlSame {
  using T = Payload;
  using Place = LlVectorPlace;
  static constexpr bool kWire = false, kShared = false;
  static constexpr int kColumns = T::kPerVector;
  static constexpr std::uint32_t kBytes = 16;

  __device__ static uint4 load_row(const std::byte* at) { return ptx::ld_streaming(at); }
  __device__ static void add_row(float* sum, const uint4& row, float weight) {
    add_term<T>(sum, row, weight);
  }
  __device__ static uint4 partial_of(const LlCombineParams&, float* sum) { return pack<T>(sum); }
  __device__ static uint4 partial_of_row(const LlCombineParams&, const uint4& row) {
    return quiet<T>(row);
  }

  __device__ static void unpack(const uint4& partial, float* x) { T::unpack(partial, x); }
  __device__ static void add(float* sum, const uint4& partial) { add_vector<T>(sum, partial); }
  __device__ static void add_host(float* total, float* of_host) {
    add_vector<T>(total, pack<T>(of_host));
  }
  __device__ static uint4 round(float* sum) { return pack<T>(sum); }
  // Of a token with one partial sum.
  __device__ static uint4 round_one(const uint4& partial) { return quiet<T>(partial); }
  __device__ static void put(std::byte* out, const uint4& result) {
    ptx::st_streaming(out, result);
  }
};

// The common part of the forms of wires. A partial sum is never a copy there.
template <class Form>
struct LlWire {
  static constexpr bool kWire = true;

  __device__ static void add_row(float* sum, const uint4& row, float weight) {
    float x[Form::kColumns];
    Form::unpack_row(row, x);
#pragma unroll
    for (int n = 0; n < Form::kColumns; ++n) sum[n] = __fadd_rn(sum[n], __fmul_rn(weight, x[n]));
  }
  __device__ static uint4 partial_of_row(const LlCombineParams& p, const uint4& row) {
    float x[Form::kColumns];
    Form::unpack_row(row, x);
    return Form::partial_of(p, x);
  }
  __device__ static void add(float* sum, const uint4& partial) {
    float x[Form::kColumns];
    Form::unpack(partial, x);
#pragma unroll
    for (int n = 0; n < Form::kColumns; ++n) sum[n] = __fadd_rn(sum[n], x[n]);
  }
  __device__ static uint4 round_one(const uint4& partial) {
    float x[Form::kColumns];
    Form::unpack(partial, x);
    return Form::round(x);
  }
};

// Codes, then a word for the scale of each block, a float32. Both words of a partial sum are whole
// only together, and neither is ever all ones: no code is 0xFF.
template <class Payload>
struct LlCodes : LlWire<LlCodes<Payload>> {
  using T = Payload;
  static constexpr bool kShared = true;
  static constexpr int kColumns = T::kPerVector;
  static constexpr std::uint32_t kBytes = 16;
  static constexpr std::uint32_t kLanes = kCodeBlock / kColumns;  // lanes with a scale
  static constexpr std::uint32_t kPerWord = 8 / kColumns;  // lanes that share a word of codes

  class Place {
   public:
    __device__ Place(std::byte* row, std::uint32_t vector, const LlCombineParams& p)
        : row_(row),
          codes_(vector / kPerWord * 8),
          scale_(p.row_bytes / T::kBytes + vector / kLanes * 8) {}
    __device__ ulonglong2 load(std::uint64_t offset) const {
      return make_ulonglong2(load_word(row_ + offset + codes_), load_word(row_ + offset + scale_));
    }
    __device__ void send(const uint4& partial) const {
      const ulonglong2 words = words_of(partial);
      if (lane_id() % kPerWord == 0) send_word(row_ + codes_, words.x);
      if (lane_id() % kLanes == 0) send_word(row_ + scale_, words.y);
    }
    // Behind a barrier of the warp, or a vote, as other lanes have polled the same words.
    __device__ void put_back(std::uint64_t offset) const {
      if (lane_id() % kPerWord == 0) put_back_word(row_ + offset + codes_);
      if (lane_id() % kLanes == 0) put_back_word(row_ + offset + scale_);
    }

   private:
    __device__ static std::uint64_t load_word(const std::byte* at) {
      return ptx::ld_relaxed_sys(reinterpret_cast<const std::uint64_t*>(at));
    }
    std::byte* row_;
    std::uint32_t codes_, scale_;
  };

  __device__ static uint4 load_row(const std::byte* at) { return ptx::ld_streaming(at); }
  __device__ static void unpack_row(const uint4& row, float* x) { T::unpack(row, x); }
  // All lanes: those of a block have one scale.
  __device__ static uint4 partial_of(const LlCombineParams& p, float (&sum)[kColumns]) {
    float most = largest_of_lanes(sum);
    if (__any_sync(kAllLanes, is_infinite(most))) {
      make_infinities_nan(sum);
      most = largest_of_lanes(sum);
    }
    const CodeScale scale = code_scale(most, p.codes);
    const Codes<kColumns> codes = codes_of(sum, scale.inverse);
    const std::uint32_t bits = __float_as_uint(scale.scale);
    if constexpr (kPerWord == 1) {
      return make_uint4(codes.word[0], codes.word[1], bits, 0);
    } else {
      const std::uint32_t other = __shfl_xor_sync(kAllLanes, codes.word[0], 1);
      const bool odd = lane_id() % 2 != 0;
      return make_uint4(odd ? other : codes.word[0], odd ? codes.word[0] : other, bits, 0);
    }
  }

  __device__ static void unpack(const uint4& partial, float (&x)[kColumns]) {
    Codes<kColumns> codes;
    if constexpr (kPerWord == 1) {
      codes = {partial.x, partial.y};
    } else {
      codes = {lane_id() % 2 != 0 ? partial.y : partial.x};
    }
    numbers_of(codes, __uint_as_float(partial.z), x);
  }
  __device__ static void add_host(float* total, float* of_host) {
    add_vector<T>(total, pack<T>(of_host));
  }
  __device__ static uint4 round(float* sum) { return pack<T>(sum); }
  __device__ static void put(std::byte* out, const uint4& result) {
    ptx::st_streaming(out, result);
  }

 private:
  __device__ static float largest_of_lanes(const float (&x)[kColumns]) {
    float most = largest_of(x);
#pragma unroll
    for (int step = 1; step < static_cast<int>(kLanes); step *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
    }
    return most;
  }
};

// float32, of which a mover has four.
template <class Payload>
struct LlFloats : LlWire<LlFloats<Payload>> {
  using T = Payload;
  using Place = LlVectorPlace;
  static constexpr bool kShared = false;
  static constexpr int kColumns = 4;
  static constexpr std::uint32_t kBytes = kColumns * T::kBytes;

  __device__ static uint4 load_row(const std::byte* at) {
    if constexpr (kBytes == 16) return ptx::ld_streaming(at);
    const uint2 v = ptx::ld_streaming_half(at);
    return make_uint4(v.x, v.y, 0, 0);
  }
  __device__ static void unpack_row(const uint4& row, float* x) {
    float all[T::kPerVector];
    T::unpack(row, all);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) x[n] = all[n];
  }
  __device__ static uint4 partial_of(const LlCombineParams&, const float* sum) {
    return make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                      __float_as_uint(sum[3]));
  }

  __device__ static void unpack(const uint4& partial, float* x) { F32::unpack(partial, x); }
  __device__ static void add_host(float* total, const float* of_host) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) total[n] = __fadd_rn(total[n], of_host[n]);
  }
  __device__ static uint4 round(const float* sum) {
    float all[T::kPerVector];
#pragma unroll
    for (int n = 0; n < T::kPerVector; ++n) all[n] = n < kColumns ? sum[n] : 0.0f;
    return pack<T>(all);
  }
  __device__ static void put(std::byte* out, const uint4& result) {
    if constexpr (kBytes == 16) {
      ptx::st_streaming(out, result);
    } else {
      ptx::st_streaming(out, make_uint2(result.x, result.y));
    }
  }
};

}  // namespace xd::ep::cuda
