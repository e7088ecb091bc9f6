// Plans, groups and communicators that are alive together and take turns.
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "conformance/batch.h"
#include "conformance/fixed_step.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

class Sequence : public testing::TestWithParam<Placing> {
 protected:
  Sequence() : c(plain_case(world().num_ranks())) {
    c.placing = GetParam();
    c.tokens = Tokens::differ;
  }
  Case c;
};

TEST_P(Sequence, TwoPlansOfAGroupInterleave) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Step a(rank, c, group.get(), 0);
    Step b(rank, c, group.get(), 1);
    a.prepare();
    b.prepare();
    a.dispatch();
    b.dispatch();
    b.combine();
    a.combine();
    b.combine_bwd();
    a.combine_bwd();
    a.dispatch_bwd();
    b.dispatch_bwd();
    a.dispatch();  // a plan serves any number of operations
    a.combine();
  });
}

// Alignment and top-k are a plan's: nothing but calls of prepare lies between.
TEST_P(Sequence, PlansOfOtherAlignmentAndTopkInterleave) {
  c.alignment = 16;
  c.topk = 7;
  c.alignments = c.topks = PerPlan::own;
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    c.layout = layout;
    SCOPED_TRACE(c.description());
    std::set<int> alignments, topks;
    constexpr int kPlans = 6;
    for (int number = 0; number < kPlans; ++number) {
      alignments.insert(c.alignment_of(number));
      topks.insert(c.topk_of(number));
    }
    ASSERT_GE(alignments.size(), 2u) << "the case tests nothing";
    ASSERT_GE(topks.size(), 2u) << "the case tests nothing";
    on_every_rank([&](Rank& rank) {
      const Group group = make_group(rank.comm, c.config(rank.rank));
      std::deque<Step> steps;
      for (int number = 0; number < kPlans; ++number) {
        steps.emplace_back(rank, c, group.get(), number).prepare();
      }
      for (Step& step : steps) step.dispatch();
      for (auto step = steps.rbegin(); step != steps.rend(); ++step) step->combine();
      for (Step& step : steps) step.combine_bwd();
      for (auto step = steps.rbegin(); step != steps.rend(); ++step) step->dispatch_bwd();
      for (Step& step : steps) step.dispatch();
    });
  }
}

TEST_P(Sequence, TwoGroupsInterleave) {
  Case other = c;
  other.layout = XD_EP_RANK_MAJOR;
  other.local_experts = 5;
  other.dtype = kF32;
  on_every_rank([&](Rank& rank) {
    const Group first = make_group(rank.comm, c.config(rank.rank));
    const Group second = make_group(rank.comm, other.config(rank.rank));
    Step a(rank, c, first.get(), 0);
    Step b(rank, other, second.get(), 0);
    a.prepare();
    b.prepare();
    b.dispatch();
    a.dispatch();
    b.combine();
    b.combine_bwd();
    a.combine();
    a.combine_bwd();
    b.dispatch_bwd();
    a.dispatch_bwd();
  });
}

TEST_P(Sequence, GroupsRunAtTheSameTimeOnTheirOwnThreads) {
  on_every_rank([&](Rank& rank) {
    std::vector<Group> groups;
    xd_ep_config config = c.config(rank.rank);
    config.num_sms = 4;  // so that all ranks' groups fit on one device together
    for (int i = 0; i < 2; ++i) groups.push_back(make_group(rank.comm, config));
    std::vector<std::exception_ptr> failures(groups.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          const std::unique_ptr<Memory> memory = rank.memory->another_stream();
          const Rank there = rank.on(*memory);
          for (int number = 0; number < 4; ++number) {
            Step(there, c, groups[i].get(), number + static_cast<int>(i)).run_all();
          }
        } catch (...) {
          failures[i] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  });
}

TEST_P(Sequence, TwoCommunicatorsInterleave) {
  on_every_rank([&](Rank& rank) {
    const Comm other = rank.another_comm("other", std::size_t{4} << 20);
    Rank there = rank;
    there.comm = other.get();
    const Group first = make_group(rank.comm, c.config(rank.rank));
    const Group second = make_group(other.get(), c.config(rank.rank));
    Step a(rank, c, first.get(), 0);
    Step b(there, c, second.get(), 1);
    a.prepare();
    b.prepare();
    a.dispatch();
    b.dispatch();
    b.combine();
    a.combine();
    ok(xd_comm_barrier(other.get()));
  });
}

TEST_P(Sequence, EqualInputsGiveEqualBitsAgain) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c, 0, GetParam() == Placing::symmetric ? Place::symmetric : Place::ordinary);
    batch.prepare(group.get());
    const Tensor& out = *batch.field(XD_EP_COMBINE, "out").tensor;
    const Tensor& grad = *batch.field(XD_EP_COMBINE_BWD, "grad_weights").tensor;
    ok(batch.call(group.get(), XD_EP_COMBINE));
    ok(batch.call(group.get(), XD_EP_COMBINE_BWD));
    const std::vector<std::byte> first_out = out.read();
    const std::vector<std::byte> first_grad = grad.read();
    for (int i = 0; i < 10; ++i) {
      batch.poison_outputs();
      ok(batch.call(group.get(), XD_EP_COMBINE));
      ok(batch.call(group.get(), XD_EP_COMBINE_BWD));
      EXPECT_EQ(out.read(), first_out);
      EXPECT_EQ(grad.read(), first_grad);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Places, Sequence,
                         testing::Values(Placing::ordinary, Placing::symmetric, Placing::mixed));

class Repeated : public testing::TestWithParam<FixedShape> {};

TEST_P(Repeated, StepsOnTheSameTensorsWithOtherContentEachTime) {
  on_every_rank([](Rank& rank) {
    FixedShape shape = GetParam();
    for (const std::int64_t capacity : {0, 160}) {  // the second overflows at times
      shape.recv_capacity = capacity;
      const Group group = make_group(rank.comm, shape.config(rank.num_ranks));
      FixedStep step(rank, shape);
      for (int number = 0; number < 21; ++number) {
        step.load(number, number % 3 == 1);
        for (const xd_ep_operation operation : kStepOperations) {
          const Outcome outcome = finish(rank, group.get(), step.enqueue(group.get(), operation));
          const bool good = step.expected() != XD_ERROR_OVERFLOW && operation != XD_EP_PREPARE;
          ASSERT_EQ(outcome, good ? XD_SUCCESS : step.expected());
        }
        step.check();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, Repeated, testing::ValuesIn(kFixedShapes));

// Dot products of arbitrary numbers have no order that the header fixes, but staging must not
// change it; sums do, and the grid compares them.
TEST(Bits, AreTheSameStagedAndInPlace) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    std::vector<std::vector<std::byte>> results;
    for (const Place place : {Place::ordinary, Place::symmetric}) {
      Batch batch(rank, c, 0, place);
      batch.prepare(group.get());
      for (const xd_ep_operation operation :
           {XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD}) {
        ok(batch.call(group.get(), operation));
      }
      std::vector<std::byte> all;
      for (const Batch::Field& field : batch.fields()) {
        if (!field.output) continue;
        const std::vector<std::byte> bytes = field.tensor->read();
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
      results.push_back(std::move(all));
    }
    EXPECT_EQ(results[0], results[1]);
  });
}

}  // namespace
}  // namespace xd::test
