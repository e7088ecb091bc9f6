// Arithmetic on sizes. Everything is 64-bit, and products that might not fit are checked.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "base/error.h"

namespace xd {

// An index from a number that is known not to be negative.
constexpr std::size_t at(std::integral auto number) { return static_cast<std::size_t>(number); }

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// a * b; throws INVALID_ARGUMENT naming `what` if it does not fit into 63 bits.
inline std::uint64_t checked_mul(std::uint64_t a, std::uint64_t b, const char* what) {
  std::uint64_t product = 0;
  XD_REQUIRE(!__builtin_mul_overflow(a, b, &product) && product <= INT64_MAX, what, " = ", a, " * ",
             b, " does not fit into 63 bits");
  return product;
}

}  // namespace xd
