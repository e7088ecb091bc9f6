// A rank that stops between its header and its rows, at a known place inside of an operation: what
// the others make of it, and what it makes of theirs when it goes on.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <latch>
#include <string>
#include <vector>

#include "faults/gate.h"
#include "faults/ll/step.h"
#include "faults/thread_ranks.h"

namespace xd::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kRanks = 3, kHeld = 1, kTimeoutMs = 500, kLongTimeoutMs = 30000;
constexpr milliseconds kLimit(10000);

// A batch of which the rank that is held gets rows from every rank.
int batch_for_all(const LlCase& c) {
  for (int number = 1; number < 1000; ++number) {
    const SlotRouting routing = c.routing(number);
    std::vector<int> rows(kRanks);
    for (const int expert : routing.experts_of(kHeld)) {
      for (const SlotRow& row : routing.rows(expert)) ++rows[static_cast<std::size_t>(row.source)];
    }
    if (std::ranges::count(rows, 0) == 0) return number;
  }
  throw std::runtime_error("no batch has rows for all");
}

// Slots [L,S,H] of a batch behind a gate.
class HeldRows {
 public:
  explicit HeldRows(const LlCase& c)
      : columns_(std::int64_t{4} * c.row_units),
        slots_(c.num_slots()),
        bytes_(static_cast<std::size_t>(c.local_experts * slots_ * columns_) * sizeof(float)),
        gate_(bytes_) {}

  Gate& gate() { return gate_; }
  // Takes what the batch has received, and lets it use this memory from here on.
  void use_for(Echo& batch) {
    tensor_ = *batch.rows();
    std::memcpy(gate_.data(), tensor_.data, bytes_);
    tensor_.data = gate_.data();
    batch.use_rows(&tensor_);
  }
  // The elements of a row, all of them 0 or none of them.
  bool zero(std::int64_t expert, std::int64_t slot) const {
    const auto* row =
        reinterpret_cast<const float*>(gate_.data()) + (expert * slots_ + slot) * columns_;
    const auto zeros = std::count(row, row + columns_, 0.0f);
    EXPECT_TRUE(zeros == 0 || zeros == columns_) << zeros << " of " << columns_;
    return zeros != 0;
  }

 private:
  const std::int64_t columns_, slots_;
  const std::size_t bytes_;
  Gate gate_;
  DLTensor tensor_{};
};

class LlHeld : public testing::Test {
 protected:
  const LlCase c_ = echo_case(kRanks);
  HeldRows rows_{c_};
  std::latch all_others_{kRanks - 1};

  // Runs body(seat, batch) on all ranks.
  template <class Body>
  void on_ranks(const EchoGroup& how, Body&& body) const {
    const int number = batch_for_all(c_);
    on_thread_ranks(kRanks, kLongTimeoutMs, [&](Rank& rank, Comm&) {
      const LlSeat seat(rank, c_, how);
      Echo batch = seat.batch(number);
      body(seat, batch);
    });
  }
};

// Its header has come, and its sums do not. When it goes on it finds what the others had sent.
TEST_F(LlHeld, RankBetweenHeaderAndSumsIsLeftOutOfTheSums) {
  on_ranks({XD_LL_PEER_LOSS_MASK, kTimeoutMs}, [&](const LlSeat& seat, Echo& met) {
    seat.good_steps(nobody(kRanks), 0, 1);
    ok(seat.dispatch(met));
    std::vector<bool> lost = nobody(kRanks);
    if (seat.rank.rank == kHeld) {
      rows_.use_for(met);
      rows_.gate().close();
      ok(seat.combine(met));
      EXPECT_EQ(met.wrong(lost), "");
    } else {
      EXPECT_TRUE(rows_.gate().wait_for_thread(kLimit));
      lost[kHeld] = true;
      const auto start = Clock::now();
      const LlOutcome outcome = seat.combine(met);
      EXPECT_GE(Clock::now() - start, milliseconds(kTimeoutMs - 50));
      EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
      EXPECT_EQ(outcome.met.rank, kHeld) << outcome.text;
      EXPECT_EQ(outcome.met.masked[0], 1u << kHeld);
      EXPECT_GT(met.waits()[kHeld], 0) << "its header had not come";
      EXPECT_EQ(met.wrong(lost), "");
      seat.good_steps(lost, 2000, 20);
      all_others_.arrive_and_wait();
      rows_.gate().open();
    }
    seat.come_back();
  });
}

