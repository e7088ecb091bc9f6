// Where the frames of links lie in their region, for whoever fills or reads them in place of a call
// of Links: see net/proxy.h. The frames that are sent from come first, by neighbour, then those
// that neighbours fill.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/math.h"

namespace xd::net {

// Items of a chunk begin at multiples of this.
inline constexpr std::size_t kItemAlignment = 16;
constexpr std::size_t item_size(std::size_t bytes) { return round_up(bytes, kItemAlignment); }

// In front of a chunk, in the same put.
struct LinkHeader {
  std::uint32_t generation, bytes;
  std::uint64_t zero;  // so that the chunk begins as items do
};
static_assert(sizeof(LinkHeader) % kItemAlignment == 0);

struct LinkMap {
  std::size_t neighbours = 0, frames = 0;
  std::size_t frame_bytes = 0;  // of a chunk

  constexpr std::size_t num_frames() const { return neighbours * frames; }  // of each direction
  constexpr std::size_t pitch() const { return round_up(sizeof(LinkHeader) + frame_bytes, 64); }
  // The header of a frame; the chunk lies behind it.
  constexpr std::size_t place(bool incoming, int neighbour, unsigned frame) const {
    return ((at(neighbour) + (incoming ? neighbours : 0)) * frames + frame) * pitch();
  }
  constexpr std::size_t bytes() const { return 2 * num_frames() * pitch(); }
};

}  // namespace xd::net
