#include "conformance/pairwise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace xd::test {
namespace {

class Pairwise : public testing::TestWithParam<std::vector<int>> {};

TEST_P(Pairwise, EveryTwoValuesOfDifferentDimensionsMeet) {
  const std::vector<int>& sizes = GetParam();
  const std::vector<std::vector<int>> rows = cover_pairs(sizes, 7);
  for (std::size_t a = 0; a < sizes.size(); ++a) {
    for (std::size_t b = a + 1; b < sizes.size(); ++b) {
      for (int i = 0; i < sizes[a]; ++i) {
        for (int j = 0; j < sizes[b]; ++j) {
          EXPECT_TRUE(std::ranges::any_of(
              rows, [&](const std::vector<int>& row) { return row[a] == i && row[b] == j; }))
              << "dimensions " << a << " = " << i << " and " << b << " = " << j;
        }
      }
    }
  }
}

TEST_P(Pairwise, ValuesAreInRange) {
  const std::vector<int>& sizes = GetParam();
  for (const std::vector<int>& row : cover_pairs(sizes, 7)) {
    ASSERT_EQ(row.size(), sizes.size());
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      EXPECT_GE(row[d], 0);
      EXPECT_LT(row[d], sizes[d]);
    }
  }
}

// No set can be smaller than the product of the two largest dimensions; a greedy one should stay
// within a small factor of it, or it saves nothing over the full product.
TEST_P(Pairwise, TheSetIsSmall) {
  std::vector<int> sizes = GetParam();
  const std::size_t rows = cover_pairs(sizes, 7).size();
  std::ranges::sort(sizes, std::greater());
  const auto least = static_cast<std::size_t>(sizes[0]) * static_cast<std::size_t>(sizes[1]);
  EXPECT_GE(rows, least);
  EXPECT_LE(rows, 3 * least + sizes.size());
}

TEST_P(Pairwise, EqualSeedsGiveEqualSets) {
  EXPECT_EQ(cover_pairs(GetParam(), 11), cover_pairs(GetParam(), 11));
}

INSTANTIATE_TEST_SUITE_P(Sizes, Pairwise,
                         testing::Values(std::vector<int>{2, 2}, std::vector<int>{3, 1, 4},
                                         std::vector<int>(10, 2),
                                         std::vector<int>{7, 5, 5, 4, 4, 3, 3, 3, 2, 2, 2}));

}  // namespace
}  // namespace xd::test
