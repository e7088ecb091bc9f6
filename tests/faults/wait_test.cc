// Waits that end without the peer: the peer is late, busy elsewhere or gone, or a rank has given
// up. First those that operations of all families have, then those of host calls and of products.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "conformance/batch.h"
#include "conformance/said.h"
#include "faults/gemm_call.h"
#include "faults/meeting.h"
#include "faults/rank_program.h"
#include "faults/thread_ranks.h"
#include "faults/wait_family.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

// Every call of a finished communicator says the same.
void expect_finished(const Rank& rank, Waiter& waiter, xd_status status) {
  EXPECT_EQ(comm_error(rank.comm).status, status);
  EXPECT_EQ(xd_comm_barrier(rank.comm), status) << xd_last_error();
  EXPECT_EQ(xd_mem_grow(rank.comm, 4096), status) << xd_last_error();
  waiter.expect_finished(status);
}

class Wait : public testing::TestWithParam<Waiting> {};

TEST_P(Wait, ForALatePeerEndsInTimeAndSaysWhereItStood) {
  std::latch timed_out(1);
  on_thread_ranks(2, kShortTimeoutMs, [&](Rank& rank, Comm&) {
    const auto waiter = GetParam().make(rank);
    if (rank.rank == 1) {
      timed_out.wait();  // much too late
      EXPECT_EQ(waiter->call_whole(), XD_ERROR_TIMEOUT);
      return;
    }
    const auto start = Clock::now();
    const CallEnd end = waiter->call();
    EXPECT_EQ(end, XD_ERROR_TIMEOUT);
    expect_timed_out(start);
    const xd_error_info info = expect_late_peer(rank, GetParam().operation, waiter->epoch());
    EXPECT_EQ(info.group, 0);
    if (GetParam().tells_epochs) {
      EXPECT_EQ(info.seen_epoch, waiter->epoch() - 1);
    }
    for (const std::string& text : {end.text, std::string(info.text)}) {
      expect_words(text, {"rank 1", GetParam().mentioned});
    }
    expect_finished(rank, *waiter, XD_ERROR_TIMEOUT);
    timed_out.count_down();
  });
}

TEST_P(Wait, IsReleasedByAnAbortHereAndOnPeers) {
  std::latch released(2);
  on_thread_ranks(3, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const auto waiter = GetParam().make(rank);
    // Rank 2 does not come in time; another thread of rank 0 gives up for all.
    const auto since = Clock::now();
    std::optional<Quitter> quitter;
    if (rank.rank == 0) quitter.emplace(rank);
    if (rank.rank == 2) {
      released.wait();
      EXPECT_EQ(waiter->call_whole(), XD_ERROR_ABORTED);
    } else {
      EXPECT_EQ(waiter->call(), XD_ERROR_ABORTED);
      released.count_down();
    }
    EXPECT_LT(Clock::now() - since, kMoment + kLimit);
    quitter.reset();
    EXPECT_EQ(comm_error(rank.comm).peer, 0);
    expect_finished(rank, *waiter, XD_ERROR_ABORTED);
  });
}

TEST_P(Wait, IsGivenUpWhenItsThreadIsInterrupted) {
  if (executor() != "cpu") GTEST_SKIP() << "kernels wait here, and no thread";
  std::latch interrupted(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const auto waiter = GetParam().make(rank);
    if (rank.rank == 1) {
      interrupted.wait();
      EXPECT_EQ(waiter->call_whole(), XD_ERROR_ABORTED);
      EXPECT_EQ(comm_error(rank.comm).peer, 0);
      return;
    }
    Impatience impatience;
    EXPECT_EQ(xd_set_interrupt(&Impatience::ask, &impatience), XD_SUCCESS);
    const auto since = Clock::now();
    EXPECT_EQ(waiter->call(), XD_ERROR_ABORTED);
    EXPECT_LT(Clock::now() - since, kLimit);
    EXPECT_EQ(impatience.asked, impatience.patience + 1);
    EXPECT_EQ(xd_set_interrupt(nullptr, nullptr), XD_SUCCESS);
    expect_finished(rank, *waiter, XD_ERROR_ABORTED);
    EXPECT_EQ(impatience.asked, impatience.patience + 1);
    interrupted.count_down();
  });
}

TEST_P(Wait, ForAPeerThatHasLeftEndsAtOnce) {
  std::latch left(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm& comm) {
    const auto waiter = GetParam().make(rank);
    if (rank.rank == 1) {
      waiter->free_arguments();
      comm.reset();
      left.count_down();
      return;  // a group or context may outlive its communicator
    }
    left.wait();
    const auto since = Clock::now();
    const CallEnd end = waiter->call();
    EXPECT_EQ(end, XD_ERROR_PEER_LOST);
    EXPECT_LT(Clock::now() - since, kLimit);
    expect_words(end.text, {"rank 1", "left"});
    EXPECT_EQ(comm_error(rank.comm).peer, 1);
    expect_finished(rank, *waiter, XD_ERROR_PEER_LOST);
  });
}

