// More rows than a receive capacity. (The grid checks every element; here are the promises about
// capacities themselves.)
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// The routing that needs the most rows on rank 0: every token of every rank chooses as many experts
// of rank 0 as it can, one expert of each zone gets a single row past a multiple of the alignment.
struct Worst {
  xd_ep_layout layout;
  int topk;
  int alignment;
};

void PrintTo(const Worst& worst, std::ostream* out) {
  *out << (worst.layout == XD_EP_EXPERT_MAJOR ? "expert-major" : "rank-major")
       << " K=" << worst.topk << " alignment " << worst.alignment;
}

constexpr int kTokens = 6;

class WorstRouting : public testing::TestWithParam<Worst> {
 protected:
  WorstRouting() {
    config.num_ranks = world().num_ranks();
    config.num_experts = 2 * config.num_ranks;
    config.max_topk = GetParam().topk;
    config.max_tokens_per_rank = kTokens;
    config.hidden = 8;
    config.layout = GetParam().layout;
    config.alignment = GetParam().alignment;
    ok(xd_ep_recv_bound(&config, &bound));
  }

  // With one choice per token the first zone gets one row and the second all others; with two, both
  // zones get all tokens.
  Outcome prepare(const Rank& rank, xd_ep_group* group) const {
    std::vector<std::int32_t> ids;
    for (int token = 0; token < kTokens; ++token) {
      if (GetParam().topk == 1) {
        ids.push_back(rank.rank == 0 && token == 0 ? 0 : 1);
      } else {
        ids.insert(ids.end(), {0, 1});
      }
    }
    Tensor topk_idx(rank, kI32, {kTokens, GetParam().topk});
    topk_idx.write(ids);
    Buffer plan = make_plan(rank, config);
    Tensor total(rank, kI64, {1});
    xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
    args.topk_idx = topk_idx.dl();
    set_plan(args, plan);
    args.total = total.dl();
    const Outcome outcome = finish(rank, group, xd_ep_prepare(group, &args, rank.stream()));
    if (rank.rank == 0) {
      EXPECT_LE(total.read_as<std::int64_t>()[0], bound);
    }
    return outcome;
  }

  xd_ep_config config = XD_EP_CONFIG_INIT;
  std::int64_t bound = 0;
};

TEST_P(WorstRouting, NeverOverflowsTheBound) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, config);
    EXPECT_EQ(prepare(rank, group.get()), XD_SUCCESS);
  });
}

// The next smaller one, as capacities are rounded down to the alignment.
TEST_P(WorstRouting, OverflowsACapacityOfOneRowLess) {
  config.recv_capacity = bound - 1;
  const std::int64_t capacity = bound - GetParam().alignment;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, config);
    const Outcome outcome = prepare(rank, group.get());
    EXPECT_EQ(outcome, XD_ERROR_OVERFLOW);
    const std::string& text = outcome.text;
    EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
    EXPECT_NE(text.find("recv_capacity = " + std::to_string(capacity)), std::string::npos) << text;
    const xd_ep_status& status = outcome.met;
    EXPECT_EQ(status.status, XD_ERROR_OVERFLOW);
    EXPECT_EQ(status.rank, 0);
    EXPECT_EQ(status.needed_rows, GetParam().layout == XD_EP_RANK_MAJOR
                                      ? std::int64_t{kTokens} * rank.num_ranks
                                      : bound);
    EXPECT_EQ(status.capacity_rows, capacity);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, WorstRouting,
                         testing::Values(Worst{XD_EP_EXPERT_MAJOR, 1, 1},
                                         Worst{XD_EP_EXPERT_MAJOR, 1, 4},
                                         Worst{XD_EP_EXPERT_MAJOR, 2, 1},
                                         Worst{XD_EP_RANK_MAJOR, 2, 1},
                                         Worst{XD_EP_RANK_MAJOR, 2, 4}));

// A capacity is what whole units of the plan's alignment make of it.
TEST(Overflow, ACapacityIsRoundedDownToThePlansAlignment) {
  Case c = plain_case(world().num_ranks());
  c.alignment = 8;
  on_every_rank([&](Rank& rank) {
    xd_ep_config config = c.config(rank.rank);
    config.recv_capacity = 8 * 64 + 7;
    const Group group = make_group(rank.comm, config);
    Buffer plan = make_plan(rank, config);
    for (const int alignment : {0, 8, 4, 2, 1}) {
      SCOPED_TRACE("alignment " + std::to_string(alignment));
      Batch batch(rank, c);
      set_plan(batch.prepare_args, plan);
      batch.prepare_args.alignment = alignment;
      batch.prepare(group.get());
      const std::vector<std::byte> bytes = plan.read();
      xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
      ok(xd_ep_plan_get_info(bytes.data(), bytes.size(), &info));
      const int used = alignment == 0 ? 8 : alignment;
      EXPECT_EQ(info.alignment, used);
      EXPECT_EQ(info.capacity_rows, config.recv_capacity / used * used);
    }
  });
}

TEST(Overflow, UnderErrorMovesNothingAndTheNextBatchWorks) {
  Case c = plain_case(world().num_ranks());
  c.capacity = Capacity::refusing;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Step refused(rank, c, group.get(), 0);
    ASSERT_TRUE(refused.routed().refused()) << "the case tests nothing";
    refused.run_all();
    Tensor nobody(rank, kI64, {0, c.topk});
    Batch fits(rank, c, 0);
    fits.prepare_args.topk_idx = nobody.dl();
    EXPECT_EQ(fits.call(group.get(), XD_EP_PREPARE), XD_SUCCESS);
  });
}

TEST(Overflow, UnderDropCountsTheRowsThatThisRankDidNotReceive) {
  Case c = plain_case(world().num_ranks());
  c.capacity = Capacity::dropping;
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    c.layout = layout;
    on_every_rank([&](Rank& rank) {
      const Group group = make_group(rank.comm, c.config(rank.rank));
      std::int64_t dropped = 0;
      std::int64_t reported = 0;
      bool someone_dropped = false;
      for (int number = 0; number < 3; ++number) {
        Step step(rank, c, group.get(), number);
        step.run_all();
        dropped += step.routed().received(rank.rank).dropped;
        reported += step.reported_drops();
        someone_dropped = someone_dropped || step.routed().overflow_rank() >= 0;
      }
      EXPECT_TRUE(someone_dropped) << "the case tests nothing";
      EXPECT_EQ(reported, dropped);
    });
  }
}

}  // namespace
}  // namespace xd::test
