// Experts that lie where the caller says (expert_ranks). Every case of the grid says so in one of
// several ways; here is what a config with such a list promises beside its operations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/said.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

xd_ep_config config_of(const std::vector<std::int32_t>& expert_ranks, int num_ranks) {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = num_ranks;
  config.num_experts = static_cast<std::int32_t>(expert_ranks.size());
  config.max_topk = 2;
  config.max_tokens_per_rank = 10;
  config.hidden = 64;
  config.expert_ranks = expert_ranks.data();
  return config;
}

std::int32_t local_experts(const xd_ep_config& config, std::int32_t rank) {
  std::int32_t number = -1;
  ok(xd_ep_local_experts(&config, rank, &number));
  return number;
}

TEST(LocalExperts, AreCountedByTheList) {
  const std::vector<std::int32_t> list = {3, 0, 3, 3, 1};
  const xd_ep_config config = config_of(list, 4);
  for (const std::int32_t rank : {0, 1, 2, 3}) {
    EXPECT_EQ(local_experts(config, rank), std::ranges::count(list, rank)) << "rank " << rank;
  }
}

TEST(LocalExperts, AreEquallyManyOnEveryRankWithoutAList) {
  const std::vector<std::int32_t> list(12);
  xd_ep_config config = config_of(list, 4);
  config.expert_ranks = nullptr;
  for (const std::int32_t rank : {0, 1, 2, 3}) EXPECT_EQ(local_experts(config, rank), 3);
}

TEST(LocalExperts, OfWhatIsNoRankOrNoConfigAreRefusedByName) {
  const std::vector<std::int32_t> list = {1, 0, 1};
  const xd_ep_config good = config_of(list, 2);
  std::int32_t number = 77;
  const auto refused = [&](const xd_ep_config& config, std::int32_t rank, const char* named) {
    EXPECT_EQ(xd_ep_local_experts(&config, rank, &number), XD_ERROR_INVALID_ARGUMENT);
    expect_said(named);
    EXPECT_EQ(number, 77);
  };
  refused(good, -1, "rank = -1, expected 0 to 1");
  refused(good, 2, "rank = 2, expected 0 to 1");
  xd_ep_config bad = good;
  bad.num_ranks = 1;
  refused(bad, 0, "config.expert_ranks[0] = 1, expected a rank, 0 to 0");
  bad = good;
  bad.expert_ranks = nullptr;
  refused(bad, 0, "config.num_experts = 3, expected a multiple of num_ranks = 2");
  EXPECT_EQ(xd_ep_local_experts(&good, 0, nullptr), XD_ERROR_INVALID_ARGUMENT);
}

// Sizes are those of the rank with the most experts, so that all ranks may ask for them.
TEST(SizesWithExpertRanks, AreThoseOfTheRankWithTheMostExperts) {
  const std::vector<std::int32_t> uneven = {0, 0, 0, 0, 0, 1}, even(10);
  xd_ep_config config = config_of(uneven, 2);
  config.max_topk = 8;
  xd_ep_config as_many = config_of(even, 2);  // 5 each
  as_many.expert_ranks = nullptr;
  as_many.max_topk = 8;
  std::int64_t rows = 0, rows_of_as_many = 0;
  ok(xd_ep_recv_bound(&config, &rows));
  ok(xd_ep_recv_bound(&as_many, &rows_of_as_many));
  EXPECT_EQ(rows, 2 * 10 * 5);
  EXPECT_EQ(rows_of_as_many, rows);
  std::size_t plan = 0, plan_of_as_many = 0;
  ok(xd_ep_plan_size(&config, &plan));
  ok(xd_ep_plan_size(&as_many, &plan_of_as_many));
  EXPECT_EQ(plan, plan_of_as_many);
}

