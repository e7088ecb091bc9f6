// Memory that is deregistered while captured operations still use it: a mistake, but one that ends.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "conformance/cuda/graph.h"
#include "conformance/fixed_step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

class Registrations {
 public:
  Registrations(const Rank& rank, FixedStep& step) : rank_(rank) {
    for (Tensor* tensor : step.receive_tensors()) {
      ok(xd_mem_register(rank.comm, tensor->buffer().data(), tensor->buffer().bytes(),
                         &numbers_.emplace_back()));
    }
  }
  void end() {
    for (; !numbers_.empty(); numbers_.pop_back()) {
      ok(xd_mem_deregister(rank_.comm, numbers_.back()));
    }
  }

 private:
  const Rank& rank_;
  std::vector<std::int32_t> numbers_;
};

class Deregistration : public testing::TestWithParam<xd_ep_layout> {};

TEST_P(Deregistration, UnderReplaysIsAMismatchOnAllRanksAndNobodyWaits) {
  on_every_rank([](Rank& rank) {
    FixedShape shape;
    shape.layout = GetParam();
    shape.staging = XD_EP_STAGING_NONE;
    FixedStep step(rank, shape);
    const Group group = make_group(rank.comm, shape.config(rank.num_ranks));
    for (int round = 0; round < 20; ++round) {
      step.load(round);
      Registrations registrations(rank, step);
      const Graph graph(rank, [&] { step.enqueue_all(group.get()); });
      graph.launch();
      ok(finish(rank, group.get(), XD_SUCCESS));
      step.check();
      ok(xd_comm_barrier(rank.comm));
      // Between processes it also ends mappings, under the hands of kernels that have found them.
      for (int replay = 0; rank.threads && replay < 40; ++replay) graph.launch();
      registrations.end();  // every rank's host at a moment of its own
      for (int replay = 0; replay < 2; ++replay) graph.launch();
      EXPECT_EQ(finish(rank, group.get(), XD_SUCCESS), XD_ERROR_MISMATCH);
      // Memory that is registered now is another registration: the graph does not find it.
      Registrations later(rank, step);
      graph.launch();
      EXPECT_EQ(finish(rank, group.get(), XD_SUCCESS), XD_ERROR_MISMATCH);
      later.end();
      ASSERT_EQ(comm_error(rank.comm).status, XD_SUCCESS) << comm_error(rank.comm).text;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, Deregistration,
                         testing::Values(XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR));

}  // namespace
}  // namespace xd::test
