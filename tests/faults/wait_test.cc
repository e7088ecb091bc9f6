// Waits that end without the peer: the peer is late, busy elsewhere or gone, or a rank has given
// up.
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "conformance/batch.h"
#include "faults/rank_program.h"
#include "faults/thread_ranks.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

constexpr xd_ep_operation kOperations[] = {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE,
                                           XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD};

// Every call of a finished communicator says the same.
void expect_finished(xd_comm* comm, xd_ep_group* group, Batch& batch, xd_status status) {
  EXPECT_EQ(comm_error(comm).status, status);
  EXPECT_EQ(xd_comm_barrier(comm), status) << xd_last_error();
  EXPECT_EQ(xd_mem_grow(comm, 4096), status) << xd_last_error();
  for (const xd_ep_operation operation : kOperations) {
    EXPECT_EQ(batch.call(group, operation), status);
  }
  const xd_ep_config config = plain_case(2).config(0);
  xd_ep_group* another = nullptr;
  EXPECT_EQ(xd_ep_group_create(comm, &config, &another), status) << xd_last_error();
}

class Wait : public testing::TestWithParam<xd_ep_operation> {
 protected:
  const Case c_ = plain_case(2);
};

TEST_P(Wait, ForALatePeerEndsInTimeAndSaysWhereItStood) {
  std::latch timed_out(1);
  on_thread_ranks(2, kShortTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank.comm, c_.config(rank.rank));
    Batch batch(rank, c_);
    batch.prepare(group.get());
    if (rank.rank == 1) {
      timed_out.wait();  // much too late
      EXPECT_EQ(batch.call(group.get(), GetParam()), XD_ERROR_TIMEOUT);
      return;
    }
    const auto start = Clock::now();
    const Outcome outcome = batch.call(group.get(), GetParam());
    EXPECT_EQ(outcome, XD_ERROR_TIMEOUT);
    const std::string& text = outcome.text;
    expect_timed_out(start);
    const xd_error_info info = expect_late_peer(rank, GetParam());
    EXPECT_EQ(info.group, 0);
    EXPECT_EQ(info.seen_epoch, 1u);
    EXPECT_TRUE(mentions(text, "rank 1")) << text;
    EXPECT_TRUE(mentions(info.text, "rank 1")) << info.text;
    expect_finished(rank.comm, group.get(), batch, XD_ERROR_TIMEOUT);
    timed_out.count_down();
  });
}

TEST_P(Wait, IsReleasedByAnAbortHereAndOnPeers) {
  on_thread_ranks(3, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const Case c = plain_case(3);
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    // Rank 2 does not come; another thread of rank 0 gives up for all.
    const auto since = Clock::now();
    std::optional<Quitter> quitter;
    if (rank.rank == 0) quitter.emplace(rank);
    if (rank.rank == 2) std::this_thread::sleep_for(4 * kMoment);
    EXPECT_EQ(batch.call(group.get(), GetParam()), XD_ERROR_ABORTED);
    EXPECT_LT(Clock::now() - since, 4 * kMoment + kLimit);
    quitter.reset();
    EXPECT_EQ(comm_error(rank.comm).peer, 0);
    expect_finished(rank.comm, group.get(), batch, XD_ERROR_ABORTED);
  });
}

TEST_P(Wait, IsGivenUpWhenItsThreadIsInterrupted) {
  if (executor() != "cpu") GTEST_SKIP() << "kernels wait here, and no thread";
  std::latch interrupted(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank.comm, c_.config(rank.rank));
    Batch batch(rank, c_);
    batch.prepare(group.get());
    if (rank.rank == 1) {
      interrupted.wait();
      EXPECT_EQ(batch.call(group.get(), GetParam()), XD_ERROR_ABORTED);
      EXPECT_EQ(comm_error(rank.comm).peer, 0);
      return;
    }
    Impatience impatience;
    EXPECT_EQ(xd_set_interrupt(&Impatience::ask, &impatience), XD_SUCCESS);
    const auto since = Clock::now();
    EXPECT_EQ(batch.call(group.get(), GetParam()), XD_ERROR_ABORTED);
    EXPECT_LT(Clock::now() - since, kLimit);
    EXPECT_EQ(impatience.asked, impatience.patience + 1);
    EXPECT_EQ(xd_set_interrupt(nullptr, nullptr), XD_SUCCESS);
    expect_finished(rank.comm, group.get(), batch, XD_ERROR_ABORTED);
    EXPECT_EQ(impatience.asked, impatience.patience + 1);
    interrupted.count_down();
  });
}

