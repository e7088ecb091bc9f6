// The reference itself, on a batch small enough to work out by hand.
#include "conformance/reference.h"

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <vector>

namespace xd::test {
namespace {

// Two ranks with two experts each (0 1 | 2 3), two choices per token:
//   rank 0: token 0 -> 2, 0    token 1 -> 3, 2
//   rank 1: token 0 -> 0, 1
std::vector<Choices> two_ranks() { return {{2, 2, {2, 0, 3, 2}}, {1, 2, {0, 1}}}; }

Placement placement(xd_ep_layout layout, int alignment) {
  return {2, 2, layout, alignment, {100, 100}, XD_EP_OVERFLOW_ERROR};
}

std::vector<std::array<int, 3>> rows_of(const Received& received) {
  std::vector<std::array<int, 3>> rows;
  for (const Row& row : received.rows) rows.push_back({row.source, row.token, row.k});
  return rows;
}

using Rows = std::vector<std::array<int, 3>>;
using Counts = std::vector<std::int64_t>;

TEST(Reference, ExpertMajorZonesAreOrderedBySourceAndTokenAndPadded) {
  const Routed routed(placement(XD_EP_EXPERT_MAJOR, 2), two_ranks());
  EXPECT_EQ(rows_of(routed.received(0)), (Rows{{0, 0, 1}, {1, 0, 0}, {1, 0, 1}, {-1, -1, -1}}));
  EXPECT_EQ(rows_of(routed.received(1)), (Rows{{0, 0, 0}, {0, 1, 1}, {0, 1, 0}, {-1, -1, -1}}));
  EXPECT_EQ(routed.received(1).counts, (Counts{2, 1}));
  EXPECT_EQ(routed.received(1).padded, (Counts{2, 2}));
  EXPECT_EQ(routed.received(1).offsets, (Counts{0, 2, 4}));
  EXPECT_EQ(routed.rows_between(0, 1), 3);
  EXPECT_EQ(routed.row_of(0, 1, 0), 2);
}

TEST(Reference, RankMajorHasOneRowPerTokenAndCountsPairs) {
  const Routed routed(placement(XD_EP_RANK_MAJOR, 1), two_ranks());
  EXPECT_EQ(rows_of(routed.received(0)), (Rows{{0, 0, -1}, {1, 0, -1}}));
  EXPECT_EQ(rows_of(routed.received(1)), (Rows{{0, 0, -1}, {0, 1, -1}}));
  EXPECT_EQ(routed.received(1).total, 2);
  EXPECT_EQ(routed.received(1).counts, (Counts{2, 1}));
  EXPECT_EQ(routed.row_of(0, 1, 0), 1);
  EXPECT_EQ(routed.row_of(0, 1, 1), 1);
}

TEST(Reference, DropsCutTheLastRows) {
  Placement scarce = placement(XD_EP_EXPERT_MAJOR, 1);
  scarce.capacity = {100, 1};
  scarce.overflow = XD_EP_OVERFLOW_DROP;
  const Routed routed(scarce, two_ranks());
  EXPECT_EQ(routed.overflow_rank(), 1);
  EXPECT_FALSE(routed.refused());
  EXPECT_EQ(rows_of(routed.received(1)), (Rows{{0, 0, 0}}));
  EXPECT_EQ(routed.received(1).counts, (Counts{1, 0}));
  EXPECT_EQ(routed.received(1).offsets, (Counts{0, 1, 1}));
  EXPECT_EQ(routed.received(1).total, 3);
  EXPECT_EQ(routed.received(1).dropped, 2);
  EXPECT_EQ(routed.row_of(0, 1, 0), std::nullopt);
}

TEST(Reference, BadIdsCountAsNoExpert) {
  const Routed routed(placement(XD_EP_EXPERT_MAJOR, 1), {{2, 2, {4, 0, 3, 3}}, {1, 2, {-2, -1}}});
  EXPECT_EQ(routed.bad_ids(), 3);
  EXPECT_EQ(routed.bad_id_rank(), 0);
  EXPECT_EQ(rows_of(routed.received(0)), (Rows{{0, 0, 1}}));
  EXPECT_EQ(rows_of(routed.received(1)), (Rows{{0, 1, 0}}));
}

TEST(Reference, DuplicatesThatCollapseAreNotBad) {
  Placement collapsing = placement(XD_EP_EXPERT_MAJOR, 1);
  collapsing.duplicates = XD_EP_DUPLICATE_IDS_COLLAPSE;
  const Routed routed(collapsing, {{2, 2, {4, 4, 3, 3}}, {1, 2, {-2, -1}}});
  EXPECT_EQ(routed.bad_ids(), 3);  // 4, twice, and -2
  EXPECT_EQ(rows_of(routed.received(1)), (Rows{{0, 1, 0}}));
}

TEST(Reference, CapacitiesAreRoundedDownToTheAlignment) {
  Placement scarce = placement(XD_EP_EXPERT_MAJOR, 2);
  scarce.capacity = {100, 3};
  scarce.overflow = XD_EP_OVERFLOW_DROP;
  const Routed routed(scarce, two_ranks());
  EXPECT_EQ(rows_of(routed.received(1)), (Rows{{0, 0, 0}, {0, 1, 1}}));
  EXPECT_EQ(routed.received(1).total, 4);
}

// bf16 has 8 bits of precision. On rank 0: 256 + 1 = 257 is a tie and becomes 256. Summed over both
// ranks at once, 256 + 1 + 1 = 258 would have been exact.
TEST(Reference, SumsAreRoundedOnEachRankFirst) {
  const Routed routed({2, 2, XD_EP_EXPERT_MAJOR, 1, {100, 100}, XD_EP_OVERFLOW_ERROR},
                      {{1, 3, {0, 1, 2}}, {0, 3, {}}});
  const HostRanks one_host = ranks_by_host({}, 2);
  const ElementAt element = [](int rank, std::int64_t row, std::int64_t) {
    return rank == 0 && row == 0 ? 256.0f : 1.0f;
  };
  EXPECT_EQ(
      decode(combined(routed, one_host, {0, 0}, 0, kFormatBf16, element, nullptr), kFormatBf16),
      256.0f);
  EXPECT_EQ(decode(combined(routed, one_host, {0, 0}, 0, kFormatF32, element, nullptr), kFormatF32),
            258.0f);
  const WeightAt weight = [](int rank, std::int64_t row) {
    return rank == 0 && row == 0 ? 0.5f : 2.0f;
  };
  EXPECT_EQ(decode(combined(routed, one_host, {0, 0}, 0, kFormatF32, element, &weight), kFormatF32),
            132.0f);
}

}  // namespace
}  // namespace xd::test
