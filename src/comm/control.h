// A rank's control segment, in host memory that its near ranks have mapped: bell, note and error
// board of RankBoard, its part in decisions about views, and its door.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/layout.h"
#include "comm/fatal.h"
#include "comm/join/place.h"
#include "comm/near_memory.h"
#include "comm/views/places.h"

namespace xd {

struct ControlMap {
  std::uint64_t views, door, end;

  static constexpr ControlMap make(int num_ranks) {
    LayoutCursor cursor{RankBoardMap::make(num_ranks).end};
    ControlMap map{};
    map.views = cursor.add<ViewPlaces>(1, 64);
    map.door = cursor.add<DoorPlace>(1, 64);
    map.end = cursor.at;
    return map;
  }
};

// The size of a control segment.
constexpr std::size_t control_bytes(int num_ranks) { return ControlMap::make(num_ranks).end; }

inline ViewPlaces& view_places(NearMemory control, int num_ranks) {
  return *control.from(ControlMap::make(num_ranks).views).array<ViewPlaces>();
}

inline DoorPlace& door_place(NearMemory control, int num_ranks) {
  return *control.from(ControlMap::make(num_ranks).door).array<DoorPlace>();
}

}  // namespace xd
