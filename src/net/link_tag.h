// The meaning of tags and ids of puts to links.
#pragma once

#include <cstdint>

namespace xd::net {

// One bit that has changed makes no other kind.
enum class TagKind : std::uint8_t {
  chunk = 1,     // a frame of the receiver has been filled
  credit = 2,    // a frame of the receiver of this tag may be filled again
  greeting = 4,  // the sender reaches the receiver
};

inline constexpr int kMaxLinkFrames = 32, kMaxLinkNeighbours = 1 << 16;

struct LinkTag {
  TagKind kind;
  unsigned frame;       // below kMaxLinkFrames
  unsigned generation;  // how often the frame has been filled; its low 8 bits travel
  unsigned channel;     // the sender, as the receiver numbers its neighbours

  constexpr std::uint32_t word() const {
    return static_cast<std::uint32_t>(kind) << 29 | frame << 24 | (generation & 0xff) << 16 |
           channel;
  }
  static constexpr LinkTag of(std::uint32_t word) {
    return {static_cast<TagKind>(word >> 29), word >> 24 & 0x1f, word >> 16 & 0xff, word & 0xffff};
  }
};

// The id of a chunk's put: which use of which frame.
struct ChunkId {
  unsigned neighbour, frame, generation;

  constexpr std::uint64_t word() const {
    return std::uint64_t{neighbour} << 40 | std::uint64_t{frame} << 32 | generation;
  }
  static constexpr ChunkId of(std::uint64_t word) {
    return {static_cast<unsigned>(word >> 40), static_cast<unsigned>(word >> 32 & 0xff),
            static_cast<unsigned>(word)};
  }
};
inline constexpr std::uint64_t kEmptyId = UINT64_MAX;  // of puts without bytes; no chunk has it

}  // namespace xd::net
