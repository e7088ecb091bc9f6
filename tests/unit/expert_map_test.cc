// Which rank holds which experts, and the physical experts by which experts go inside.
#include "ep/plan/expert_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "ep/plan/config.h"

namespace xd::ep {
namespace {

using Ranks = std::vector<std::int32_t>;

ExpertTables tables_of(const Ranks& expert_ranks, int ranks) {
  return ExpertTables::read(expert_ranks.data(), static_cast<int>(expert_ranks.size()), ranks,
                            "config.");
}

// Holds every answer of the map against the caller's list.
void expect_map(const ExpertMap& map, const Ranks& expert_ranks, int ranks) {
  const int experts = static_cast<int>(expert_ranks.size());
  ASSERT_EQ(map.experts, experts);
  ASSERT_EQ(map.ranks, ranks);
  int physical_expert = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(map.first(rank), physical_expert);
    EXPECT_EQ(map.local_experts(rank), std::ranges::count(expert_ranks, rank));
    for (int e = 0; e < experts; ++e) {
      if (expert_ranks[static_cast<std::size_t>(e)] != rank) continue;
      EXPECT_EQ(map.physical_expert_of(e), physical_expert) << "expert " << e;
      EXPECT_EQ(map.rank_at(physical_expert), rank) << "physical_expert " << physical_expert;
      EXPECT_EQ(map.rank_of(e), rank) << "expert " << e;
      ++physical_expert;
    }
  }
  EXPECT_EQ(map.first(ranks), experts);
  EXPECT_EQ(map.rank_at(experts), ranks);
}

TEST(ExpertMap, FollowsEveryList) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 6);
    Ranks list(1 + random() % 40);
    for (std::int32_t& rank : list) {
      rank = static_cast<std::int32_t>(random() % static_cast<unsigned>(ranks));
    }
    const ExpertTables tables = tables_of(list, ranks);
    expect_map(tables.map(), list, ranks);
    std::int64_t most = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      most = std::max<std::int64_t>(most, std::ranges::count(list, rank));
    }
    EXPECT_EQ(tables.most_local_experts(), most);
  }
}

// The rank of a physical number comes from a product; quotients change at multiples.
TEST(ExpertMap, FindsTheRankOfEverySeatWhereRanksHoldAsMany) {
  for (int each = 1; each <= kMaxExperts; ++each) {
    const ExpertMap map = ExpertTables::even(each, 1).map();
    for (int physical_expert = each; physical_expert <= kMaxExperts; physical_expert += each) {
      ASSERT_EQ(map.rank_at(physical_expert), physical_expert / each) << each;
      ASSERT_EQ(map.rank_at(physical_expert - 1), physical_expert / each - 1) << each;
    }
  }
}

TEST(ExpertMap, ACopyOutlivesTheOriginal) {
  ExpertTables copy;
  {
    const ExpertTables original = tables_of({1, 0, 1}, 2);
    copy = original;
  }
  expect_map(copy.map(), {1, 0, 1}, 2);
}

TEST(ExpertMap, AListThatSaysWhatNoneSaysIsTheSameMap) {
  const ExpertTables tables = tables_of({0, 0, 1, 1}, 2);
  EXPECT_EQ(tables.hash(), 0u);
  EXPECT_EQ(tables.map().each, 2);
  EXPECT_NE(tables_of({0, 1, 0, 1}, 2).hash(), 0u);
  EXPECT_NE(tables_of({0, 1, 0, 1}, 2).hash(), tables_of({1, 0, 1, 0}, 2).hash());
}

}  // namespace
}  // namespace xd::ep