constexpr auto kNameOfWait = [](const auto& instance) { return instance.param.name; };
INSTANTIATE_TEST_SUITE_P(Bulk, Wait, testing::ValuesIn(bulk_waits()), kNameOfWait);
INSTANTIATE_TEST_SUITE_P(Parts, Wait, testing::ValuesIn(part_waits()), kNameOfWait);
INSTANTIATE_TEST_SUITE_P(LowLatency, Wait, testing::ValuesIn(low_latency_waits()), kNameOfWait);
INSTANTIATE_TEST_SUITE_P(Products, Wait, testing::ValuesIn(product_waits()), kNameOfWait);

// Operations of which a group or context has one at a time.
class SecondWait : public Wait {};

TEST_P(SecondWait, OfABusyGroupOrContextIsRefusedAndNotACorruption) {
  if (GetParam().operation == XD_GEMM_START_ALL_GATHER && executor() != "cpu") {
    GTEST_SKIP() << "the next operation comes behind a started gather on any stream";
  }
  std::latch refused(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const auto waiter = GetParam().make(rank);
    if (rank.rank == 1) {
      refused.wait();
      EXPECT_EQ(waiter->call(), XD_ERROR_BUSY);
      return;
    }
    // On another stream: behind the first call it would be no second user.
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    const auto other = waiter->beside(*memory);
    std::thread first([&] { EXPECT_EQ(waiter->call(), XD_ERROR_BUSY); });
    std::this_thread::sleep_for(kMoment);
    EXPECT_EQ(other->call(), XD_ERROR_BUSY);
    first.join();
    EXPECT_EQ(comm_error(rank.comm).status, XD_ERROR_BUSY);
    refused.count_down();
  });
}

INSTANTIATE_TEST_SUITE_P(Bulk, SecondWait, testing::ValuesIn(bulk_waits()), kNameOfWait);
INSTANTIATE_TEST_SUITE_P(Products, SecondWait, testing::ValuesIn(product_waits()), kNameOfWait);

TEST(Waits, OfRanksThatCallGroupsOrContextsInDifferentOrderEndWithTheNumberOfOne) {
  if (executor() == "cpu") GTEST_SKIP() << "there it is told at once: see OutOfStep";
  for (const Waiting& waiting : {bulk_waits()[0], product_waits()[2]}) {
    SCOPED_TRACE(waiting.name);
    on_thread_ranks(2, kShortTimeoutMs, [&](Rank& rank, Comm&) {
      const std::unique_ptr<Waiter> waiters[] = {waiting.make(rank), waiting.make(rank)};
      const CallEnd end = waiters[rank.rank]->call();
      EXPECT_EQ(end, XD_ERROR_TIMEOUT);
      const xd_error_info info = comm_error(rank.comm);
      // All ranks have the error of the rank that was first.
      EXPECT_EQ(info.group, info.rank);
      EXPECT_EQ(info.operation, waiting.operation);
      EXPECT_EQ(info.expected_epoch, 2u);
      expect_words(end.text, {"group " + std::to_string(info.group)});
    });
  }
}

// ---- Ranks that are out of step -----------------------------------------------------------------

// Waits of the host, which it can tell: each rank waits for the other in another call.
class OutOfStep : public Wait {
 protected:
  void SetUp() override {
    if (executor() != "cpu") GTEST_SKIP() << "kernels wait here, and not the host";
  }
};

TEST_P(OutOfStep, InAnOperationAndAHostCallEndsBothAtOnceAndCostsNothingElse) {
  const Case c = plain_case(3);
  on_thread_ranks(3, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const auto waiter = GetParam().make(rank);
    const xd_ep_config config = c.config(rank.rank);
    ok(xd_comm_barrier(rank.comm));
    const auto since = Clock::now();
    std::string text;
    if (rank.rank == 1) {
      const CallEnd end = waiter->call();
      EXPECT_EQ(end, XD_ERROR_MISMATCH);
      text = end.text;
    } else {
      xd_ep_group* group = nullptr;
      EXPECT_EQ(xd_ep_group_create(rank.comm, &config, &group), XD_ERROR_MISMATCH);
      EXPECT_EQ(group, nullptr);
      text = xd_last_error();
    }
    EXPECT_LT(Clock::now() - since, kLimit);
    const std::string sizes = "T<=" + std::to_string(config.max_tokens_per_rank);
    expect_words(text, {"rank 1", GetParam().mentioned, "group 0", "xd_ep_group_create", sizes});
    EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
    const CallEnd again = waiter->call_whole();
    EXPECT_EQ(again, XD_SUCCESS) << again.text;
    const Group group = make_group(rank.comm, config);
    Batch batch(rank, c);
    batch.prepare(group.get());
  });
}

