// The words in a rank's control segment about the process that has the rank's place, for those that
// join.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "comm/versioned.h"
#include "meet/introduction.h"

namespace xd {

struct DoorCard {
  Tag socket_name{};  // of the door
  HostName host_name{};
  ProcessIdentity process{};
  bool operator==(const DoorCard&) const = default;
};
static_assert(std::has_unique_object_representations_v<DoorCard>);

struct alignas(64) DoorPlace {
  // The processes that have had the place before, counted by those that were let in. So a number
  // tells an incarnation of the rank from all others.
  std::atomic<std::uint64_t> serial;
  Versioned<DoorCard> card;  // none was written: the rank has no door
};

}  // namespace xd
