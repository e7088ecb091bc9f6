// Counts in memory that peers write: a reader knows from the word alone whether it is of an epoch.
#pragma once

#include <cstdint>

namespace xd::ep {

// A count and the epoch it belongs to, in one word that is written and read whole.
constexpr std::uint64_t count_word(std::uint32_t count, std::uint64_t epoch) {
  return std::uint64_t{count} << 32 | (epoch & 0xFFFFFFFF);
}
constexpr bool count_is_of(std::uint64_t word, std::uint64_t epoch) {
  return (word & 0xFFFFFFFF) == (epoch & 0xFFFFFFFF);
}
constexpr std::uint32_t count_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}

}  // namespace xd::ep
