// The caller's wish to give up a wait: each thread may set a function that its waits ask.
//
// Whoever waits makes an Interruption and sleeps until next() at the latest, never holding a lock
// while it asks: the function may call the library.
#pragma once

#include <optional>

#include "base/deadline.h"

namespace xd {

using InterruptFn = int (*)(void* context);

// Of this thread; nullptr = none.
void set_interrupt(InterruptFn ask, void* context);

// One wait of the thread that makes it. Costs nothing where no function is set.
class Interruption {
 public:
  Interruption();

  // Until when to sleep: at most `deadline`.
  Deadline next(const Deadline& deadline) const {
    return when_ && when_->when() < deadline.when() ? *when_ : deadline;
  }
  // Asks, if it is time to. True = give up.
  bool requested();
  // Throws ABORTED if it is requested.
  void check();

 private:
  std::optional<Deadline> when_;  // to ask next
};

}  // namespace xd
