// Ranks that are masked, by hand or by a wait, while operations are between their halves: what has
// come from such a rank counts, and nobody waits for the rest.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "faults/ll/step.h"
#include "faults/thread_ranks.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

constexpr xd_ll_phase kSend = XD_LL_PHASE_SEND, kReceive = XD_LL_PHASE_RECEIVE;
constexpr int kRanks = 3, kMasked = 1, kTimeoutMs = 30000;
constexpr milliseconds kAtOnce(10000);  // well below the timeout, whatever else the machine does
const std::vector<bool> kTheMasked{false, true, false};

void expect_loss(const LlOutcome& outcome) {
  EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
  EXPECT_EQ(outcome.met.rank, kMasked) << outcome.text;
  EXPECT_EQ(outcome.met.masked[0], 1u << kMasked);
}

// One rank of a group that masks, with two batches, and the operation of the test in halves.
class Seat : public LlSeat {
  const xd_ll_operation operation_;

 public:
  Echo a = batch(1), b = batch(2);

  Seat(const Rank& of_rank, xd_ll_operation operation, int wait_timeout_ms)
      : LlSeat(of_rank, echo_case(kRanks), {XD_LL_PEER_LOSS_MASK, wait_timeout_ms}),
        operation_(operation) {}

  bool combines() const { return operation_ == XD_LL_COMBINE; }
  void mask(bool masked) const { LlSeat::mask(kMasked, masked); }
  void good_steps(const std::vector<bool>& lost) const { LlSeat::good_steps(lost, 10, 6); }

  // Makes all that comes before the operation of the test.
  void begin(Echo& batch) const {
    if (combines()) ok(dispatch(batch));
  }
  void send(Echo& batch) const { ok(call(batch, operation_, kSend)); }
  LlOutcome receive(Echo& batch) const {
    const auto start = Clock::now();
    const LlOutcome outcome = call(batch, operation_, kReceive);
    EXPECT_LT(Clock::now() - start, kAtOnce);
    return outcome;
  }
  // Makes what comes behind the operation: the sums of the batch are without the masked rank.
  void end(Echo& batch) const {
    if (!combines()) {
      EXPECT_EQ(batch.rows_by_source(), batch.expected_rows(kTheMasked));
      ok(combine(batch));
    }
    EXPECT_EQ(batch.wrong(kTheMasked), "");
  }
};

