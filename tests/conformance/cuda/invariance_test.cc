// The bits of a token's result are those of eager calls where a graph makes the calls.
#include <gtest/gtest.h>

#include "conformance/cuda/graph.h"
#include "conformance/wanderer.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

TEST(CudaGraph, GivesATokenTheSameBitsWhereverItIs) {
  on_every_rank([](Rank& rank) {
    for (const Way way : kWays) {
      Wanderer(rank, way).wander([&](const std::function<void()>& calls) {
        const Graph graph(rank, calls);
        graph.launch();
        rank.memory->synchronize();
      });
    }
  });
}

}  // namespace
}  // namespace xd::test
