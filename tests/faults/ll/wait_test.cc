// Waits of low-latency operations in groups that mask lost ranks, and go on without them; and of
// sends. wait_test.cc has those that end as in other families.
#include <gtest/gtest.h>

#include <latch>
#include <string>
#include <vector>

#include "conformance/said.h"
#include "faults/ll/step.h"
#include "faults/thread_ranks.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

constexpr xd_ll_phase kSend = XD_LL_PHASE_SEND, kReceive = XD_LL_PHASE_RECEIVE;

// ---- Groups that a loss finishes ----------------------------------------------------------------

// A peer that sends and does not receive keeps its places: a send that needs one of them again
// waits for it, and no longer than the timeout. On CUDA there are more places, and those of
// operations that have not been delivered are free when the peer says that it has sent them.
TEST(LlWaits, OfASendForAPlaceThatAPeerHasNotFreedEndInTime) {
  const LlCase c = echo_case(2);
  std::latch timed_out(1);
  on_thread_ranks(2, kShortTimeoutMs, [&](Rank& rank, Comm&) {
    const LlSeat seat(rank, c);
    Echo a = seat.batch(0), b = seat.batch(1), d = seat.batch(2), e = seat.batch(3);
    const auto receive_badly = [&](Echo& batch) {
      const DLTensor* const rows = batch.rows();
      batch.use_rows(nullptr);
      EXPECT_EQ(seat.dispatch(batch, kReceive), XD_ERROR_INVALID_ARGUMENT);
      batch.use_rows(rows);
    };
    const bool has_more = rank.asynchronous();
    ok(seat.dispatch(a, kSend));
    if (rank.rank == 1) {
      if (!has_more) ok(seat.dispatch(b, kSend));
      return timed_out.wait();
    }
    if (has_more) {
      receive_badly(a);
      for (Echo* batch : {&b, &d}) {
        ok(seat.dispatch(*batch, kSend));
        receive_badly(*batch);
      }
    } else {
      ok(seat.dispatch(b, kSend));
      for (Echo* batch : {&a, &b}) ok(seat.dispatch(*batch, kReceive));
    }
    const auto start = Clock::now();
    const LlOutcome outcome = seat.dispatch(has_more ? e : d, kSend);
    EXPECT_EQ(outcome, XD_ERROR_TIMEOUT);
    expect_timed_out(start);
    const xd_error_info info = comm_error(rank.comm);
    EXPECT_EQ(info.phase, XD_PHASE_CREDIT) << info.text;
    EXPECT_EQ(info.peer, 1);
    timed_out.count_down();
  });
}

// wait_timeout_ms is the group's, whatever the communicator's is.
TEST(LlWaits, EndWithTheTimeoutOfTheirGroup) {
  const LlCase c = echo_case(2);
  std::latch timed_out(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const LlSeat seat(rank, c, {.wait_timeout_ms = kShortTimeoutMs});
    seat.good_steps(nobody(2), 0, 1);
    if (rank.rank == 1) return timed_out.wait();
    Echo step = seat.batch(1);
    const auto start = Clock::now();
    EXPECT_EQ(seat.dispatch(step), XD_ERROR_TIMEOUT);
    expect_timed_out(start);
    timed_out.count_down();
  });
}

// ---- Groups that mask ---------------------------------------------------------------------------

struct Moment {
  const char* name;
  xd_ll_operation operation;
  bool halves;
};
void PrintTo(const Moment& moment, std::ostream* out) { *out << moment.name; }

// A rank that stays away and comes back, and all that the others see of it.
class LlStuck : public testing::TestWithParam<Moment> {
 protected:
  static constexpr int kRanks = 3, kStuck = 1, kSteps = 1000;
  const LlCase c_ = echo_case(kRanks);

  // The first operation without the rank, on the others.
  static void expect_loss(const Rank& rank, const LlOutcome& outcome, Clock::duration took) {
    EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
    EXPECT_EQ(outcome.met.rank, kStuck) << outcome.text;
    EXPECT_EQ(outcome.met.masked[0], 1u << kStuck);
    EXPECT_EQ(outcome.met.masked_by[0], 0u);
    expect_words(outcome.text, {"rank " + std::to_string(kStuck)});
    EXPECT_GE(took, milliseconds(kLateMs - 50));
    EXPECT_LT(took, milliseconds(kLateMs) + kLimit);
    EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
  }
  // A masked rank that goes on by itself learns in bounded time that it is masked. The rows that
  // others had sent before are still there.
  static void come_to_know(const LlSeat& seat) {
    constexpr int kMostSteps = 8;
    for (int number = 2000; number < 2000 + kMostSteps; ++number) {
      Echo step = seat.batch(number);
      for (const xd_ll_operation kind : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
        const auto start = Clock::now();
        const LlOutcome outcome = seat.call(step, kind);
        EXPECT_LT(Clock::now() - start, milliseconds(kLateMs) + kLimit);
        EXPECT_TRUE(outcome == XD_SUCCESS || outcome == XD_ERROR_PEER_LOST ||
                    outcome == XD_ERROR_MISMATCH)
            << outcome.text;
      }
    }
    EXPECT_EQ(group_status(seat.group.get()).masked[0], 0b101u);
  }
};

