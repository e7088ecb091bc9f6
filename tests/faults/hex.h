// Plain structs as hexadecimal digits, as which they go from a test to processes that it starts.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>

namespace xd::test {

template <class Plain>
std::string to_hex(const Plain& plain) {
  static_assert(std::is_trivially_copyable_v<Plain>);
  std::string hex;
  for (const std::byte byte : std::as_bytes(std::span(&plain, 1))) {
    hex += "0123456789abcdef"[std::to_integer<unsigned>(byte) >> 4];
    hex += "0123456789abcdef"[std::to_integer<unsigned>(byte) & 15];
  }
  return hex;
}

// Throws if there are too few digits.
template <class Plain>
Plain from_hex(const std::string& hex) {
  Plain plain;
  const auto bytes = std::as_writable_bytes(std::span(&plain, 1));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  return plain;
}

}  // namespace xd::test
