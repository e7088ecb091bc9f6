// The bits of a token's result do not depend on other tokens, on its place or on its rank.
#include <gtest/gtest.h>

#include <cstddef>
#include <iterator>
#include <vector>

#include "conformance/case.h"
#include "conformance/has_wires.h"
#include "conformance/wanderer.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// Budgets of multiprocessors; the CPU has none.
std::vector<int> budgets(const Rank& rank) {
  if (!rank.asynchronous()) return {0};
  return {0, 16 / rank.ranks_on_device(), 64 / rank.ranks_on_device()};
}

void wander(const Rank& rank, Way way, Wanderer::Settings settings) {
  Wanderer(rank, way, settings).wander([](const std::function<void()>& calls) { calls(); });
}

TEST(BatchInvariance, OfBulkOperations) {
  on_every_rank([](Rank& rank) {
    for (const int num_sms : budgets(rank)) {
      wander(rank, Way::expert_major, {num_sms, XD_EP_WIRE_SAME});
      wander(rank, Way::rank_major, {num_sms, XD_EP_WIRE_SAME});
    }
  });
}

TEST(BatchInvariance, OfLowLatency) {
  on_every_rank([](Rank& rank) {
    for (const int num_sms : budgets(rank)) {
      for (const Way way : {Way::slots, Way::by_expert, Way::by_rank}) {
        wander(rank, way, {num_sms, XD_EP_WIRE_SAME});
      }
    }
  });
}

// Blocks are those of the token's own row. Each wire goes two ways, and each way is some wire's.
TEST(BatchInvariance, OfEveryWire) {
  on_every_rank([](Rank& rank) {
    if (!has_wires()) return;
    for (const int num_sms : budgets(rank)) {
      for (std::size_t i = 0; i < std::size(kWires); ++i) {
        for (const std::size_t next : {i, i + 1}) wander(rank, kWays[next], {num_sms, kWires[i]});
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
    if (!has_wires()) return;
    const Wanderer coded(rank, Way::slots, {0, XD_EP_WIRE_FP8_BLOCK128});
    EXPECT_NE(coded.expected(), expected(Way::slots));
  });
}

}  // namespace
}  // namespace xd::test
