// Ranks that are masked, by hand or by a wait, while operations are between their halves: what has
// come from such a rank counts, and nobody waits for the rest.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "conformance/ll_echo.h"
#include "faults/ll_step.h"
#include "faults/thread_ranks.h"

namespace xd::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr xd_ep_phase kSend = XD_EP_PHASE_SEND, kReceive = XD_EP_PHASE_RECEIVE;
constexpr int kRanks = 3, kMasked = 1, kTimeoutMs = 30000;
constexpr milliseconds kAtOnce(10000);  // well below the timeout, whatever else the machine does

std::vector<bool> nobody() { return std::vector<bool>(kRanks); }
std::vector<bool> the_masked() { return {false, true, false}; }

void mask(const Rank& rank, xd_ep_group* group, bool masked) {
  ok(xd_ep_ll_mask_set(group, kMasked, masked ? 1 : 0, rank.stream()));
}

void expect_loss(const Outcome& outcome) {
  EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
  EXPECT_EQ(outcome.met.rank, kMasked) << outcome.text;
  EXPECT_EQ(outcome.met.masked[0], 1u << kMasked);
}

class LlBetween : public testing::TestWithParam<xd_ep_operation> {
 protected:
  // All that comes before the operation of the test.
  static void begin(const Rank& rank, xd_ep_group* group, Echo& batch) {
    if (GetParam() == XD_EP_LL_COMBINE) ok(finish(rank, group, batch.dispatch(group)));
  }
  static void send(const Rank& rank, xd_ep_group* group, Echo& batch) {
    ok(finish(rank, group, batch.call(group, GetParam(), kSend)));
  }
  static Outcome receive(const Rank& rank, xd_ep_group* group, Echo& batch) {
    const auto start = Clock::now();
    const Outcome outcome = finish(rank, group, batch.call(group, GetParam(), kReceive));
    EXPECT_LT(Clock::now() - start, kAtOnce);
    return outcome;
  }
  // What comes behind the operation, and the sums of the batch.
  static void end(const Rank& rank, xd_ep_group* group, Echo& batch,
                  const std::vector<bool>& lost) {
    if (GetParam() == XD_EP_LL_DISPATCH) {
      EXPECT_EQ(batch.rows_by_source(), batch.expected_rows(lost));
      ok(finish(rank, group, batch.combine(group)));
    }
  }
  const LlCase c_ = echo_case(kRanks);
};

