// The bits of a token's result do not depend on other tokens, on its place or on its rank.
#include <gtest/gtest.h>

#include <vector>

#include "conformance/wanderer.h"
#include "support/gtest_main.h"
#include "support/memory.h"

namespace xd::test {
namespace {

// Budgets of multiprocessors; the CPU has none.
std::vector<int> budgets(const Rank& rank) {
  if (!rank.asynchronous()) return {0};
  const int devices = device_count("cuda");
  const int ranks_here = (rank.num_ranks + devices - 1) / devices;
  return {0, 16 / ranks_here, 64 / ranks_here};
}

void wander(const Rank& rank, Way way, int num_sms) {
  Wanderer(rank, way, num_sms).wander([](const std::function<void()>& calls) { calls(); });
}

TEST(BatchInvariance, OfBulkOperations) {
  on_every_rank([](Rank& rank) {
    for (const int num_sms : budgets(rank)) {
      wander(rank, Way::expert_major, num_sms);
      wander(rank, Way::rank_major, num_sms);
    }
  });
}

TEST(BatchInvariance, OfLowLatency) {
  on_every_rank([](Rank& rank) {
    for (const int num_sms : budgets(rank)) {
      for (const Way way : {Way::slots, Way::by_expert, Way::by_rank}) {
        wander(rank, way, num_sms);
      }
    }
  });
}

// Sums by another order have other bits, so the tests above can fail; operations whose experts'
// rows are weighted in combine agree with one another.
TEST(BatchInvariance, FollowsFromTheOrderOfTheSum) {
  on_every_rank([](Rank& rank) {
    const auto expected = [&](Way way, bool backwards = false) {
      return Wanderer(rank, way).expected(backwards);
    };
    for (const Way way : kWays) EXPECT_NE(expected(way), expected(way, true));
    for (const Way way : {Way::slots, Way::by_expert}) {
      EXPECT_EQ(expected(way), expected(Way::expert_major));
    }
    EXPECT_EQ(expected(Way::by_rank), expected(Way::rank_major));
  });
}

}  // namespace
}  // namespace xd::test
