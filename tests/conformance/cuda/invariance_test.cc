// The bits of a token's result are those of eager calls where a graph makes the calls.
#include <gtest/gtest.h>

#include <cstddef>
#include <iterator>

#include "conformance/case.h"
#include "conformance/cuda/graph.h"
#include "conformance/has_wires.h"
#include "conformance/wanderer.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

void wander_in_graphs(const Rank& rank, Way way, Wanderer::Settings settings) {
  Wanderer(rank, way, settings).wander([&](const std::function<void()>& calls) {
    const Graph graph(rank, calls);
    graph.launch();
    rank.memory->synchronize();
  });
}

TEST(CudaGraph, GivesATokenTheSameBitsWhereverItIs) {
  on_every_rank([](Rank& rank) {
    for (const Way way : kWays) wander_in_graphs(rank, way, {0, XD_EP_WIRE_SAME});
  });
}

// Each wire goes two ways, by the library's own number of multiprocessors and by a budget.
TEST(CudaGraph, GivesATokenTheSameBitsUnderEveryWire) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  on_every_rank([](Rank& rank) {
    for (std::size_t i = 0; i < std::size(kWires); ++i) {
      wander_in_graphs(rank, kWays[i], {0, kWires[i]});
      wander_in_graphs(rank, kWays[i + 1], {16 / rank.ranks_on_device(), kWires[i]});
    }
  });
}

}  // namespace
}  // namespace xd::test
