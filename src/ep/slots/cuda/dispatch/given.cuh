// Rows of any bytes that the caller gives, with scales (LlGivenParams). Their words may be all
// ones, which do not travel (words.cuh): such a word is sent as another one, kInPlaceOfOnes, and
// escapes behind the row, words of bits, say where that stands for ones.
//
// An escape has a bit for each of 32 words, so it is never all ones itself. The warp of a sender
// that has the words makes it, by a vote. In a receiver the tail warp waits for all escapes of a
// row; movers look at one where a word of theirs may stand for ones, and poll it likewise. The tail
// warp frees them behind a barrier of the group, when all its movers have looked.
#pragma once

#include "ep/plan/cuda/quantise.cuh"
#include "ep/slots/cuda/params.h"
#include "ep/slots/cuda/words.cuh"

namespace xd::ep::cuda {

// In the place of a way of quantising, for kernels of such rows.
struct GivenRows {
  static constexpr bool kQuantises = false;
};
template <class Quantiser>
inline constexpr bool kIsGiven = std::is_same_v<Quantiser, GivenRows>;

// As canon() sends a word of all ones.
inline constexpr std::uint64_t kInPlaceOfOnes = kFree >> 1;

// The parameters of a launch of such rows.
__device__ inline const LlGivenParams& ll_given(const LlDispatchParams& p) {
  return static_cast<const LlGivenParams&>(p);
}

// The scales of a token that are word `w` of its row's tail.
__device__ inline std::uint64_t ll_given_scale_word(const LlGivenParams& p, int token,
                                                    std::uint32_t w) {
  const bool floats = p.scale_element == 4;
  const std::uint32_t each = floats ? 2 : 8, first = w * each;
  const std::byte* at = p.scales + token * p.scale_row_stride + first * p.scale_col_stride;
  std::uint64_t word = 0;
#pragma unroll 1
  for (std::uint32_t i = 0; i < each && first + i < p.scale_columns; ++i) {
    const std::uint64_t scale =
        floats ? *reinterpret_cast<const std::uint32_t*>(at) : static_cast<std::uint32_t>(*at);
    word |= scale << (i * (64 / each));
    at += p.scale_col_stride;
  }
  return word;
}

}  // namespace xd::ep::cuda