TEST_P(Wait, ForAPeerThatHasLeftEndsAtOnce) {
  std::latch left(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm& comm) {
    Group group = make_group(rank.comm, c_.config(rank.rank));
    {
      Batch batch(rank, c_);
      batch.prepare(group.get());
      if (rank.rank == 0) {
        left.wait();
        const auto since = Clock::now();
        const Outcome outcome = batch.call(group.get(), GetParam());
        EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
        const std::string& text = outcome.text;
        EXPECT_LT(Clock::now() - since, kLimit);
        EXPECT_TRUE(mentions(text, "rank 1") && mentions(text, "left")) << text;
        EXPECT_EQ(comm_error(rank.comm).peer, 1);
        expect_finished(rank.comm, group.get(), batch, XD_ERROR_PEER_LOST);
        return;
      }
    }
    comm.reset();
    left.count_down();
    group.reset();  // a group may outlive its communicator
  });
}

TEST_P(Wait, InAGroupThatIsBusyIsRefusedAndNotACorruption) {
  std::latch refused(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const Group group = make_group(rank.comm, c_.config(rank.rank));
    Batch batch(rank, c_);
    batch.prepare(group.get());
    if (rank.rank == 1) {
      refused.wait();
      EXPECT_EQ(batch.call(group.get(), GetParam()), XD_ERROR_BUSY);
      return;
    }
    // On another stream: behind the first call it would be no second user.
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    const Rank there = rank.on(*memory);
    Batch other(there, c_);
    other.use_plan(batch.plan().data(), batch.plan().bytes());
    std::thread first([&] { EXPECT_EQ(batch.call(group.get(), GetParam()), XD_ERROR_BUSY); });
    std::this_thread::sleep_for(kMoment);
    EXPECT_EQ(other.call(group.get(), GetParam()), XD_ERROR_BUSY);
    first.join();
    EXPECT_EQ(comm_error(rank.comm).status, XD_ERROR_BUSY);
    refused.count_down();
  });
}

std::string operation_name(const testing::TestParamInfo<xd_ep_operation>& instance) {
  constexpr const char* kNames[] = {"prepare", "dispatch", "combine", "dispatch_bwd",
                                    "combine_bwd"};
  return kNames[instance.param];
}

INSTANTIATE_TEST_SUITE_P(Operations, Wait, testing::ValuesIn(kOperations), operation_name);

TEST(Waits, OfRanksThatCallGroupsInDifferentOrderEndWithTheGroupsNumber) {
  const Case c = plain_case(2);
  on_thread_ranks(2, kShortTimeoutMs, [&](Rank& rank, Comm&) {
    const Group groups[] = {make_group(rank.comm, c.config(rank.rank)),
                            make_group(rank.comm, c.config(rank.rank))};
    Batch batch(rank, c);
    const Outcome outcome = batch.call(groups[rank.rank].get(), XD_EP_PREPARE);
    EXPECT_EQ(outcome, XD_ERROR_TIMEOUT);
    const std::string& text = outcome.text;
    const xd_error_info info = comm_error(rank.comm);
    // All ranks have the error of the rank that was first.
    EXPECT_EQ(info.group, info.rank);
    EXPECT_EQ(info.operation, XD_EP_PREPARE);
    EXPECT_EQ(info.expected_epoch, 1u);
    EXPECT_TRUE(mentions(text, "group " + std::to_string(info.group))) << text;
  });
}

TEST(Waits, OfHostCallsAreReleasedByAnAbort) {
  const Case c = plain_case(2);
  using Call = std::function<xd_status(xd_comm*)>;
  const Call calls[] = {
      [](xd_comm* comm) { return xd_comm_barrier(comm); },
      [](xd_comm* comm) { return xd_mem_grow(comm, 4096); },
      [&](xd_comm* comm) {
        const xd_ep_config config = c.config(0);
        xd_ep_group* group = nullptr;
        return xd_ep_group_create(comm, &config, &group);
      },
  };
  for (const Call& call : calls) {
    SCOPED_TRACE("call " + std::to_string(&call - calls));
    std::latch released(1);  // until then rank 1 stays: its leaving would end the call as well
    on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
      const auto since = Clock::now();
      if (rank.rank == 1) {
        std::this_thread::sleep_for(kMoment);
        EXPECT_EQ(xd_comm_abort(rank.comm), XD_SUCCESS);
        EXPECT_EQ(call(rank.comm), XD_ERROR_ABORTED) << xd_last_error();
        return released.wait();
      }
      EXPECT_EQ(call(rank.comm), XD_ERROR_ABORTED) << xd_last_error();
      EXPECT_LT(Clock::now() - since, kMoment + kLimit);
      released.count_down();
    });
  }
}

