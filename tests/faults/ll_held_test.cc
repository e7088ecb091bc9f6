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
#include "faults/ll_step.h"
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

// Its header has come, and its sums do not. When it goes on it finds what the others had sent.
TEST(LlHeld, RankBetweenHeaderAndSumsIsLeftOutOfTheSums) {
  const LlCase c = echo_case(kRanks);
  const int number = batch_for_all(c);
  HeldRows rows(c);
  std::latch gone_on(kRanks - 1);
  on_thread_ranks(kRanks, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c, {XD_EP_PEER_LOSS_MASK, kTimeoutMs});
    good_step(rank, c, group.get(), nobody(kRanks), 0);
    Echo met(rank, c, number);
    ok(finish(rank, group.get(), met.dispatch(group.get())));
    std::vector<bool> lost = nobody(kRanks);
    if (rank.rank == kHeld) {
      rows.use_for(met);
      rows.gate().close();
      ok(finish(rank, group.get(), met.combine(group.get())));
      EXPECT_EQ(met.wrong(lost), "");
    } else {
      EXPECT_TRUE(rows.gate().wait_for_thread(kLimit));
      lost[kHeld] = true;
      const auto start = Clock::now();
      const Outcome outcome = finish(rank, group.get(), met.combine(group.get()));
      EXPECT_GE(Clock::now() - start, milliseconds(kTimeoutMs - 50));
      EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
      EXPECT_EQ(outcome.met.rank, kHeld) << outcome.text;
      EXPECT_EQ(outcome.met.masked[0], 1u << kHeld);
      EXPECT_GT(met.waits()[kHeld], 0) << "its header had not come";
      EXPECT_EQ(met.wrong(lost), "");
      good_steps(rank, c, group.get(), lost, 2000, 20);
      gone_on.arrive_and_wait();
      rows.gate().open();
    }
    come_back(rank, c, group.get());
  });
}

// Where losses are fatal, the wait that ends is the one for its sums.
TEST(LlHeld, RankBetweenHeaderAndSumsIsWaitedForNoLongerThanTheTimeout) {
  const LlCase c = echo_case(kRanks);
  const int number = batch_for_all(c);
  HeldRows rows(c);
  std::latch timed_out(kRanks - 1);
  on_thread_ranks(kRanks, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c, {.wait_timeout_ms = kTimeoutMs});
    Echo met(rank, c, number);
    ok(finish(rank, group.get(), met.dispatch(group.get())));
    if (rank.rank == kHeld) {
      rows.use_for(met);
      rows.gate().close();
    } else {
      EXPECT_TRUE(rows.gate().wait_for_thread(kLimit));
    }
    const Outcome outcome = finish(rank, group.get(), met.combine(group.get()));
    // The held rank finds all that it needs, and may end before it looks at errors.
    EXPECT_TRUE(rank.rank == kHeld || outcome == XD_ERROR_TIMEOUT) << outcome.text;
    const xd_error_info info = comm_error(rank.comm);
    EXPECT_EQ(info.status, XD_ERROR_TIMEOUT);
    EXPECT_EQ(info.phase, XD_PHASE_ROWS) << info.text;
    EXPECT_EQ(info.operation, XD_EP_LL_COMBINE);
    EXPECT_EQ(info.peer, kHeld);
    if (rank.rank == kHeld) return;
    timed_out.arrive_and_wait();
    rows.gate().open();
  });
}

// It stands still while it takes what has come; the others leave it out, go on, and store other
// rows where it was to read. Those that it has not read count, and are zero.
TEST(LlHeld, RankThatReadsTooLateHasZerosForRowsThatAreGone) {
  const LlCase c = echo_case(kRanks);
  const int number = batch_for_all(c);
  HeldRows rows(c);
  std::latch gone_on(kRanks - 1);
  on_thread_ranks(kRanks, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c, {XD_EP_PEER_LOSS_MASK, kTimeoutMs});
    good_step(rank, c, group.get(), nobody(kRanks), 0);
    Echo met(rank, c, number);
    std::vector<bool> lost = nobody(kRanks);
    if (rank.rank == kHeld) {
      rows.use_for(met);
      rows.gate().close();
      const Outcome outcome = finish(rank, group.get(), met.dispatch(group.get()));
      EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
      EXPECT_EQ(outcome.met.rank, 0) << outcome.text;
      EXPECT_EQ(outcome.met.masked[0], 0b101u);
      EXPECT_EQ(outcome.met.masked_by[0], 0b101u);
      EXPECT_EQ(met.rows_by_source(), met.expected_rows(nobody(kRanks)));
      for (int expert = 0; expert < c.local_experts; ++expert) {
        for (int source = 0; source < kRanks; ++source) {
          const Echo::Range range = met.range(expert, source);
          for (std::int64_t slot = range.first; slot < range.first + range.rows; ++slot) {
            EXPECT_EQ(rows.zero(expert, slot), source != kHeld)
                << "expert " << expert << ", slot " << slot << ", from rank " << source;
          }
        }
      }
    } else {
      ok(finish(rank, group.get(), met.dispatch(group.get())));
      EXPECT_EQ(met.rows_by_source(), met.expected_rows(lost));
      EXPECT_TRUE(rows.gate().wait_for_thread(kLimit));
      lost[kHeld] = true;
      EXPECT_EQ(finish(rank, group.get(), met.combine(group.get())), XD_ERROR_PEER_LOST);
      EXPECT_EQ(met.wrong(lost), "");
      good_steps(rank, c, group.get(), lost, 2000, 20);
      gone_on.arrive_and_wait();
      rows.gate().open();
    }
    come_back(rank, c, group.get());
  });
}

}  // namespace
}  // namespace xd::test
