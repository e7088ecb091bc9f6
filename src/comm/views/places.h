// A rank's part in decisions about views, in its control segment behind the error board.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/layout.h"
#include "base/math.h"
#include "comm/fatal.h"
#include "comm/near_memory.h"
#include "comm/versioned.h"
#include "comm/views/far_decision.h"

namespace xd {

struct alignas(64) ViewPlaces {
  Versioned<Card> card;
  Versioned<View> proposals[2];         // by number % 2
  std::atomic<std::uint64_t> decision;  // of a machine, in the places of its lowest rank
};

// The size of a control segment.
inline std::size_t control_bytes(int num_ranks) {
  LayoutCursor cursor{RankBoardMap::make(num_ranks).end};
  cursor.add<ViewPlaces>(1, 64);
  return cursor.at;
}

inline ViewPlaces& view_places(NearMemory control, int num_ranks) {
  LayoutCursor cursor{RankBoardMap::make(num_ranks).end};
  return *control.from(cursor.add<ViewPlaces>(1, 64)).array<ViewPlaces>();
}

}  // namespace xd
