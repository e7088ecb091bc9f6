// A layer's passes in CUDA graphs: with the serial schedule, and with streams of the library beside
// the captured one.
#include <gtest/gtest.h>

#include <string>

#include "conformance/cuda/graph.h"
#include "conformance/moe/layer.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

TEST(CudaGraphOfALayer, ReplaysBothPassesWithTheirBits) {
  constexpr int kReplays = 20;
  on_every_rank([](Rank& rank) {
    const Case c = layer_case(rank.num_ranks, 1);  // plans on devices have one part so far
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    Layer eager(rank, c, batch, {});
    ok(eager.forward(group.get(), 0));
    ok(eager.backward(group.get(), 0));
    for (const int parts : {1, 0}) {
      SCOPED_TRACE("parts " + std::to_string(parts));
      Layer captured(rank, c, batch, {});
      captured.forward_args.parts = captured.backward_args.parts = parts;
      const Graph graph(rank, [&] {
        ok(xd_moe_forward(group.get(), &captured.forward_args, rank.stream()));
        ok(xd_moe_backward(group.get(), &captured.backward_args, rank.stream()));
      });
      for (int i = 0; i < kReplays; ++i) graph.launch();
      ok(finish(rank, group.get(), XD_SUCCESS));
      captured.expect_equal(eager);
    }
  });
}

}  // namespace
}  // namespace xd::test