TEST(ExpertRanks, WithABadEntryAreRefusedByIndexAndNameTheRankToPeers) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    std::vector<std::int32_t> list(static_cast<std::size_t>(c.num_experts()), 0);
    if (rank.rank == rank.num_ranks - 1) list[2] = rank.num_ranks;
    xd_ep_config config = c.config(rank.rank);
    config.expert_ranks = list.data();
    xd_ep_group* group = nullptr;
    const xd_status status = xd_ep_group_create(rank.comm, &config, &group);
    EXPECT_EQ(group, nullptr);
    if (rank.rank == rank.num_ranks - 1) {
      EXPECT_EQ(status, XD_ERROR_INVALID_ARGUMENT);
      expect_said("config.expert_ranks[2] = " + std::to_string(rank.num_ranks) +
                  ", expected a rank, 0 to " + std::to_string(rank.num_ranks - 1));
    } else {
      EXPECT_EQ(status, XD_ERROR_MISMATCH);
      expect_said("rank " + std::to_string(rank.num_ranks - 1));
    }
  });
}

// Also where a list takes more than one message, and where it says what others leave unsaid.
TEST(ExpertRanks, ThatDifferNameTheFirstExpertThatDoes) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const int each = 8000, experts = each * rank.num_ranks, last = rank.num_ranks - 1;
    for (const int first : {0, experts - 2}) {
      std::vector<std::int32_t> list;
      for (int e = 0; e < experts; ++e) list.push_back(e / each);
      if (rank.rank == last) {
        for (const int e : {first, experts - 1}) {
          std::int32_t& home = list[static_cast<std::size_t>(e)];
          home = last - home;
        }
      }
      xd_ep_config config = c.config(rank.rank);
      config.num_experts = experts;
      config.expert_ranks = rank.rank == last ? list.data() : nullptr;
      xd_ep_group* group = nullptr;
      EXPECT_EQ(xd_ep_group_create(rank.comm, &config, &group), XD_ERROR_MISMATCH);
      EXPECT_EQ(group, nullptr);
      const int home = first / each;
      expect_said("config.expert_ranks[" + std::to_string(first) + "] = " + std::to_string(home) +
                  " on rank 0 and " + std::to_string(last - home) + " on rank " +
                  std::to_string(last) + ", expected equal values");
    }
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Step(rank, c, group.get(), 0).run_all();
  });
}

class ExpertRanksIn : public testing::TestWithParam<xd_ep_layout> {
 protected:
  ExpertRanksIn() : c(plain_case(world().num_ranks())) { c.layout = GetParam(); }
  Case c;
};

TEST_P(ExpertRanksIn, AreReadDuringTheCallOnly) {
  c.settle(Homes::one_without);
  on_every_rank([&](Rank& rank) {
    xd_ep_config config = c.config(rank.rank);
    std::vector<std::int32_t> list(config.expert_ranks, config.expert_ranks + config.num_experts);
    config.expert_ranks = list.data();
    const Group group = make_group(rank.comm, config);
    std::ranges::fill(list, -1);
    Step(rank, c, group.get(), 0).run_all();
  });
}

// Equal placements are equal, however a rank says them.
TEST_P(ExpertRanksIn, InOrderSayWhatNoneSays) {
  std::vector<std::int32_t> list;
  for (int e = 0; e < c.num_experts(); ++e) list.push_back(e / c.local_experts);
  on_every_rank([&](Rank& rank) {
    xd_ep_config config = c.config(rank.rank), with_list = config;
    with_list.expert_ranks = list.data();
    const Group first = make_group(rank.comm, rank.rank % 2 == 0 ? with_list : config);
    const Group second = make_group(rank.comm, config);
    Step made(rank, c, first.get(), 0);
    made.prepare();
    Step used(rank, c, second.get(), 0);
    used.exchange_plan(std::move(made.plan()));
    used.dispatch();
    used.combine();
  });
}

// Fewer experts than ranks, so that some have none: their tokens go to the others all the same.
TEST_P(ExpertRanksIn, MayBeFewerThanRanks) {
  c.local_experts = 0;
  c.settle(Homes::ragged);
  ASSERT_EQ(c.num_experts(), 1);
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    for (int number = 0; number < Case::kSteps; ++number) {
      Step(rank, c, group.get(), number).run_all();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, ExpertRanksIn,
                         testing::Values(XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR));

}  // namespace
}  // namespace xd::test
