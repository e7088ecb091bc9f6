// Waits of products that end without the peer: the peer is late, busy elsewhere or gone, or a rank
// has given up.
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "faults/gemm_call.h"
#include "faults/rank_program.h"
#include "faults/thread_ranks.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

// Every call of a finished communicator says the same.
void expect_finished(const Rank& rank, xd_gemm_context* context, xd_status status) {
  EXPECT_EQ(comm_error(rank.comm).status, status);
  EXPECT_EQ(xd_comm_barrier(rank.comm), status) << xd_last_error();
  for (const xd_gemm_operation operation : kGemmOperations) {
    EXPECT_EQ(GemmCall(rank, operation).call(context), status) << name_of(operation);
  }
  EXPECT_EQ(xd_gemm_join_failed(context, XD_GEMM_ALL_GATHER, "late", rank.stream()), status);
  const xd_gemm_config config = gemm_fault_config(rank.num_ranks);
  xd_gemm_context* another = nullptr;
  EXPECT_EQ(xd_gemm_context_create(rank.comm, &config, &another), status) << xd_last_error();
  EXPECT_EQ(another, nullptr);
}

// A context after one good operation.
GemmContext begin(const Rank& rank, GemmCall& call) {
  GemmContext context = make_context(rank.comm, gemm_fault_config(rank.num_ranks));
  ok(call.call(context.get()));
  call.check(context.get());
  return context;
}

class GemmWait : public testing::TestWithParam<xd_gemm_operation> {};

TEST_P(GemmWait, ForALatePeerEndsInTimeAndSaysWhereItStood) {
  std::latch timed_out(1);
  on_thread_ranks(2, kShortTimeoutMs, [&](Rank& rank, Comm&) {
    GemmCall call(rank, GetParam());
    const GemmContext context = begin(rank, call);
    if (rank.rank == 1) {
      timed_out.wait();  // much too late
      EXPECT_EQ(call.call(context.get()), XD_ERROR_TIMEOUT);
      return;
    }
    const auto start = Clock::now();
    const GemmOutcome outcome = call.call(context.get());
    EXPECT_EQ(outcome, XD_ERROR_TIMEOUT);
    expect_timed_out(start);
    const xd_error_info info = expect_late_peer(rank, GetParam());
    EXPECT_EQ(info.group, 0);
    EXPECT_EQ(info.seen_epoch, 1u);
    for (const std::string& text : {outcome.text, std::string(info.text)}) {
      EXPECT_TRUE(mentions(text, "rank 1") && mentions(text, name_of(GetParam()))) << text;
    }
    expect_finished(rank, context.get(), XD_ERROR_TIMEOUT);
    timed_out.count_down();
  });
}

TEST_P(GemmWait, IsReleasedByAnAbortHereAndOnPeers) {
  on_thread_ranks(3, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    GemmCall call(rank, GetParam());
    const GemmContext context = begin(rank, call);
    // Rank 2 does not come; another thread of rank 0 gives up for all.
    const auto since = Clock::now();
    std::optional<Quitter> quitter;
    if (rank.rank == 0) quitter.emplace(rank);
    if (rank.rank == 2) std::this_thread::sleep_for(4 * kMoment);
    EXPECT_EQ(call.call(context.get()), XD_ERROR_ABORTED);
    EXPECT_LT(Clock::now() - since, 4 * kMoment + kLimit);
    quitter.reset();
    EXPECT_EQ(comm_error(rank.comm).peer, 0);
    expect_finished(rank, context.get(), XD_ERROR_ABORTED);
  });
}

// Any moment of large operations: rows, products and sums under way.
TEST_P(GemmWait, IsReleasedByAnAbortInTheMiddleOfProducts) {
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

TEST_P(GemmWait, IsGivenUpWhenItsThreadIsInterrupted) {
  if (executor() != "cpu") GTEST_SKIP() << "kernels wait here, and no thread";
  std::latch interrupted(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    GemmCall call(rank, GetParam());
    const GemmContext context = begin(rank, call);
    if (rank.rank == 1) {
      interrupted.wait();
      EXPECT_EQ(call.call(context.get()), XD_ERROR_ABORTED);
      EXPECT_EQ(comm_error(rank.comm).peer, 0);
      return;
    }
    Impatience impatience;
    EXPECT_EQ(xd_set_interrupt(&Impatience::ask, &impatience), XD_SUCCESS);
    const auto since = Clock::now();
    EXPECT_EQ(call.call(context.get()), XD_ERROR_ABORTED);
    EXPECT_LT(Clock::now() - since, kLimit);
    EXPECT_EQ(xd_set_interrupt(nullptr, nullptr), XD_SUCCESS);
    interrupted.count_down();
  });
}

