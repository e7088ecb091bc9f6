// The common part of tests of waits that end without the peer.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "support/handles.h"
#include "support/world.h"

namespace xd::test {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kMoment = milliseconds(30);  // enough to enter a call
// All must be over within a second, as is promised; where many tests share few cores, the ranks
// must have run as well. It stays far below kLongTimeoutMs.
inline const auto kLimit = std::chrono::seconds(std::thread::hardware_concurrency() < 8 ? 3 : 1);
// Of groups and communicators that go on without a rank that is late: healthy ranks must not be
// late for one another while a busy machine holds one up.
inline const int kLateMs = std::thread::hardware_concurrency() < 8 ? 2000 : 500;
constexpr int kShortTimeoutMs = 600;
constexpr int kLongTimeoutMs = 30000;

inline bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A wait that began then has taken its timeout, and little more.
inline void expect_timed_out(Clock::time_point start, int timeout_ms = kShortTimeoutMs) {
  const auto took = Clock::now() - start;
  EXPECT_GE(took, milliseconds(timeout_ms - 50));
  EXPECT_LT(took, milliseconds(timeout_ms) + kLimit);
}

// Expects the words of rank 0's communicator when rank 1 has not come to this epoch of the
// operation.
inline xd_error_info expect_late_peer(const Rank& rank, int operation, std::uint64_t epoch) {
  const xd_error_info info = comm_error(rank.comm);
  EXPECT_EQ(info.status, XD_ERROR_TIMEOUT);
  EXPECT_EQ(info.phase, XD_PHASE_ENTRY);
  EXPECT_EQ(info.rank, 0);
  EXPECT_EQ(info.peer, 1);
  EXPECT_EQ(info.operation, operation);
  EXPECT_EQ(info.expected_epoch, epoch);
  EXPECT_LT(info.seen_epoch, info.expected_epoch);
  return info;
}

// A thread of this rank that gives up for all after a while.
class Quitter {
 public:
  explicit Quitter(const Rank& rank, std::chrono::microseconds after = kMoment)
      : thread_([comm = rank.comm, after] {
          std::this_thread::sleep_for(after);
          EXPECT_EQ(xd_comm_abort(comm), XD_SUCCESS);
        }) {}

 private:
  std::jthread thread_;
};

// For xd_set_interrupt: says yes when it has been asked often enough.
struct Impatience {
  int patience = 2;
  int asked = 0;

  static int ask(void* context) {
    auto& self = *static_cast<Impatience*>(context);
    return ++self.asked > self.patience ? 1 : 0;
  }
};

}  // namespace xd::test
