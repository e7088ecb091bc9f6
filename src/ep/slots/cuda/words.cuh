// Words that are their own flag: 8 bytes in group memory are all ones while they are free, and have
// arrived when they are not.
//
//   who                does                                   with
//   sender             stores the word, never all ones        st.relaxed.sys, pairs
//   owner's thread     polls it until it is not all ones      ld.relaxed.sys, pairs
//   the same thread    takes the value, puts the ones back    a plain store
//
// Each word is judged by itself, so no order between words is needed, and a pair may arrive in
// halves. The next store to the word comes an operation of this stage later, behind the owner's
// credit, and the credit comes behind the ones: see docs/internals/low_latency.md.
//
// A word of ones cannot travel. It is a NaN in every type of payload, and becomes another NaN.
#pragma once

#include "cuda/ptx.cuh"

namespace xd::ep::cuda {

inline constexpr std::uint64_t kFree = ~std::uint64_t{0};

// A word as it may travel. The last byte of 0x7F is a NaN of e4m3, and 0x7FFF... one of the wider
// types.
__device__ inline std::uint64_t canon(std::uint64_t word) {
  return word == kFree ? kFree >> 1 : word;
}

__device__ inline ulonglong2 words_of(const uint4& v) {
  return make_ulonglong2(static_cast<std::uint64_t>(v.y) << 32 | v.x,
                         static_cast<std::uint64_t>(v.w) << 32 | v.z);
}

__device__ inline uint4 vector_of(const ulonglong2& w) {
  return make_uint4(static_cast<std::uint32_t>(w.x), static_cast<std::uint32_t>(w.x >> 32),
                    static_cast<std::uint32_t>(w.y), static_cast<std::uint32_t>(w.y >> 32));
}

__device__ inline void send_pair(std::byte* to, const ulonglong2& words) {
  ptx::st_relaxed_sys_pair(to, make_ulonglong2(canon(words.x), canon(words.y)));
}
__device__ inline void send_word(std::byte* to, std::uint64_t word) {
  ptx::st_relaxed_sys(reinterpret_cast<std::uint64_t*>(to), canon(word));
}

__device__ inline bool has_come(const ulonglong2& words) {
  return words.x != kFree && words.y != kFree;
}

// Called by the thread that has taken the words, and by no other.
__device__ inline void put_back_pair(std::byte* at) {
  ptx::st_streaming_pair(at, make_ulonglong2(kFree, kFree));
}
__device__ inline void put_back_word(std::byte* at) {
  *reinterpret_cast<std::uint64_t*>(at) = kFree;
}

}  // namespace xd::ep::cuda
