// A set of up to 128 ranks as bits, for hosts and kernels: bit r % 64 of word r / 64 is rank r.
#pragma once

#include <cstdint>

namespace xd {

struct RankBits {
  static constexpr int kMostRanks = 128;
  std::uint64_t word[2];

  friend constexpr RankBits operator|(const RankBits& a, const RankBits& b) {
    return {{a.word[0] | b.word[0], a.word[1] | b.word[1]}};
  }
  friend constexpr RankBits operator&(const RankBits& a, const RankBits& b) {
    return {{a.word[0] & b.word[0], a.word[1] & b.word[1]}};
  }
  friend constexpr RankBits operator~(const RankBits& a) { return {{~a.word[0], ~a.word[1]}}; }
  // Words are chosen, not indexed: kernels keep them in registers.
  constexpr bool has(int rank) const {
    return ((rank < 64 ? word[0] : word[1]) >> (rank % 64) & 1) != 0;
  }
  constexpr void add(int rank) {
    const std::uint64_t bit = std::uint64_t{1} << (rank % 64);
    word[0] |= rank < 64 ? bit : 0;
    word[1] |= rank < 64 ? 0 : bit;
  }
  constexpr void remove(int rank) { word[rank / 64] &= ~(std::uint64_t{1} << (rank % 64)); }
  constexpr bool empty() const { return (word[0] | word[1]) == 0; }
  constexpr int count() const { return bits_in(word[0]) + bits_in(word[1]); }
  // The number of ranks in the set that are lower than `rank`.
  constexpr int count_below(int rank) const {
    const std::uint64_t below = (std::uint64_t{1} << (rank % 64)) - 1;
    return rank < 64 ? bits_in(word[0] & below) : bits_in(word[0]) + bits_in(word[1] & below);
  }

 private:
  // Adds neighbouring fields of 1, 2 and 4 bits, then all bytes: std::popcount is not for kernels.
  static constexpr int bits_in(std::uint64_t x) {
    x -= x >> 1 & 0x5555555555555555u;
    x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
    return static_cast<int>(x * 0x0101010101010101u >> 56);
  }
};
static_assert(sizeof(RankBits) == 16);

}  // namespace xd