TEST_P(LlBetween, ARankThatIsMaskedByHandIsWaitedForNoMore) {
  on_thread_ranks(kRanks, kTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c_, {XD_EP_PEER_LOSS_MASK, 0});
    good_step(rank, c_, group.get(), nobody(), 0);
    Echo batch(rank, c_, 1);
    begin(rank, group.get(), batch);
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank != kMasked) {
      send(rank, group.get(), batch);
      mask(rank, group.get(), true);
      expect_loss(receive(rank, group.get(), batch));
      end(rank, group.get(), batch, the_masked());
      EXPECT_EQ(batch.wrong(the_masked()), "");
      for (int later = 2; later < 8; ++later) good_step(rank, c_, group.get(), the_masked(), later);
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST_P(LlBetween, TheShareOfAMaskedRankCountsIfItHasCome) {
  on_thread_ranks(kRanks, kTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c_, {XD_EP_PEER_LOSS_MASK, 0});
    Echo batch(rank, c_, 1);
    begin(rank, group.get(), batch);
    send(rank, group.get(), batch);
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank != kMasked) {
      mask(rank, group.get(), true);
      ok(receive(rank, group.get(), batch));
      // The rank has no part in the combine of its rows.
      const bool combined = GetParam() == XD_EP_LL_COMBINE;
      if (!combined) {
        EXPECT_EQ(batch.rows_by_source(), batch.expected_rows(nobody()));
        ok(finish(rank, group.get(), batch.combine(group.get())));
      }
      EXPECT_EQ(batch.wrong(combined ? nobody() : the_masked()), "");
      for (int later = 2; later < 8; ++later) good_step(rank, c_, group.get(), the_masked(), later);
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

// As a scheduler does that knows of the rank's end before its peers' waits do.
TEST_P(LlBetween, ARankThatAnotherThreadMasksIsWaitedForNoMore) {
  on_thread_ranks(kRanks, kTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c_, {XD_EP_PEER_LOSS_MASK, 0});
    Echo batch(rank, c_, 1);
    begin(rank, group.get(), batch);
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank != kMasked) {
      send(rank, group.get(), batch);
      xd_status masked = XD_ERROR_INTERNAL;
      std::thread scheduler([&] {
        std::this_thread::sleep_for(milliseconds(50));  // mostly the wait has begun
        masked = xd_ep_ll_mask_set(group.get(), kMasked, 1, rank.stream());
      });
      const Outcome outcome = receive(rank, group.get(), batch);
      scheduler.join();
      EXPECT_EQ(masked, XD_SUCCESS);
      expect_loss(outcome);
      end(rank, group.get(), batch, the_masked());
      EXPECT_EQ(batch.wrong(the_masked()), "");
      for (int later = 2; later < 8; ++later) good_step(rank, c_, group.get(), the_masked(), later);
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

// Both have been sent to the rank, so both need it. Those that are sent later do not.
TEST_P(LlBetween, EachOperationThatWasSentToALostRankTellsItsLoss) {
  constexpr int kShortTimeoutMs = 500;
  on_thread_ranks(kRanks, kTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c_, {XD_EP_PEER_LOSS_MASK, kShortTimeoutMs});
    Echo a(rank, c_, 1), b(rank, c_, 2);
    begin(rank, group.get(), a);
    begin(rank, group.get(), b);
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank != kMasked) {
      send(rank, group.get(), a);
      send(rank, group.get(), b);
      expect_loss(receive(rank, group.get(), a));
      const auto start = Clock::now();
      expect_loss(receive(rank, group.get(), b));
      EXPECT_LT(Clock::now() - start, milliseconds(kShortTimeoutMs));
      for (Echo* batch : {&a, &b}) {
        end(rank, group.get(), *batch, the_masked());
        EXPECT_EQ(batch->wrong(the_masked()), "");
      }
      for (int later = 3; later < 8; ++later) good_step(rank, c_, group.get(), the_masked(), later);
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

// The operation has begun without the rank, and ends without it.
TEST_P(LlBetween, ARankThatIsUnmaskedThereHasNoPartInTheOperation) {
  on_thread_ranks(kRanks, kTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c_, {XD_EP_PEER_LOSS_MASK, 0});
    Echo batch(rank, c_, 1);
    if (rank.rank != kMasked) {
      mask(rank, group.get(), true);
      begin(rank, group.get(), batch);
      send(rank, group.get(), batch);
      mask(rank, group.get(), false);
      ok(receive(rank, group.get(), batch));
      mask(rank, group.get(), true);
      end(rank, group.get(), batch, the_masked());
      EXPECT_EQ(batch.wrong(the_masked()), "");
      mask(rank, group.get(), false);
    }
    ok(xd_comm_barrier(rank.comm));
    ok(finish(rank, group.get(), xd_ep_ll_reset(group.get(), rank.stream())));
    for (int later = 2; later < 8; ++later) good_step(rank, c_, group.get(), nobody(), later);
  });
}

// The send half of a combine that is given weights waits for those of its peers, but for no masked
// one's.
TEST(LlBetweenCalls, WeightsOfAMaskedRankAreNotWaitedFor) {
  const LlCase c = echo_case(kRanks);
  on_thread_ranks(kRanks, kTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c, {XD_EP_PEER_LOSS_MASK, 0});
    Echo batch(rank, c, 1), halves(rank, c, 2);
    for (Echo* each : {&batch, &halves}) {
      ok(finish(rank, group.get(), each->dispatch(group.get())));
      each->weigh_in_combine();
    }
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank != kMasked) {
      mask(rank, group.get(), true);
      const auto start = Clock::now();
      ok(finish(rank, group.get(), batch.combine(group.get())));
      ok(finish(rank, group.get(), halves.combine(group.get(), kSend)));
      ok(finish(rank, group.get(), halves.combine(group.get(), kReceive)));
      EXPECT_LT(Clock::now() - start, kAtOnce);
      for (const Echo* each : {&batch, &halves}) EXPECT_EQ(each->wrong(the_masked()), "");
      for (int later = 3; later < 8; ++later) good_step(rank, c, group.get(), the_masked(), later);
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

// The mistake belongs to an operation with a higher number.
TEST(LlBetweenCalls, ALossIsToldBehindTheMistakeOfALaterSend) {
  const LlCase c = echo_case(kRanks);
  on_thread_ranks(kRanks, kTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank, c, {XD_EP_PEER_LOSS_MASK, 0});
    Echo a(rank, c, 1), b(rank, c, 2);
    for (Echo* each : {&a, &b}) ok(finish(rank, group.get(), each->dispatch(group.get())));
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank != kMasked) {
      ok(finish(rank, group.get(), a.combine(group.get(), kSend)));
      std::vector<std::byte> damaged = b.plan().read();
      damaged[24] ^= std::byte{0x40};
      b.plan().write(damaged);
      EXPECT_EQ(finish(rank, group.get(), b.combine(group.get(), kSend)),
                XD_ERROR_INVALID_ARGUMENT);
      mask(rank, group.get(), true);
      expect_loss(finish(rank, group.get(), a.combine(group.get(), kReceive)));
      EXPECT_EQ(a.wrong(the_masked()), "");
      for (int later = 3; later < 8; ++later) good_step(rank, c, group.get(), the_masked(), later);
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

INSTANTIATE_TEST_SUITE_P(Calls, LlBetween, testing::Values(XD_EP_LL_DISPATCH, XD_EP_LL_COMBINE),
                         [](const testing::TestParamInfo<xd_ep_operation>& instance) {
                           return instance.param == XD_EP_LL_DISPATCH ? "dispatch" : "combine";
                         });

}  // namespace
}  // namespace xd::test
