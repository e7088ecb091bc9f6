// Peers that fail in the middle of replayed CUDA graphs.
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "conformance/cuda/graph.h"
#include "conformance/fixed_step.h"
#include "conformance/said.h"
#include "faults/meeting.h"
#include "faults/processes.h"
#include "faults/thread_ranks.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

struct Replayed {
  explicit Replayed(const Rank& rank)
      : group(make_group(rank.comm, FixedShape{}.config(rank.num_ranks))),
        step(rank, FixedShape{}),
        graph(rank, [this] { step.enqueue_all(group.get()); }) {}

  Outcome replay(const Rank& rank, int number) {
    step.load(number);
    graph.launch();
    return finish(rank, group.get(), XD_SUCCESS);
  }

  Group group;
  FixedStep step;
  Graph graph;
};

void expect_replays(const Rank& rank, Replayed& replayed) {
  for (int number = 0; number < 7; ++number) {
    ok(replayed.replay(rank, number));
    replayed.step.check();
  }
}

class CudaWait : public testing::Test {
 protected:
  void SetUp() override {
    if (executor() != "cuda") GTEST_SKIP() << "graphs are CUDA's";
  }
};

TEST_F(CudaWait, ForAPeerThatReplaysNoMoreEndsInTimeAndTheProcessGoesOn) {
  std::latch timed_out(1);
  on_thread_ranks(3, kShortTimeoutMs, [&](Rank& rank, Comm&) {
    Replayed replayed(rank);
    expect_replays(rank, replayed);
    if (rank.rank == 2) {
      timed_out.wait();
      EXPECT_EQ(replayed.replay(rank, 0), XD_ERROR_TIMEOUT);  // ends at once
      return;
    }
    const auto start = Clock::now();
    const Outcome outcome = replayed.replay(rank, 0);
    EXPECT_EQ(outcome, XD_ERROR_TIMEOUT);
    expect_timed_out(start);
    expect_words(outcome.text, {"rank 2"});
    EXPECT_EQ(comm_error(rank.comm).peer, 2);
    EXPECT_EQ(replayed.replay(rank, 1), XD_ERROR_TIMEOUT);  // and every later one
    if (rank.rank == 0) timed_out.count_down();
  });
  // The context is as good as new.
  on_thread_ranks(3, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    Replayed replayed(rank);
    expect_replays(rank, replayed);
  });
}

TEST_F(CudaWait, OfAReplayIsReleasedByAnAbort) {
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    Replayed replayed(rank);
    expect_replays(rank, replayed);
    if (rank.rank == 1) {
      std::this_thread::sleep_for(milliseconds(30));
      EXPECT_EQ(xd_comm_abort(rank.comm), XD_SUCCESS);
    }
    const auto start = Clock::now();
    const Outcome outcome = replayed.replay(rank, 0);
    EXPECT_EQ(outcome, XD_ERROR_ABORTED);
    EXPECT_LT(Clock::now() - start, kLimit);
    const auto end = Clock::now();
    replayed.group.reset();
    EXPECT_LT(Clock::now() - end, milliseconds(500)) << "its kernels have left";
  });
}

// Graphs that do not fit together are a mismatch, at once, and harm nothing.
TEST_F(CudaWait, IsNotLongWhereRanksReplayDifferentOperations) {
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    Replayed replayed(rank);
    expect_replays(rank, replayed);
    const Graph other(rank, [&] {
      ok(replayed.step.enqueue(replayed.group.get(),
                               rank.rank == 0 ? XD_EP_DISPATCH : XD_EP_COMBINE));
    });
    for (int i = 0; i < 20; ++i) {
      const auto start = Clock::now();
      other.launch();
      EXPECT_EQ(finish(rank, replayed.group.get(), XD_SUCCESS), XD_ERROR_MISMATCH);
      EXPECT_LT(Clock::now() - start, kLimit);
    }
    expect_replays(rank, replayed);
  });
}

// Forbidden, and yet no reason to write into what belongs to others by then.
TEST_F(CudaWait, OfAGroupThatIsDestroyedMeanwhileIsBoundedAndKeepsItsMemory) {
  std::latch destroyed(1);
  on_thread_ranks(2, kLongTimeoutMs, [&](Rank& rank, Comm&) {
    FixedStep step(rank, FixedShape{});
    Group group = make_group(rank.comm, FixedShape{}.config(2));
    step.load(0);
    step.enqueue_all(group.get());
    ok(finish(rank, group.get(), XD_SUCCESS));
    step.load(1);
    // The next user has all the memory that has been given back.
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    Rank alone{0, 1, true, nullptr, memory.get(), "", {}};
    FixedStep other(alone, FixedShape{});
    if (rank.rank == 1) {
      for (int i = 0; i < 2000 && !destroyed.try_wait(); ++i) {
        std::this_thread::sleep_for(milliseconds(10));
      }
      ok(finish(rank, group.get(), step.enqueue(group.get(), XD_EP_PREPARE)));
      return;
    }
    ok(step.enqueue(group.get(), XD_EP_PREPARE));
    std::this_thread::sleep_for(milliseconds(20));  // its kernel waits for the peer
    const auto start = Clock::now();
    group.reset();
    EXPECT_LT(Clock::now() - start, milliseconds(2000) + kLimit);
    const xd_unique_id id = new_id();
    xd_comm_config config = id_config(id, 0, 1);
    config.device = rank.memory->device();
    config.heap_bytes = std::size_t{1} << 20;
    const Comm comm = make_comm(config);
    alone.comm = comm.get();
    std::vector<Group> groups;
    for (int i = 0; i < 16; ++i) groups.push_back(make_group(comm.get(), FixedShape{}.config(1)));
    const auto expect_steps = [&] {
      for (const Group& each : groups) {
        other.load(2);
        other.enqueue_all(each.get());
        ok(finish(alone, each.get(), XD_SUCCESS));
        other.check();
      }
    };
    expect_steps();
    destroyed.count_down();
    rank.memory->synchronize();  // the kernel meets its peer after all
    expect_steps();
  });
}

class CudaKill : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (executor() != "cuda") GTEST_SKIP() << "graphs and lent memory are CUDA's";
  }
};

void expect_release(RankProgram program, milliseconds moment) {
  constexpr int kVictim = 1;
  program.tokens = 512;
  Processes ranks(program, {{0}, {kVictim}, {2}});
  ranks.start();
  std::this_thread::sleep_for(moment);
  const auto since = ranks.kill(kVictim);
  for (const int survivor : {0, 2}) {
    ranks.expect_loss(survivor, kVictim, since, kLimit);
    EXPECT_EQ(ranks.wait_for_after(survivor), "clean");
  }
}

TEST_P(CudaKill, InTheMiddleOfReplaysReleasesAll) {
  RankProgram program;
  program.program = Program::replays;
  expect_release(program, milliseconds(GetParam()));
}

// Its memory stays where peers have mapped it: their kernels fault on nothing.
TEST_P(CudaKill, OfALenderOfVirtualMemoryTakesNothingAway) {
  RankProgram program;
  program.program = Program::steps;
  program.registered = true;
  expect_release(program, milliseconds(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Milliseconds, CudaKill, testing::Values(50, 103, 251));

}  // namespace
}  // namespace xd::test
