// Seeded pseudo-random numbers that are the same on every rank, compiler and machine.
#pragma once

#include <cstdint>

namespace xd::test {

// Finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// One number for a tuple of numbers, so that any rank can compute any other rank's data.
template <class... More>
constexpr std::uint64_t mix(std::uint64_t first, std::uint64_t second, More... more) {
  return mix(mix(first) ^ second, more...);
}

class Random {
 public:
  explicit constexpr Random(std::uint64_t seed) : state_(seed) {}

  constexpr std::uint64_t next() { return state_ = mix(state_); }
  // Uniform in [0, bound); bound > 0. The bias of the remainder is far below what tests can see.
  constexpr std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  constexpr bool one_in(std::uint64_t n) { return below(n) == 0; }
  constexpr double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

 private:
  std::uint64_t state_;
};

}  // namespace xd::test
