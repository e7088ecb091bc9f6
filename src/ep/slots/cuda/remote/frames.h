// The protocol of messages between kernels of low latency and ranks on other machines, without
// memory: which frame a message has, when it may be filled, and when it is here. Hosts, kernels and
// the search of tests/unit/ll_frames_test.cc ask it. docs/internals/low_latency_machines.md shows
// why no wait goes in a circle.
#pragma once

#include <cstdint>

#include "ep/slots/message.h"
#include "net/commands.h"

namespace xd::ep::cuda {

// Each kind of messages has as many frames of a neighbour as operations may be in flight, in turn.
//
//   kind      a rank sends to each remote rank                          number
//   dispatch  one in each dispatch, also in one that fails              of the dispatch
//   sums      one in each combine, likewise                             of the combine
//   combine   the call's weights, in a combine that has some and in     of the messages of this
//             which that rank is not known to need none                 to that rank
struct LlFrames {
  std::uint32_t in_flight;

  constexpr std::uint32_t of_neighbour() const { return kLlRemoteKinds * in_flight; }
  constexpr std::uint32_t frame(LlRemoteKind kind, std::uint64_t number) const {
    return (static_cast<std::uint32_t>(kind) - 1) * in_flight +
           static_cast<std::uint32_t>((number - 1) % in_flight);
  }
  // Counted from 1, as the words of net/commands.h count; of numbers from 1.
  constexpr std::uint32_t use(std::uint64_t number) const {
    return static_cast<std::uint32_t>((number - 1) / in_flight) + 1;
  }
};

// A rank may fill a frame for that use: its neighbour has read, or given up, the use before.
constexpr bool ll_may_fill(std::uint64_t freed, std::uint32_t use) {
  return net::use_of(freed) == use - 1;
}
// The neighbour's message by that use is here.
constexpr bool ll_is_here(std::uint64_t landed, std::uint32_t use) {
  return net::use_of(landed) == use;
}
// A word that tells of uses up to one has told of this one.
constexpr bool ll_is_told(std::uint32_t told, std::uint32_t use) {
  return static_cast<std::int32_t>(told - use) >= 0;
}

}  // namespace xd::ep::cuda
