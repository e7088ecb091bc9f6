// Operations in CUDA graphs: captured once, replayed with other content, routing included.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "conformance/cuda/graph.h"
#include "conformance/fixed_step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr int kReplays = 120;

std::unique_ptr<Graph> capture(Stage& stage) {
  return std::make_unique<Graph>(stage.rank, [&] { stage.enqueue(); });
}

class CudaGraph : public testing::TestWithParam<FixedShape> {};

TEST_P(CudaGraph, ReplaysAStepWithOtherRoutingEachTime) {
  on_every_rank([](Rank& rank) {
    Stage stage(rank, GetParam());
    const auto graph = capture(stage);
    for (int number = 0; number < kReplays; ++number) {
      stage.step.load(number);
      graph->launch();
      stage.expect_end();
    }
    for (int again = 0; again < kReplays; ++again) graph->launch();  // no rank waits between them
    stage.expect_end();
  });
}

TEST_P(CudaGraph, AndEagerCallsTakeTurns) {
  on_every_rank([](Rank& rank) {
    Stage stage(rank, GetParam());
    stage.step.load(0);
    stage.enqueue();
    stage.expect_end();
    const auto graph = capture(stage);
    for (int number = 1; number < kReplays; ++number) {
      stage.step.load(number);
      if (number % 3 != 0) graph->launch();
      if (number % 3 != 1) stage.enqueue();
      stage.expect_end();
    }
  });
}

TEST_P(CudaGraph, OfSomeRanksMeetsEagerCallsOfOthers) {
  on_every_rank([](Rank& rank) {
    Stage stage(rank, GetParam());
    const auto graph = capture(stage);
    for (int number = 0; number < kReplays; ++number) {
      stage.step.load(number);
      if ((number + rank.rank) % 2 == 0) {
        graph->launch();
      } else {
        stage.enqueue();
      }
      stage.expect_end();
    }
  });
}

// Replays route by the table that is in force, under which some choices have no slot.
TEST(CudaGraphOfLogicalExperts, FollowsChangesOfTheTable) {
  for (FixedShape shape : kFixedShapes) {
    // One rank alone has no more experts than a token chooses.
    shape.tables = world().num_ranks() == 1 ? Tables::permuted
                   : shape.dtype.bits == 16 ? Tables::with_gaps
                                            : Tables::replicas;
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(testing::PrintToString(shape));
      Stage stage(rank, shape);
      const auto graph = capture(stage);
      for (int number = 0; number < kReplays; ++number) {
        stage.step.load(number);
        stage.step.set_table(stage.group.get());
        if (number % 4 == 3) {
          stage.enqueue();
        } else {
          graph->launch();
        }
        stage.expect_end();
      }
    });
  }
}

TEST(CudaGraphOfLogicalExperts, HasNoChangeOfTheTable) {
  FixedShape shape;
  shape.tables = Tables::permuted;
  on_every_rank([&](Rank& rank) {
    Stage stage(rank, shape);
    const Given other(make_table(shape.tables, rank.num_ranks, 4 * rank.num_ranks, 7));
    stage.step.load(0);
    stage.step.set_table(stage.group.get());
    const Graph graph(rank, [&] {
      EXPECT_EQ(xd_ep_group_set_placement(stage.group.get(), other.get(), rank.stream()),
                XD_ERROR_INVALID_ARGUMENT);
      stage.enqueue();
    });
    graph.launch();
    stage.expect_end();
  });
}

TEST_P(CudaGraph, OfTwoPlansInterleaved) {
  on_every_rank([](Rank& rank) {
    Stage a(rank, GetParam());
    FixedStep b(rank, GetParam());
    const Graph graph(rank, [&] {
      const auto run = [&](FixedStep& step, xd_ep_operation operation) {
        ok(step.enqueue(a.group.get(), operation));
      };
      run(a.step, XD_EP_PREPARE);
      run(b, XD_EP_PREPARE);
      run(a.step, XD_EP_DISPATCH);
      run(b, XD_EP_DISPATCH);
      run(b, XD_EP_COMBINE);
      run(b, XD_EP_COMBINE_BWD);
      run(a.step, XD_EP_COMBINE);
      run(a.step, XD_EP_COMBINE_BWD);
      run(b, XD_EP_DISPATCH_BWD);
      run(a.step, XD_EP_DISPATCH_BWD);
    });
    for (int number = 0; number < kReplays; ++number) {
      a.step.load(2 * number);
      b.load(2 * number + 1);
      graph.launch();
      a.expect_end();
      b.check();
    }
  });
}

// Multiprocessors for each of `groups` groups of every rank, so that all can run together.
int fair_share(const Rank& rank, int groups) {
  return std::clamp(96 / (groups * rank.ranks_on_device()), 1, 8);
}

TEST_P(CudaGraph, OfTwoGroupsRunOnTwoStreams) {
  on_every_rank([](Rank& rank) {
    FixedShape shape = GetParam();
    shape.num_sms = fair_share(rank, 2);
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    const Rank there = rank.on(*memory);
    Stage first(rank, shape);
    Stage second(there, shape);
    const auto first_graph = capture(first);
    const auto second_graph = capture(second);
    for (int number = 0; number < kReplays; ++number) {
      first.step.load(number);
      second.step.load(number + 1);
      // Each rank issues them in the order it likes.
      const bool swapped = (number + rank.rank) % 2 == 1;
      (swapped ? second_graph : first_graph)->launch();
      (swapped ? first : second).enqueue();
      first.expect_end();
      second.expect_end();
    }
  });
}

