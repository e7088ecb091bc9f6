// Mistakes that calls have found on the host, kept until a kernel tells which turn finished the
// communicator: calls are made in one order and, because of captures, run in another, or never.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <optional>

#include "turn/operation_error.h"

namespace xd::turn {

// The failed calls of one sequence. Any thread.
template <class Family>
class FailedCalls {
 public:
  struct Call {
    std::int32_t operation;
    OperationError<Family> operation_error;
  };

  // Called before the launch that takes the call's turn. Among many calls that are captured and
  // never run it keeps the latest, and none where there is no memory: the error then has no text of
  // its own.
  void note(std::uint32_t launch, std::int32_t operation,
            const OperationError<Family>& operation_error) noexcept {
    const std::lock_guard lock(mutex_);
    try {
      calls_.insert_or_assign(launch, Call{operation, operation_error});
    } catch (const std::bad_alloc&) {
      return;
    }
    if (calls_.size() > kMost) calls_.erase(calls_.begin());
  }

  // Forgets a launch that was not made.
  void forget(std::uint32_t launch) noexcept {
    const std::lock_guard lock(mutex_);
    calls_.erase(launch);
  }

  // The call whose turn the launch has taken, if it had found a mistake.
  std::optional<Call> find(std::uint32_t launch) const {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(launch);
    return found != calls_.end() ? std::optional(found->second) : std::nullopt;
  }

  static constexpr std::size_t kMost = 64;

 private:
  mutable std::mutex mutex_;
  std::map<std::uint32_t, Call> calls_;
};

}  // namespace xd::turn
