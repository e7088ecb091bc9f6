// A wait of the host that has become long: other ranks are told of it, it looks whether it can ever
// end, and says who waits for whom where it does not.
#pragma once

#include <crossdock/comm.h>

#include <chrono>
#include <cstdint>
#include <new>
#include <optional>
#include <string>

#include "base/deadline.h"

namespace xd {

class Errors;
struct WaitNote;
struct FatalError;
struct ToldError;

// Where a rank waits.
struct WaitPlace {
  int group, operation;  // -1: a host call
  xd_phase phase;
  std::uint64_t epoch;
  std::string call = {};  // the host call and its sizes; of an operation the texts are known
  std::optional<Deadline> deadline = {};  // of an operation
};

class LongWait {
 public:
  using Clock = Deadline::Clock;

  explicit LongWait(Errors& errors) : errors_(errors) {}
  ~LongWait();
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  // When the next look is due in a wait that has begun `since`.
  Clock::time_point next_look(Clock::time_point since) const {
    return next_look_ == Clock::time_point{} ? since + kFirstLook : next_look_;
  }
  // A look, while the rank waits for `peer`. If the two wait for one another in different calls,
  // both calls fail with MISMATCH: an operation and a host call by parts with a failure that each
  // rank takes in the other's call; two operations by an error that finishes the communicator,
  // which this throws.
  void look(const WaitPlace& place, int peer);

  // Likewise in a host call, whose words `text()` makes.
  template <class Text>
  void look_in_call(std::uint64_t round, Text&& text, int peer) {
    try {
      look({-1, -1, XD_PHASE_HOST, round, text()}, peer);
    } catch (const std::bad_alloc&) {  // the wait needs no memory
    }
  }

  // This rank has failed in the host call, and takes no part in operations of its peers.
  void never_joins() { joins_ = false; }

  // The words of a circle in the operation that this thread ends, once.
  static std::string take_story();

 private:
  static constexpr std::chrono::milliseconds kFirstLook{250}, kBetweenLooks{100};
  static constexpr std::chrono::milliseconds kWarning{5000};

  void look_now(const WaitPlace& place, int peer);
  void begin(const WaitPlace& place);
  void show(int peer);
  void leave_circle(const WaitPlace& place, int peer, const WaitNote& theirs);
  void warn(int peer);

  Errors& errors_;
  std::uint64_t id_ = 0;
  bool joins_ = true;
  int group_ = -1, operation_ = -1, shown_ = -1;
  std::string call_;
  Clock::time_point next_look_{}, warning_{};
};

// The rank at the end of the waits that begin with `peer`, and the words that lead there, to stand
// behind a sentence that ends with `peer`.
struct WaitChain {
  int last;
  std::string words;
};
WaitChain follow_waits(const Errors& errors, int peer);

// A TIMEOUT with these words.
ToldError with_waits(const Errors& errors, const FatalError& timeout);

}  // namespace xd
