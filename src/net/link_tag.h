// The meaning of tags and ids of puts to links.
#pragma once

#include <cstdint>

namespace xd::net {

// One bit that has changed makes no other kind.
enum class TagKind : std::uint8_t {
  chunk = 1,     // a slot of the receiver has been filled
  credit = 2,    // a slot of the receiver of this tag may be filled again
  greeting = 4,  // the sender reaches the receiver
};

inline constexpr int kMaxLinkSlots = 32, kMaxLinkPartners = 1 << 16;

struct LinkTag {
  TagKind kind;
  unsigned slot;        // below kMaxLinkSlots
  unsigned generation;  // how often the slot has been filled; its low 8 bits travel
  unsigned channel;     // the sender, as the receiver numbers its partners

  constexpr std::uint32_t word() const {
    return static_cast<std::uint32_t>(kind) << 29 | slot << 24 | (generation & 0xff) << 16 |
           channel;
  }
  static constexpr LinkTag of(std::uint32_t word) {
    return {static_cast<TagKind>(word >> 29), word >> 24 & 0x1f, word >> 16 & 0xff, word & 0xffff};
  }
};

// The id of a chunk's put: which use of which slot.
struct ChunkId {
  unsigned partner, slot, generation;

  constexpr std::uint64_t word() const {
    return std::uint64_t{partner} << 40 | std::uint64_t{slot} << 32 | generation;
  }
  static constexpr ChunkId of(std::uint64_t word) {
    return {static_cast<unsigned>(word >> 40), static_cast<unsigned>(word >> 32 & 0xff),
            static_cast<unsigned>(word)};
  }
};
inline constexpr std::uint64_t kEmptyId = UINT64_MAX;  // of puts without bytes; no chunk has it

}  // namespace xd::net