// Promises that are the same for all operations of a family.
class OutOfStepAnywhere : public OutOfStep {};

// Rank 1 comes to a host call when rank 0 has waited in an operation for half of its timeout, and
// rank 2 comes nowhere. Rank 0 takes its part in the host call, which is no second timeout.
TEST_P(OutOfStepAnywhere, AndForARankThatComesNowhereEndsWithTheOperationsTimeout) {
  constexpr int kTimeoutMs = 4 * kShortTimeoutMs;
  std::latch timed_out(2);
  on_thread_ranks(3, kTimeoutMs, [&](Rank& rank, Comm&) {
    const auto waiter = GetParam().make(rank);
    ok(xd_comm_barrier(rank.comm));
    const auto since = Clock::now();
    if (rank.rank == 0) {
      const CallEnd end = waiter->call();
      EXPECT_EQ(end, XD_ERROR_TIMEOUT);
      expect_timed_out(since, kTimeoutMs);
      EXPECT_EQ(comm_error(rank.comm).peer, 2) << end.text;
    } else if (rank.rank == 1) {
      std::this_thread::sleep_for(milliseconds(kTimeoutMs / 2));
      EXPECT_EQ(xd_comm_barrier(rank.comm), XD_ERROR_TIMEOUT) << xd_last_error();
    } else {
      return timed_out.wait();
    }
    timed_out.count_down();
  });
}

TEST_P(OutOfStepAnywhere, InTwoOperationsIsAMismatchOfBothAtOnce) {
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const std::unique_ptr<Waiter> waiters[] = {GetParam().make(rank), GetParam().make(rank)};
    ok(xd_comm_barrier(rank.comm));
    const auto since = Clock::now();
    const CallEnd end = waiters[rank.rank]->call();
    EXPECT_EQ(end, XD_ERROR_MISMATCH);
    EXPECT_LT(Clock::now() - since, kLimit);
    expect_words(end.text, {"rank 0", "rank 1", "group 0", "group 1", GetParam().mentioned});
    expect_finished(rank, *waiters[rank.rank], XD_ERROR_MISMATCH);
  });
}

// Another thread of the rank might make the call that its peer waits for.
TEST_P(OutOfStepAnywhere, IsNotSaidOfRanksWhoseCallsComeFromSeveralThreads) {
  on_thread_ranks(2, kShortTimeoutMs, [&](Rank& rank, Comm&) {
    const std::unique_ptr<Waiter> waiters[] = {GetParam().make(rank), GetParam().make(rank)};
    std::thread([&] { ok(xd_comm_barrier(rank.comm)); }).join();
    EXPECT_EQ(waiters[rank.rank]->call(), XD_ERROR_TIMEOUT);
  });
}

// Rank 2 waits for rank 0, and that one for rank 1, which does not come.
TEST_P(OutOfStepAnywhere, RanksNameTheOneForWhichAllWait) {
  std::latch comes(1), timed_out(2);
  on_thread_ranks(3, 6 * kShortTimeoutMs, [&](Rank& rank, Comm&) {
    const std::unique_ptr<Waiter> waiters[] = {GetParam().make(rank), GetParam().make(rank)};
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank == 1) return timed_out.wait();
    // The error of the first to give up is that of all: it is to be rank 2's, which comes first by
    // a third of the timeout. Rank 0 has the rest to come in.
    if (rank.rank == 2) comes.count_down();
    if (rank.rank == 0) {
      comes.wait();
      std::this_thread::sleep_for(milliseconds(2 * kShortTimeoutMs));
    }
    const CallEnd end = waiters[rank.rank == 2 ? 0 : 1]->call();
    EXPECT_EQ(end, XD_ERROR_TIMEOUT);
    EXPECT_EQ(comm_error(rank.comm).peer, 1) << end.text;
    expect_words(end.text, {"for rank 0", "for rank 1", "group 0", "group 1"});
    timed_out.count_down();
  });
}

INSTANTIATE_TEST_SUITE_P(Bulk, OutOfStep, testing::ValuesIn(bulk_waits()), kNameOfWait);
INSTANTIATE_TEST_SUITE_P(LowLatency, OutOfStep, testing::ValuesIn(low_latency_waits()),
                         kNameOfWait);
INSTANTIATE_TEST_SUITE_P(Products, OutOfStep, testing::ValuesIn(product_waits()), kNameOfWait);
INSTANTIATE_TEST_SUITE_P(Families, OutOfStepAnywhere,
                         testing::Values(bulk_waits()[0], low_latency_waits()[0],
                                         product_waits()[0]),
                         kNameOfWait);

