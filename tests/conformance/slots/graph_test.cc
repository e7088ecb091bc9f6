// Low-latency steps in CUDA graphs: captured once, whole or in halves, and replayed with other
// content, routing included, while eager steps come between.
#include <gtest/gtest.h>

#include <ostream>
#include <vector>

#include "conformance/cuda/graph.h"
#include "conformance/slots/echo.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr int kReplays = 120;

struct GraphShape {
  const char* name;
  bool halves;
  xd_ll_peer_loss on_peer_loss;
  Tables tables = Tables::none;
};
void PrintTo(const GraphShape& shape, std::ostream* out) { *out << shape.name; }

// Two batches, which are in flight at once where the step is made of halves.
class Pair {
 public:
  Pair(const Rank& rank, const LlCase& c, const GraphShape& shape)
      : rank_(rank),
        case_(c),
        halves_(shape.halves),
        group_(make_group(rank, c, {shape.on_peer_loss, 0})),
        first_(rank, c, 0),
        second_(rank, c, 1) {}

  // Two batches have one table.
  void load(int number) {
    first_.load(2 * number);
    second_.load(2 * number + 1);
    if (case_.tables == Tables::none) return;
    const Given table(case_.table(2 * number));
    ok(finish(rank_, group_.get(),
              xd_ll_group_set_placement(group_.get(), table.get(), rank_.stream())));
  }
  void enqueue() {
    const std::vector<xd_ll_phase> phases = halves_
                                                ? std::vector{XD_LL_PHASE_SEND, XD_LL_PHASE_RECEIVE}
                                                : std::vector{XD_LL_PHASE_BOTH};
    for (const xd_ll_operation kind : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
      for (const xd_ll_phase phase : phases) {
        for (Echo* batch : {&first_, &second_}) ok(batch->call(group_.get(), kind, phase));
      }
    }
  }
  void expect_end() {
    ok(finish(rank_, group_.get(), XD_SUCCESS));
    const std::vector<bool> none(static_cast<std::size_t>(rank_.num_ranks));
    for (const Echo* batch : {&first_, &second_}) {
      ASSERT_EQ(batch->rows_by_source(), batch->expected_rows(none));
      ASSERT_EQ(batch->wrong(none), "");
    }
  }

 private:
  const Rank& rank_;
  const LlCase case_;
  const bool halves_;
  const LlGroup group_;
  Echo first_, second_;
};

LlCase graph_case(const GraphShape& shape) {
  LlCase c = echo_case(world().num_ranks());
  c.tables = shape.tables;
  c.tokens = Tokens::full;  // a graph keeps its tensors' shapes
  c.max_tokens = 24;
  return c;
}

class LlGraph : public testing::TestWithParam<GraphShape> {};

TEST_P(LlGraph, ReplaysWithOtherRoutingBetweenEagerSteps) {
  on_every_rank([](Rank& rank) {
    Pair pair(rank, graph_case(GetParam()), GetParam());
    const Graph graph(rank, [&] { pair.enqueue(); });
    for (int number = 0; number < kReplays; ++number) {
      pair.load(number);
      graph.launch();
      pair.expect_end();
      if (number % 8 != 0) continue;
      pair.load(kReplays + number);
      pair.enqueue();
      pair.expect_end();
    }
    for (int again = 0; again < kReplays; ++again) graph.launch();  // no rank waits between them
    pair.expect_end();
  });
}

TEST_P(LlGraph, OfSomeRanksMeetsEagerCallsOfOthers) {
  on_every_rank([](Rank& rank) {
    Pair pair(rank, graph_case(GetParam()), GetParam());
    const Graph graph(rank, [&] { pair.enqueue(); });
    for (int number = 0; number < kReplays; ++number) {
      pair.load(number);
      if ((number + rank.rank) % 2 == 0) {
        graph.launch();
      } else {
        pair.enqueue();
      }
      pair.expect_end();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, LlGraph,
    testing::Values(GraphShape{"whole", false, XD_LL_PEER_LOSS_FATAL},
                    GraphShape{"halves", true, XD_LL_PEER_LOSS_FATAL},
                    GraphShape{"whole_that_masks", false, XD_LL_PEER_LOSS_MASK},
                    GraphShape{"halves_that_mask", true, XD_LL_PEER_LOSS_MASK},
                    GraphShape{"whole_by_tables", false, XD_LL_PEER_LOSS_FATAL, Tables::with_gaps},
                    GraphShape{"halves_by_tables_that_mask", true, XD_LL_PEER_LOSS_MASK,
                               Tables::replicas}),
    [](const testing::TestParamInfo<GraphShape>& instance) { return instance.param.name; });

}  // namespace
}  // namespace xd::test
