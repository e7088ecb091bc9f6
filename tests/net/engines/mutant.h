// Wrong engines, links and users of links, on purpose: the tests of links must catch every one of
// them, or they could not be trusted to catch anything.
#pragma once

#include <cstdint>

namespace xd::net {

enum class Mutant : std::uint8_t {
  none,
  // Of the engine: engines/chaos.h.
  arrival_before_data,  // a tag is reported when the first piece of its put is there
  swapped_arrivals,     // two puts that are under way towards one rank get each other's tag
  repeated_arrival,     // a tag is reported again some time later
  repeated_sent,        // an id is reported as sent again some time later
  lost_arrival,         // a tag is never reported
  lost_wakeup,          // sleep_on() gives a descriptor although something is held back
  dropped_error,        // a put fails, and nobody is told
  sent_needs_target,    // `sent` comes only after the target has polled once more
  closing_takes_back,   // a put that was sent and has not arrived is lost when its sender closes
  // Of the links: engines/wrong_links.h.
  refill_without_credit,  // a frame is filled again as soon as its put was sent
  refill_before_sent,     // … as soon as its credit is there
  count_for_frame,        // arrivals are counted, and the frames taken to be filled in turn
  stale_generation,       // the second use of a frame says that it is the first
  // Of the user of links: Traffic in unit/link_support.h.
  credit_before_read,  // a chunk is given back before it has been read
};

}  // namespace xd::net
