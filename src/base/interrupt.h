// The caller's wish to give up a wait: each thread may set a function that its waits ask.
//
// A thread that waits makes an Interruption and sleeps until next() at the latest. It holds no lock
// while it asks, since the function may call the library.
#pragma once

#include <optional>

#include "base/deadline.h"

namespace xd {

using InterruptFn = int (*)(void* context);

// Sets this thread's function; nullptr = none.
void set_interrupt(InterruptFn ask, void* context);

// One wait of the thread that makes the object. It costs nothing where no function is set.
class Interruption {
 public:
  Interruption();

  // The time until which the thread may sleep: at most `deadline`.
  Deadline next(const Deadline& deadline) const {
    return when_ && when_->when() < deadline.when() ? *when_ : deadline;
  }
  // Asks the function, if 100 ms have passed since it was last asked. True = give up.
  bool requested();
  // Throws ABORTED if requested() is true.
  void check();

 private:
  std::optional<Deadline> when_;  // when to ask next
};

}  // namespace xd
