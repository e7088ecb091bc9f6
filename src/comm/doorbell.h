// A futex-backed bell in shared memory. Each rank has one; a peer rings it after storing a flag
// that the rank may be waiting for.
//
// The bell carries no data and orders none: flags are stored with release before it is rung and
// loaded with acquire after it is read. The bell promises that no ring is missed:
//   ringer:  store flag (release) -> rings += 1 -> if sleepers != 0, wake
//   waiter:  b = rings -> flags not there -> sleepers += 1 -> sleep only while rings == b
// Both counters are sequentially consistent, so either the ringer sees the sleeper and wakes it, or
// the sleeper's futex call (which compares in the kernel) sees the new count and returns at once.
// The futex is not private: ranks may be processes. std::atomic::wait would be private.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace xd {

class alignas(64) Doorbell {
 public:
  std::uint32_t value() const { return rings_.load(std::memory_order_seq_cst); }

  void ring();

  // Returns when the bell has been rung since value() gave `seen`, when the deadline has passed, or
  // spuriously.
  void sleep(std::uint32_t seen, const Deadline& deadline);

 private:
  std::atomic<std::uint32_t> rings_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace xd