TEST(Waits, OfHostCallsAreGivenUpWhenTheirThreadIsInterrupted) {
  std::latch released(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    if (rank.rank == 1) {
      released.wait();
      EXPECT_EQ(xd_comm_barrier(rank.comm), XD_ERROR_ABORTED) << xd_last_error();
      EXPECT_EQ(comm_error(rank.comm).peer, 0);
      return;
    }
    Impatience impatience;
    xd_set_interrupt(&Impatience::ask, &impatience);
    EXPECT_EQ(xd_comm_barrier(rank.comm), XD_ERROR_ABORTED) << xd_last_error();
    EXPECT_EQ(impatience.asked, impatience.patience + 1);
    xd_set_interrupt(nullptr, nullptr);
    released.count_down();
  });
}

TEST(Waits, ForRanksToMeetAreGivenUpWhenTheirThreadIsInterrupted) {
  xd_unique_id id;
  ok(xd_unique_id_create(nullptr, &id));
  xd_comm_config config XD_COMM_CONFIG_INIT;
  config.num_ranks = 2;
  config.unique_id = &id;
  config.timeout_ms = kLongTimeoutMs;
  Impatience impatience;
  xd_set_interrupt(&Impatience::ask, &impatience);
  xd_comm* comm = nullptr;
  const auto since = Clock::now();
  EXPECT_EQ(xd_comm_create(&config, &comm), XD_ERROR_ABORTED) << xd_last_error();
  EXPECT_LT(Clock::now() - since, kLimit);
  EXPECT_EQ(impatience.asked, impatience.patience + 1);
  EXPECT_EQ(comm, nullptr);
  xd_set_interrupt(nullptr, nullptr);
}

TEST(Waits, OfOneThreadEndWhenAnotherOneGivesUp) {
  std::latch released(1);  // until then rank 1 stays and does nothing
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    if (rank.rank == 1) return released.wait();
    std::optional<Quitter> quitter(rank);
    const auto since = Clock::now();
    EXPECT_EQ(xd_comm_barrier(rank.comm), XD_ERROR_ABORTED) << xd_last_error();
    EXPECT_LT(Clock::now() - since, kMoment + kLimit);
    quitter.reset();
    released.count_down();
  });
}

// Rank 2 leaves; rank 1 needs it, fails, and leaves too. Rank 0 hears of the cause.
TEST(Waits, ForARankThatLeftBecauseOfAnErrorNameTheCause) {
  const Case c = plain_case(3);
  std::latch left(1), failed(1);
  on_thread_ranks(3, kLongTimeoutMs, [&](Rank& rank, Comm& comm) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const auto expect_loss_of_rank_2 = [&] {
      Batch batch(rank, c);
      EXPECT_EQ(batch.call(group.get(), XD_EP_PREPARE), XD_ERROR_PEER_LOST);
      EXPECT_EQ(comm_error(rank.comm).peer, 2) << comm_error(rank.comm).text;
    };
    if (rank.rank == 1) left.wait();
    if (rank.rank == 0) failed.wait();
    if (rank.rank != 2) expect_loss_of_rank_2();
    if (rank.rank == 0) return;
    comm.reset();
    (rank.rank == 2 ? left : failed).count_down();
  });
}

TEST(Waits, OfHostCallsForALatePeerEndInTime) {
  std::latch timed_out(1);
  on_thread_ranks(2, kShortTimeoutMs, [&](Rank& rank, Comm&) {
    if (rank.rank == 1) return timed_out.wait();
    EXPECT_EQ(xd_comm_barrier(rank.comm), XD_ERROR_TIMEOUT);
    EXPECT_TRUE(mentions(xd_last_error(), "1")) << xd_last_error();
    const xd_error_info info = comm_error(rank.comm);
    EXPECT_EQ(info.phase, XD_PHASE_HOST);
    EXPECT_EQ(info.peer, 1);
    timed_out.count_down();
  });
}

TEST(Waits, ForRanksThatNeverComeNameThem) {
  xd_unique_id id;
  xd_unique_id_config id_config = XD_UNIQUE_ID_CONFIG_INIT;
  id_config.timeout_ms = kShortTimeoutMs;
  ok(xd_unique_id_create(&id_config, &id));
  std::vector<std::thread> ranks;
  for (const int number : {0, 2}) {
    ranks.emplace_back([&, number] {
      xd_comm_config config = XD_COMM_CONFIG_INIT;
      config.unique_id = &id;
      config.rank = number;
      config.num_ranks = 4;
      config.timeout_ms = kShortTimeoutMs;
      const std::unique_ptr<Memory> memory = make_memory(executor(), number);
      config.device = memory->device();
      xd_comm* comm = nullptr;
      EXPECT_EQ(xd_comm_create(&config, &comm), XD_ERROR_TIMEOUT) << xd_last_error();
      const std::string text = xd_last_error();
      EXPECT_TRUE(mentions(text, "1, 3")) << text;
      EXPECT_EQ(comm, nullptr);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace
}  // namespace xd::test