TEST_P(GemmWait, ForAPeerThatHasLeftEndsAtOnce) {
  std::latch left(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm& comm) {
    GemmContext context;
    {
      GemmCall call(rank, GetParam());
      context = begin(rank, call);
      if (rank.rank == 0) {
        left.wait();
        const auto since = Clock::now();
        const GemmOutcome outcome = call.call(context.get());
        EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
        EXPECT_LT(Clock::now() - since, kLimit);
        EXPECT_TRUE(mentions(outcome.text, "rank 1") && mentions(outcome.text, "left"))
            << outcome.text;
        EXPECT_EQ(comm_error(rank.comm).peer, 1);
        expect_finished(rank, context.get(), XD_ERROR_PEER_LOST);
        return;
      }
    }
    comm.reset();
    left.count_down();
    context.reset();  // a context may outlive its communicator
  });
}

TEST_P(GemmWait, InAContextThatIsBusyIsRefusedAndNotACorruption) {
  if (GetParam() == XD_GEMM_START_ALL_GATHER && executor() != "cpu") {
    GTEST_SKIP() << "the next operation comes behind a started gather on any stream";
  }
  std::latch refused(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    GemmCall call(rank, GetParam());
    const GemmContext context = begin(rank, call);
    if (rank.rank == 1) {
      refused.wait();
      EXPECT_EQ(call.call(context.get()), XD_ERROR_BUSY);
      return;
    }
    // On another stream: behind the first call it would be no second user.
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    GemmCall other(rank.on(*memory), GetParam());
    std::thread first([&] { EXPECT_EQ(call.call(context.get()), XD_ERROR_BUSY); });
    std::this_thread::sleep_for(kMoment);
    EXPECT_EQ(other.call(context.get()), XD_ERROR_BUSY);
    first.join();
    EXPECT_EQ(comm_error(rank.comm).status, XD_ERROR_BUSY);
    refused.count_down();
  });
}

INSTANTIATE_TEST_SUITE_P(Operations, GemmWait, testing::ValuesIn(kGemmOperations),
                         [](const auto& instance) { return name_of(instance.param); });

TEST(GemmWaits, OfAStartedGatherHoldTheNextOneOnAnotherStreamToo) {
  if (executor() == "cpu") GTEST_SKIP() << "a thread waits there: a second one is BUSY";
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    GemmCall call(rank, XD_GEMM_START_ALL_GATHER);
    const GemmContext context = begin(rank, call);
    if (rank.rank == 1) {
      std::this_thread::sleep_for(4 * kMoment);
      for (int i = 0; i < 2; ++i) ok(call.call(context.get()));
      return;
    }
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    GemmCall other(rank.on(*memory), XD_GEMM_START_ALL_GATHER);
    std::thread first([&] { EXPECT_EQ(call.call(context.get()), XD_SUCCESS); });
    std::this_thread::sleep_for(kMoment);
    EXPECT_EQ(other.call(context.get()), XD_SUCCESS);
    first.join();
    EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
  });
}

TEST(GemmWaits, OfRanksThatCallContextsInDifferentOrderEndWithTheContextsNumber) {
  on_thread_ranks(2, kShortTimeoutMs, [&](Rank& rank, Comm&) {
    const GemmContext contexts[] = {make_context(rank.comm, gemm_fault_config(2)),
                                    make_context(rank.comm, gemm_fault_config(2))};
    GemmCall call(rank, XD_GEMM_ALL_REDUCE);
    const GemmOutcome outcome = call.call(contexts[rank.rank].get());
    EXPECT_EQ(outcome, XD_ERROR_TIMEOUT);
    const xd_error_info info = comm_error(rank.comm);
    // All ranks have the error of the rank that was first.
    EXPECT_EQ(info.group, info.rank);
    EXPECT_EQ(info.operation, XD_GEMM_ALL_REDUCE);
    EXPECT_EQ(info.expected_epoch, 1u);
  });
}

// Calls of a rank that comes later than its peers, by less than the timeout, are as good as any.
TEST(GemmWaits, ForRanksThatAreLateEveryTimeEndWhenTheyCome) {
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
