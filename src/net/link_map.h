// Where the slots of links lie in their room, for whoever fills or reads them in place of a call of
// Links: see net/proxy.h. The slots that are sent from come first, by partner, then those that
// partners fill.
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
  std::size_t partners = 0, slots = 0;
  std::size_t slot_bytes = 0;  // of a chunk

  constexpr std::size_t num_slots() const { return partners * slots; }  // of each direction
  constexpr std::size_t pitch() const { return round_up(sizeof(LinkHeader) + slot_bytes, 64); }
  // The header of a slot; the chunk lies behind it.
  constexpr std::size_t place(bool incoming, int partner, unsigned slot) const {
    return ((at(partner) + (incoming ? partners : 0)) * slots + slot) * pitch();
  }
  constexpr std::size_t bytes() const { return 2 * num_slots() * pitch(); }
};

}  // namespace xd::net