// ---- Host calls ---------------------------------------------------------------------------------

TEST(Waits, OfHostCallsAreReleasedByAnAbort) {
  const Case c = plain_case(2);
  using Call = std::function<xd_status(xd_comm*)>;
  const Call calls[] = {
      [](xd_comm* comm) { return xd_comm_barrier(comm); },
      [](xd_comm* comm) { return xd_mem_grow(comm, 4096); },
      [](xd_comm* comm) { return xd_comm_all_gather(comm, nullptr, nullptr, 0); },
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
  const xd_unique_id id = new_id();
  const xd_comm_config config = id_config(id, 0, 2, kLongTimeoutMs);
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
    expect_words(xd_last_error(), {"1"});
    const xd_error_info info = comm_error(rank.comm);
    EXPECT_EQ(info.phase, XD_PHASE_HOST);
    EXPECT_EQ(info.peer, 1);
    timed_out.count_down();
  });
}

TEST(Waits, ForRanksThatNeverComeNameThem) {
  const xd_unique_id id = new_id(kShortTimeoutMs);
  std::vector<std::thread> ranks;
  for (const int number : {0, 2}) {
    ranks.emplace_back([&, number] {
      xd_comm_config config = id_config(id, number, 4, kShortTimeoutMs);
      const std::unique_ptr<Memory> memory = make_memory(executor(), number);
      config.device = memory->device();
      xd_comm* comm = nullptr;
      const auto start = Clock::now();
      EXPECT_EQ(xd_comm_create(&config, &comm), XD_ERROR_TIMEOUT) << xd_last_error();
      EXPECT_LT(Clock::now() - start, milliseconds(kShortTimeoutMs) + 10 * kLimit);
      const std::string text = xd_last_error();
      expect_words(text, {"1, 3"});
      EXPECT_EQ(comm, nullptr);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// ---- Products -----------------------------------------------------------------------------------

class ProductWait : public testing::TestWithParam<xd_gemm_operation> {};

// Any moment of large operations: rows, products and sums under way.
TEST_P(ProductWait, IsReleasedByAnAbortInTheMiddleOfProducts) {
  for (const int microseconds : {200, 1100, 4700, 13000}) {
    on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
      constexpr std::int64_t kTokens = 512;
      const GemmContext context = make_context(rank.comm, gemm_fault_config(2, kTokens));
      GemmCall call(rank, GetParam(), kTokens);
      std::optional<Quitter> quitter;
      if (rank.rank == 0) quitter.emplace(rank, std::chrono::microseconds(microseconds));
      const auto since = Clock::now();
      GemmOutcome outcome{};
      while (outcome == XD_SUCCESS && Clock::now() - since < 10 * kLimit) {
        outcome = call.call(context.get());
      }
      EXPECT_EQ(outcome, XD_ERROR_ABORTED);
      EXPECT_LT(Clock::now() - since, 2 * kLimit);
      quitter.reset();
      EXPECT_EQ(comm_error(rank.comm).peer, 0);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Operations, ProductWait, testing::ValuesIn(kGemmOperations),
                         [](const auto& instance) { return name_of(instance.param); });

TEST(ProductWaits, OfAStartedGatherHoldTheNextOneOnAnotherStreamToo) {
  if (executor() == "cpu") GTEST_SKIP() << "a thread waits there: a second one is BUSY";
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const auto waiter = product_waits().back().make(rank);
    if (rank.rank == 1) {
      std::this_thread::sleep_for(4 * kMoment);
      for (int i = 0; i < 2; ++i) EXPECT_EQ(waiter->call(), XD_SUCCESS);
      return;
    }
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    const auto other = waiter->beside(*memory);
    std::thread first([&] { EXPECT_EQ(waiter->call(), XD_SUCCESS); });
    std::this_thread::sleep_for(kMoment);
    EXPECT_EQ(other->call(), XD_SUCCESS);
    first.join();
    EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
  });
}

// Calls of a rank that comes later than its peers, by less than the timeout, are as good as any.
TEST(ProductWaits, ForRanksThatAreLateEveryTimeEndWhenTheyCome) {
  on_thread_ranks(3, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    const GemmContext context = make_context(rank.comm, gemm_fault_config(3));
    int number = 0;
    for (const xd_gemm_operation operation : kGemmOperations) {
      for (int late = 0; late < 3; ++late, ++number) {
        GemmCall call(rank, operation);
        if (rank.rank == late) std::this_thread::sleep_for(milliseconds(5 + number % 3 * 10));
        ok(call.call(context.get()));
        call.check(context.get());
      }
    }
  });
}

}  // namespace
}  // namespace xd::test
