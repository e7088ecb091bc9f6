// The name by which a rank tells others of a piece of its memory, which they have at another
// address or at none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/device/comm.h"

namespace xd::turn {

// It has 64 bits: the memory that the piece lies in (0 = not given, 1 = the memory shared for the
// sequence, 2 + s = segment s of the rank's symmetric heap) above 48 bits of offset.
class PeerAddress {
 public:
  static constexpr std::uint64_t kNone = 0, kShared = 1, kHeap = 2;
  static constexpr int kOffsetBits = 48;

  PeerAddress() = default;
  constexpr PeerAddress(std::uint64_t base, std::uint64_t offset)
      : bits_(base << kOffsetBits | offset) {}
  static constexpr PeerAddress shared(std::uint64_t offset) { return {kShared, offset}; }
  static constexpr PeerAddress in_heap(std::uint64_t segment, std::uint64_t offset) {
    return {kHeap + segment, offset};
  }

  constexpr explicit operator bool() const { return bits_ != 0; }
  constexpr bool is_shared() const { return base() == kShared; }
  constexpr std::uint64_t base() const { return bits_ >> kOffsetBits; }
  constexpr std::uint64_t offset() const { return bits_ & ((std::uint64_t{1} << kOffsetBits) - 1); }

 private:
  std::uint64_t bits_ = 0;
};

// The address of `bytes` bytes at `address`, or nullptr if some of them are not there, or if they
// are not aligned. `shared` is the rank's memory of this sequence. heap_range(segment) is a
// segment of its heap, or empty if it has none of that number. Both are addresses in this process.
template <class RangeOf>
constexpr std::byte* find_peer_memory(PeerAddress address, std::uint64_t bytes,
                                      std::uint64_t alignment, const HeapRange& shared,
                                      RangeOf&& heap_range) {
  HeapRange range{nullptr, 0};
  if (address.is_shared()) {
    range = shared;
  } else if (address.base() >= PeerAddress::kHeap) {
    range = heap_range(address.base() - PeerAddress::kHeap);
  }
  const std::uint64_t offset = address.offset();
  const bool there = range.base != nullptr && offset % alignment == 0 && offset <= range.bytes &&
                     bytes <= range.bytes - offset;
  return there ? range.base + offset : nullptr;
}

}  // namespace xd::turn
