// A 64-bit hash that tells data apart. It is no protection: anybody can make data for a given hash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace xd {

// Hashes one more word. The multiplier is 2^64 / golden ratio (Knuth, TAOCP 3, 6.4); the shift
// feeds high bits back so that every bit of every word reaches every bit of the result.
constexpr std::uint64_t hash_combine(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

// The part of one word of a table in the table's hash, which is the sum over all words: so many
// threads can hash a table together.
constexpr std::uint64_t hash_entry(std::uint64_t index, std::uint64_t word) {
  return hash_combine(hash_combine(index + 1, word), word >> 32 ^ index);
}

inline std::uint64_t hash_bytes(std::uint64_t hash, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (; bytes >= sizeof(std::uint64_t);
       at += sizeof(std::uint64_t), bytes -= sizeof(std::uint64_t)) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof(word));
    hash = hash_combine(hash, word);
  }
  for (; bytes > 0; ++at, --bytes) hash = hash_combine(hash, *at);
  return hash;
}

}  // namespace xd