TEST_P(CudaGraph, ReportsBadIdsOfOneReplayAndGoesOn) {
  on_every_rank([](Rank& rank) {
    Stage stage(rank, GetParam());
    const auto graph = capture(stage);
    for (int number = 0; number < 21; ++number) {
      stage.step.load(number, number % 3 == 1);
      graph->launch();
      const Outcome outcome = finish(rank, stage.group.get(), XD_SUCCESS);
      ASSERT_EQ(outcome, stage.step.expected());
      if (number % 3 == 1) {
        EXPECT_EQ(outcome.group.bad_ids, FixedStep::kSpoiledIds);
        EXPECT_EQ(outcome.group.rank, rank.num_ranks - 1);
      }
      stage.step.check();
    }
  });
}

TEST_P(CudaGraph, ReportsOverflowOfOneReplayAndGoesOn) {
  on_every_rank([](Rank& rank) {
    FixedShape shape = GetParam();
    shape.recv_capacity = 160;
    Stage stage(rank, shape);
    const auto graph = capture(stage);
    for (int number = 0; number < 21; ++number) {
      stage.step.load(number);
      graph->launch();
      stage.expect_end();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaGraph, testing::ValuesIn(kFixedShapes));

// The parts of all operations of a step, one behind another. The order of parts lies on the device,
// so replays and eager calls go on with it.
constexpr FixedShape kShapesInParts[] = {{.dtype = kBf16, .place = Place::symmetric, .parts = 3},
                                         {.dtype = kF32, .place = Place::ordinary, .parts = 4}};
INSTANTIATE_TEST_SUITE_P(InParts, CudaGraph, testing::ValuesIn(kShapesInParts));

constexpr FixedShape kShapesWithWires[] = {
    {.layout = XD_EP_RANK_MAJOR, .place = Place::symmetric, .wire = XD_EP_WIRE_FP8_BLOCK128_POW2},
    {.layout = XD_EP_RANK_MAJOR,
     .dtype = kF32,
     .place = Place::ordinary,
     .wire = XD_EP_WIRE_FP8_BLOCK128_E8M0},
    {.place = Place::symmetric, .parts = 3, .wire = XD_EP_WIRE_FLOAT32}};
INSTANTIATE_TEST_SUITE_P(UnderWires, CudaGraph, testing::ValuesIn(kShapesWithWires));

// A graph may go before or after what it was captured from.
class GraphLife : public testing::TestWithParam<bool> {};

TEST_P(GraphLife, EndsBeforeOrAfterItsCommunicators) {
  const bool after = GetParam();
  on_every_rank([after](Rank& rank) {
    for (int round = 0; round < 3; ++round) {
      Comm comm = rank.another_comm("graph" + std::to_string(round), std::size_t{2} << 20);
      Rank there = rank;
      there.comm = comm.get();
      auto stage = std::make_unique<Stage>(there, FixedShape{});
      auto graph = capture(*stage);
      for (int number = 0; number < 5; ++number) {
        stage->step.load(number);
        graph->launch();
        stage->expect_end();
      }
      ok(xd_comm_barrier(comm.get()));
      if (!after) graph.reset();
      stage.reset();
      comm.reset();
      graph.reset();
    }
    Stage stage(rank, FixedShape{});
    stage.step.load(0);
    stage.enqueue();
    stage.expect_end();
  });
}

INSTANTIATE_TEST_SUITE_P(Orders, GraphLife, testing::Bool());

// In a launch of its own nothing has run before, so code that is loaded late would be loaded here.
TEST(FirstCall, MayBeCaptured) {
  on_every_rank([](Rank& rank) {
    Stage stage(rank, FixedShape{});
    stage.step.load(0);
    const auto graph = capture(stage);
    graph->launch();
    stage.expect_end();
  });
}

TEST(FirstCall, MayBeCapturedWhilePeersAreWaitingForIt) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank has no peers";
  on_every_rank([](Rank& rank) {
    Stage stage(rank, FixedShape{});
    stage.step.load(3);
    if (rank.rank != 0) stage.enqueue();
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // their kernels have begun
      capture(stage)->launch();
    }
    stage.expect_end();
  });
}

// Operations start when the device lets them in, whichever rank's comes first.
TEST(BusyDevice, DelaysOperationsAndNothingElse) {
  constexpr int kBusyMs = 200;
  on_every_rank([](Rank& rank) {
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    const Rank beside = rank.on(*memory);
    const bool occupies = rank.rank < device_count("cuda");  // one rank of each device
    if (occupies) load_occupier(beside);
    Stage stage(rank, FixedShape{});
    for (int round = 0; round < 3; ++round) {
      stage.step.load(round);
      ok(xd_comm_barrier(rank.comm));
      const auto start = std::chrono::steady_clock::now();
      if (occupies) occupy(beside, kBusyMs);
      ok(xd_comm_barrier(rank.comm));
      stage.enqueue();
      stage.expect_end();
      const auto took = std::chrono::steady_clock::now() - start;
      EXPECT_GE(took, std::chrono::milliseconds(kBusyMs - 20)) << "the device was not busy";
      EXPECT_LT(took, std::chrono::milliseconds(kBusyMs + 2000));
      memory->synchronize();
    }
  });
}

}  // namespace
}  // namespace xd::test
