// A rank's part in decisions about views, in its control segment (comm/control.h).
#pragma once

#include <atomic>
#include <cstdint>

#include "comm/versioned.h"
#include "comm/views/far_decision.h"

namespace xd {

struct alignas(64) ViewPlaces {
  Versioned<Card> card;
  Versioned<View> proposals[2];         // by number % 2
  std::atomic<std::uint64_t> decision;  // of a machine, in the places of its lowest rank
};

}  // namespace xd
