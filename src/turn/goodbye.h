// The patience with a rank of another machine that has left. Its goodbye may overtake what it has
// sent before, which comes all the same, so there is some time for that.
#pragma once

#include <algorithm>

#include "base/deadline.h"
#include "comm/comm.h"

namespace xd::turn {

class Goodbye {
 public:
  // Of one wait.
  Goodbye(const Comm& comm, int rank) : comm_(comm), rank_(rank) {}

  // The rank has left, and that time is over.
  bool is_over() {
    constexpr int kLongestMs = 5000;
    if (!has_left_ && comm_.errors().left(rank_)) {
      has_left_ = true;
      patience_ = Deadline::after_ms(std::min(kLongestMs, comm_.timeout_ms()));
    }
    return has_left_ && patience_.passed();
  }

 private:
  const Comm& comm_;
  const int rank_;
  bool has_left_ = false;
  Deadline patience_{Deadline::Clock::time_point{}};
};

}  // namespace xd::turn