// All ranks do `all`. Then those that stay do `stay`, and go on without the masked one.
template <class All, class Stay>
void on_seats(xd_ll_operation operation, All&& all, Stay&& stay, int wait_timeout_ms = 0) {
  on_thread_ranks(kRanks, kTimeoutMs, [&](Rank& rank, Comm&) {
    Seat seat(rank, operation, wait_timeout_ms);
    all(seat);
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank != kMasked) {
      stay(seat);
      seat.good_steps(kTheMasked);
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

class LlBetween : public testing::TestWithParam<xd_ll_operation> {};

TEST_P(LlBetween, ARankThatIsMaskedByHandIsWaitedForNoMore) {
  const auto all = [](Seat& seat) {
    seat.good_steps(nobody(kRanks));
    seat.begin(seat.a);
  };
  on_seats(GetParam(), all, [](Seat& seat) {
    seat.send(seat.a);
    seat.mask(true);
    expect_loss(seat.receive(seat.a));
    seat.end(seat.a);
  });
}

TEST_P(LlBetween, TheShareOfAMaskedRankCountsIfItHasCome) {
  const auto all = [](Seat& seat) {
    seat.begin(seat.a);
    seat.send(seat.a);
  };
  on_seats(GetParam(), all, [](Seat& seat) {
    seat.mask(true);
    ok(seat.receive(seat.a));
    if (seat.combines()) {
      EXPECT_EQ(seat.a.wrong(nobody(kRanks)), "");
      return;
    }
    // The rank has no part in the combine of its rows.
    EXPECT_EQ(seat.a.rows_by_source(), seat.a.expected_rows(nobody(kRanks)));
    ok(seat.combine(seat.a));
    EXPECT_EQ(seat.a.wrong(kTheMasked), "");
  });
}

// As a scheduler does that knows of the rank's end before its peers' waits do.
TEST_P(LlBetween, ARankThatAnotherThreadMasksIsWaitedForNoMore) {
  const auto all = [](Seat& seat) { seat.begin(seat.a); };
  on_seats(GetParam(), all, [](Seat& seat) {
    seat.send(seat.a);
    xd_status masked = XD_ERROR_INTERNAL;
    std::thread scheduler([&] {
      std::this_thread::sleep_for(milliseconds(50));  // mostly the wait has begun
      masked = xd_ll_mask_set(seat.group.get(), kMasked, 1, seat.rank.stream());
    });
    const LlOutcome outcome = seat.receive(seat.a);
    scheduler.join();
    EXPECT_EQ(masked, XD_SUCCESS);
    expect_loss(outcome);
    seat.end(seat.a);
  });
}

// Both have been sent to the rank, so both need it. Operations that are sent later do not.
TEST_P(LlBetween, EachOperationThatWasSentToALostRankTellsItsLoss) {
  const auto all = [](Seat& seat) {
    seat.begin(seat.a);
    seat.begin(seat.b);
  };
  const auto stay = [&](Seat& seat) {
    seat.send(seat.a);
    seat.send(seat.b);
    expect_loss(seat.receive(seat.a));
    const auto start = Clock::now();
    expect_loss(seat.receive(seat.b));
    EXPECT_LT(Clock::now() - start, milliseconds(kLateMs));
    seat.end(seat.a);
    seat.end(seat.b);
  };
  on_seats(GetParam(), all, stay, kLateMs);
}

// The operation has begun without the rank, and ends without it.
TEST_P(LlBetween, ARankThatIsUnmaskedThereHasNoPartInTheOperation) {
  on_thread_ranks(kRanks, kTimeoutMs, [&](Rank& rank, Comm&) {
    Seat seat(rank, GetParam(), 0);
    if (rank.rank != kMasked) {
      seat.mask(true);
      seat.begin(seat.a);
      seat.send(seat.a);
      seat.mask(false);
      ok(seat.receive(seat.a));
      seat.mask(true);
      seat.end(seat.a);
      seat.mask(false);
    }
    ok(xd_comm_barrier(rank.comm));
    ok(seat.reset());
    seat.good_steps(nobody(kRanks));
  });
}

INSTANTIATE_TEST_SUITE_P(Calls, LlBetween, testing::Values(XD_LL_DISPATCH, XD_LL_COMBINE),
                         [](const testing::TestParamInfo<xd_ll_operation>& instance) {
                           return instance.param == XD_LL_DISPATCH ? "dispatch" : "combine";
                         });

// The send half of a combine that is given weights waits for those of its peers, but for no masked
// one's.
TEST(LlBetweenCalls, WeightsOfAMaskedRankAreNotWaitedFor) {
  const auto all = [](Seat& seat) {
    for (Echo* batch : {&seat.a, &seat.b}) {
      seat.begin(*batch);
      batch->weigh_in_combine();
    }
  };
  on_seats(XD_LL_COMBINE, all, [](Seat& seat) {
    seat.mask(true);
    const auto start = Clock::now();
    ok(seat.combine(seat.a));
    ok(seat.combine(seat.b, kSend));
    ok(seat.combine(seat.b, kReceive));
    EXPECT_LT(Clock::now() - start, kAtOnce);
    for (const Echo* batch : {&seat.a, &seat.b}) EXPECT_EQ(batch->wrong(kTheMasked), "");
  });
}

// The mistake belongs to an operation with a higher number.
TEST(LlBetweenCalls, ALossIsToldBehindTheMistakeOfALaterSend) {
  const auto all = [](Seat& seat) {
    seat.begin(seat.a);
    seat.begin(seat.b);
  };
  on_seats(XD_LL_COMBINE, all, [](Seat& seat) {
    seat.send(seat.a);
    std::vector<std::byte> damaged = seat.b.plan().read();
    damaged[24] ^= std::byte{0x40};
    seat.b.plan().write(damaged);
    EXPECT_EQ(seat.combine(seat.b, kSend), XD_ERROR_INVALID_ARGUMENT);
    seat.mask(true);
    expect_loss(seat.combine(seat.a, kReceive));
    EXPECT_EQ(seat.a.wrong(kTheMasked), "");
  });
}

}  // namespace
}  // namespace xd::test
