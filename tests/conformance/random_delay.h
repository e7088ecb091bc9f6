// Delays that bring ranks out of step.
#pragma once

#include <chrono>
#include <thread>

#include "support/random.h"

namespace xd::test {

// Mostly none, sometimes a moment, rarely long enough for all peers to fall asleep.
inline void random_delay(Random& random) {
  if (random.one_in(500)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  } else if (random.one_in(8)) {
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(200)));
  }
}

}  // namespace xd::test