// Where losses are fatal, the wait that ends is the one for its sums.
TEST_F(LlHeld, RankBetweenHeaderAndSumsIsWaitedForNoLongerThanTheTimeout) {
  on_ranks({.wait_timeout_ms = kTimeoutMs}, [&](const LlSeat& seat, Echo& met) {
    ok(seat.dispatch(met));
    if (seat.rank.rank == kHeld) {
      rows_.use_for(met);
      rows_.gate().close();
    } else {
      EXPECT_TRUE(rows_.gate().wait_for_thread(kLimit));
    }
    const LlOutcome outcome = seat.combine(met);
    // The held rank finds all that it needs, and may end before it looks at errors.
    EXPECT_TRUE(seat.rank.rank == kHeld || outcome == XD_ERROR_TIMEOUT) << outcome.text;
    const xd_error_info info = comm_error(seat.rank.comm);
    EXPECT_EQ(info.status, XD_ERROR_TIMEOUT);
    EXPECT_EQ(info.phase, XD_PHASE_ROWS) << info.text;
    EXPECT_EQ(info.operation, XD_LL_COMBINE);
    EXPECT_EQ(info.peer, kHeld);
    if (seat.rank.rank == kHeld) return;
    all_others_.arrive_and_wait();
    rows_.gate().open();
  });
}

// It stands still while it takes what has come; the others leave it out, go on, and store other
// rows where it was to read. Rows that it has not read count, and are zero.
TEST_F(LlHeld, RankThatReadsTooLateHasZerosForRowsThatAreGone) {
  on_ranks({XD_LL_PEER_LOSS_MASK, kTimeoutMs}, [&](const LlSeat& seat, Echo& met) {
    seat.good_steps(nobody(kRanks), 0, 1);
    std::vector<bool> lost = nobody(kRanks);
    if (seat.rank.rank == kHeld) {
      rows_.use_for(met);
      rows_.gate().close();
      const LlOutcome outcome = seat.dispatch(met);
      EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
      EXPECT_EQ(outcome.met.rank, 0) << outcome.text;
      EXPECT_EQ(outcome.met.masked[0], 0b101u);
      EXPECT_EQ(outcome.met.masked_by[0], 0b101u);
      EXPECT_EQ(met.rows_by_source(), met.expected_rows(nobody(kRanks)));
      for (int expert = 0; expert < c_.local_experts; ++expert) {
        for (int source = 0; source < kRanks; ++source) {
          const Echo::Range range = met.range(expert, source);
          for (std::int64_t slot = range.first; slot < range.first + range.rows; ++slot) {
            EXPECT_EQ(rows_.zero(expert, slot), source != kHeld)
                << "expert " << expert << ", slot " << slot << ", from rank " << source;
          }
        }
      }
    } else {
      ok(seat.dispatch(met));
      EXPECT_EQ(met.rows_by_source(), met.expected_rows(lost));
      EXPECT_TRUE(rows_.gate().wait_for_thread(kLimit));
      lost[kHeld] = true;
      EXPECT_EQ(seat.combine(met), XD_ERROR_PEER_LOST);
      EXPECT_EQ(met.wrong(lost), "");
      seat.good_steps(lost, 2000, 20);
      all_others_.arrive_and_wait();
      rows_.gate().open();
    }
    seat.come_back();
  });
}

}  // namespace
}  // namespace xd::test