TEST_P(LlStuck, RankIsLeftOutByAllAndComesBack) {
  on_thread_ranks(kRanks, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const LlSeat seat(rank, c_, {XD_LL_PEER_LOSS_MASK, kLateMs});
    std::vector<bool> lost = nobody(kRanks);
    seat.good_steps(lost, 0, 3);
    const xd_ll_operation kind = GetParam().operation;
    const bool halves = GetParam().halves;
    Echo met = seat.batch(3);
    if (kind == XD_LL_COMBINE) ok(seat.dispatch(met));
    if (rank.rank == kStuck) {
      ok(xd_comm_barrier(rank.comm));
      come_to_know(seat);
      lost[0] = lost[2] = true;
      seat.good_steps(lost, 3000, 5);
    } else {
      const auto start = Clock::now();
      if (halves) ok(seat.call(met, kind, kSend));
      const LlOutcome outcome = seat.call(met, kind, halves ? kReceive : XD_LL_PHASE_BOTH);
      expect_loss(rank, outcome, Clock::now() - start);
      lost[kStuck] = true;
      if (kind == XD_LL_DISPATCH) {
        EXPECT_EQ(met.rows_by_source(), met.expected_rows(lost));
        ok(seat.combine(met));
      }
      EXPECT_EQ(met.wrong(lost), "");
      seat.good_steps(lost, 4, kSteps);
      ok(xd_comm_barrier(rank.comm));
    }
    seat.come_back();
  });
}

// It has done its part of an operation, and stays away from the next: that one's results are whole.
TEST_P(LlStuck, RankThatHasSentIsWaitedForNoMore) {
  on_thread_ranks(kRanks, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const LlSeat seat(rank, c_, {XD_LL_PEER_LOSS_MASK, kLateMs});
    const std::vector<bool> none = nobody(kRanks), lost{false, true, false};
    const xd_ll_operation kind = GetParam().operation;
    Echo met = seat.batch(3);
    if (kind == XD_LL_COMBINE) ok(seat.dispatch(met));
    if (rank.rank == kStuck) {
      ok(seat.call(met, kind, kSend));
      ok(xd_comm_barrier(rank.comm));
      return;
    }
    ok(seat.call(met, kind));
    if (kind == XD_LL_DISPATCH) {
      EXPECT_EQ(met.rows_by_source(), met.expected_rows(none));
      EXPECT_EQ(seat.combine(met), XD_ERROR_PEER_LOST);
      EXPECT_EQ(met.wrong(lost), "");
    } else {
      EXPECT_EQ(met.wrong(none), "");
      Echo next = seat.batch(4);
      EXPECT_EQ(seat.dispatch(next), XD_ERROR_PEER_LOST);
      ok(seat.combine(next));
      EXPECT_EQ(next.wrong(lost), "");
    }
    seat.good_steps(lost, 5, 20);
    ok(xd_comm_barrier(rank.comm));
  });
}

INSTANTIATE_TEST_SUITE_P(Calls, LlStuck,
                         testing::Values(Moment{"dispatch", XD_LL_DISPATCH, false},
                                         Moment{"receive_of_dispatch", XD_LL_DISPATCH, true},
                                         Moment{"combine", XD_LL_COMBINE, false},
                                         Moment{"receive_of_combine", XD_LL_COMBINE, true}),
                         [](const testing::TestParamInfo<Moment>& instance) {
                           return std::string(instance.param.name);
                         });

// One group masks a rank; another group of the same communicator goes on with it.
TEST(LlMasks, AreTheirGroupsOwn) {
  const LlCase c = echo_case(2);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const LlSeat first(rank, c, {XD_LL_PEER_LOSS_MASK, kLateMs}), second(rank, c);
    if (rank.rank == 0) {
      Echo step = first.batch(0);
      EXPECT_EQ(first.dispatch(step), XD_ERROR_PEER_LOST);
    }
    ok(xd_comm_barrier(rank.comm));
    second.good_steps(nobody(2), 0, 3);
    EXPECT_EQ(group_status(second.group.get()).masked[0], 0u);
  });
}

// All that a rank waits for in one call shares one deadline: two stuck ranks cost no more than one.
TEST(LlMasks, OfSeveralRanksTakeOneTimeout) {
  constexpr int kRanks = 4;
  const LlCase c = echo_case(kRanks);
  on_thread_ranks(kRanks, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const LlSeat seat(rank, c, {XD_LL_PEER_LOSS_MASK, kLateMs});
    seat.good_steps(nobody(kRanks), 0, 1);
    if (rank.rank > 0) return ok(xd_comm_barrier(rank.comm));
    Echo step = seat.batch(1);
    const auto start = Clock::now();
    const LlOutcome outcome = seat.dispatch(step);
    EXPECT_LT(Clock::now() - start, milliseconds(2 * kLateMs));
    EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
    EXPECT_EQ(outcome.met.rank, 1);
    EXPECT_EQ(outcome.met.masked[0], 0b1110u);
    ok(seat.combine(step));
    EXPECT_EQ(step.wrong({false, true, true, true}), "");
    ok(xd_comm_barrier(rank.comm));
  });
}

// The reset waits for all ranks that are not masked, and leaves out those that do not come.
TEST(LlMasks, OfRanksThatMissTheResetAreMadeByIt) {
  constexpr int kRanks = 3;
  const LlCase c = echo_case(kRanks);
  on_thread_ranks(kRanks, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const LlSeat seat(rank, c, {XD_LL_PEER_LOSS_MASK, kLateMs});
    seat.good_steps(nobody(kRanks), 0, 1);
    if (rank.rank == 2) return ok(xd_comm_barrier(rank.comm));
    const LlOutcome outcome = seat.reset();
    EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
    EXPECT_EQ(outcome.met.rank, 2);
    EXPECT_EQ(outcome.met.operation, XD_LL_RESET);
    seat.good_steps({false, false, true}, 1, 3);
    ok(xd_comm_barrier(rank.comm));
  });
}

}  // namespace
}  // namespace xd::test
