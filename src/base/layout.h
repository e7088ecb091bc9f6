// A cursor that places typed areas one after another in a shared buffer. All layouts of the library
// are written with it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xd {

// add<T>(n) aligns, returns the byte offset of an array of n T, and moves on.
struct LayoutCursor {
  std::uint64_t at = 0;

  template <class T>
  constexpr std::uint64_t add(std::uint64_t count, std::uint64_t align = alignof(T)) {
    const std::uint64_t offset = (at + align - 1) / align * align;
    at = offset + count * sizeof(T);
    return offset;
  }
};

}  // namespace xd
