// Which rows and tokens a call with a part deals with, as host and device ask it.
#include "ep/plan/parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/random.h"

namespace xd::ep {
namespace {

using test::mix;

constexpr int kRows = 40;

// Bounds of a rank's parts, some of which have no rows.
std::vector<std::int32_t> bounds_of(std::uint64_t seed, int parts) {
  std::vector<std::int32_t> bounds;
  for (int i = 1; i < parts; ++i) {
    bounds.push_back(static_cast<std::int32_t>(mix(seed, static_cast<std::uint64_t>(i)) % kRows));
  }
  std::ranges::sort(bounds);
  return bounds;
}

TEST(PartsTest, RowsOfEachPartAreThoseThatPartOfRowSays) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const int parts = 2 + static_cast<int>(seed % (kMaxParts - 1));
    const std::vector<std::int32_t> bounds = bounds_of(seed, parts);
    for (int part = 1; part <= parts; ++part) {
      const PartRows rows = rows_of_part({part, parts}, bounds.data());
      for (std::uint32_t row = 0; row < kRows; ++row) {
        const int its = part_of_row(row, bounds.data(), parts);
        EXPECT_EQ(rows.has(row), its == part) << "seed " << seed << ", row " << row;
        EXPECT_EQ(rows.is_earlier(row), its < part) << "seed " << seed << ", row " << row;
        EXPECT_EQ(rows.is_later(row), its > part) << "seed " << seed << ", row " << row;
      }
    }
  }
}

// A warp asks for the tokens of two ranks at once, by the bits of their rows among all lanes.
TEST(PartsTest, ATokenIsDueInTheFirstAndInTheLastPartOfItsRows) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    const int parts = 2 + static_cast<int>(seed % 7);
    const std::vector<std::int32_t> bounds[] = {bounds_of(seed, parts), bounds_of(~seed, parts)};
    PartSpan spans[2];
    unsigned rows[2] = {0, 0};
    std::uint32_t row_of_lane[32];
    for (unsigned lane = 0; lane < 32; ++lane) {
      const std::uint64_t chance = mix(seed, 7, lane);
      row_of_lane[lane] = static_cast<std::uint32_t>(chance % kRows);
      if (chance / kRows % 4 != 0) continue;  // this lane has no row
      rows[lane % 2] |= 1u << lane;
      spans[lane % 2].add(part_of_row(row_of_lane[lane], bounds[lane % 2].data(), parts));
    }
    for (int part = 1; part <= parts; ++part) {
      unsigned here = 0, earlier = 0, later = 0;
      for (unsigned lane = 0; lane < 32; ++lane) {
        const PartRows its = rows_of_part({part, parts}, bounds[lane % 2].data());
        here |= static_cast<unsigned>(its.has(row_of_lane[lane])) << lane;
        earlier |= static_cast<unsigned>(its.is_earlier(row_of_lane[lane])) << lane;
        later |= static_cast<unsigned>(its.is_later(row_of_lane[lane])) << lane;
      }
      for (int rank = 0; rank < 2; ++rank) {
        EXPECT_EQ(is_due(rows[rank], here, earlier), spans[rank].first == part) << seed;
        EXPECT_EQ(is_due(rows[rank], here, later), spans[rank].last == part) << seed;
      }
    }
  }
}

// Experts of all parts follow one another, and a scope without a part has all of them.
TEST(PartsTest, ScopesDivideTheExperts) {
  for (int local = 1; local <= 20; ++local) {
    for (int parts = 1; parts <= std::min(local, kMaxParts); ++parts) {
      int next = 0;
      for (int part = 1; part <= parts; ++part) {
        const Scope scope = scope_of({part, parts}, false, false);
        EXPECT_EQ(scope.first_expert(parts, local), next);
        next = scope.end_expert(parts, local);
        EXPECT_EQ(scope.tail, part == parts);
        EXPECT_FALSE(scope.empty);
      }
      EXPECT_EQ(next, local);
      EXPECT_EQ(Scope{}.end_expert(parts, local), local);
    }
  }
}

TEST(PartsTest, BetweenMachinesOneCallWorks) {
  const Scope works = scope_of({1, 3}, true, true), rests = scope_of({3, 3}, true, false);
  EXPECT_EQ(works.part, 0);
  EXPECT_FALSE(works.empty);
  EXPECT_FALSE(works.tail);
  EXPECT_TRUE(rests.empty);
  EXPECT_TRUE(rests.tail);
}

}  // namespace
}  // namespace xd::ep
