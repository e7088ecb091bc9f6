// Where work of a device lies on the host's clock. A device tells how long work has lasted, and
// how long after earlier work it began, but its clock is another one, and runs at another speed.
// Two more facts are known: work does not begin before it is enqueued, and work that is seen to
// have ended has ended by then. Both bring a line of works back where they drift apart.
#pragma once

#include <algorithm>
#include <cstdint>

namespace xd::observe {

class DeviceClock {
 public:
  struct Place {
    std::uint64_t begin_ns, end_ns;
  };

  // Places the next work: it was enqueued at `enqueued_ns`, began `pause_ns` after the end of the
  // one before, if there is one, lasted `lasted_ns`, and is seen to have ended at `seen_ns`.
  Place place(std::uint64_t enqueued_ns, std::uint64_t pause_ns, std::uint64_t lasted_ns,
              std::uint64_t seen_ns) {
    const std::uint64_t earliest = std::max(end_ns_, enqueued_ns);
    const std::uint64_t latest = seen_ns - std::min(lasted_ns, seen_ns - enqueued_ns);
    const std::uint64_t told = end_ns_ == 0 ? enqueued_ns : end_ns_ + pause_ns;
    const std::uint64_t begin = std::clamp(told, std::min(earliest, latest), latest);
    end_ns_ = std::min(begin + lasted_ns, seen_ns);
    return {begin, end_ns_};
  }

 private:
  std::uint64_t end_ns_ = 0;  // of the work before
};

}  // namespace xd::observe
