// A set of address ranges, against a set of addresses.
#include <gtest/gtest.h>

#include <bitset>
#include <random>

#include "base/address_ranges.h"

namespace xd::test {
namespace {

TEST(AddressRangesTest, KnowsExactlyWhatWasAdded) {
  constexpr std::uintptr_t kAddresses = 64;
  std::mt19937 random(20261122);
  for (int round = 0; round < 400; ++round) {
    AddressRanges ranges;
    std::bitset<kAddresses> known;
    for (int i = 0; i < 12; ++i) {
      const AddressRange added{random() % kAddresses, random() % (kAddresses + 1)};
      ranges.add(added);
      for (std::uintptr_t at = added.first; at < added.end; ++at) known.set(at);
      for (std::uintptr_t first = 0; first < kAddresses; ++first) {
        bool all = true;
        for (std::uintptr_t end = first; end <= kAddresses; ++end) {
          all = all && (end == first || known.test(end - 1));
          ASSERT_EQ(ranges.contains({first, end}), all)
              << "round " << round << ", [" << first << ", " << end << ")";
        }
      }
    }
  }
}

TEST(AddressRangesTest, NeighboursBecomeOne) {
  AddressRanges ranges;
  ranges.add({10, 20});
  ranges.add({30, 40});
  EXPECT_EQ(ranges.count(), 2u);
  EXPECT_FALSE(ranges.contains({10, 40}));
  ranges.add({20, 30});
  EXPECT_EQ(ranges.count(), 1u);
  EXPECT_TRUE(ranges.contains({10, 40}));
}

TEST(AddressRangesTest, StaysSmall) {
  AddressRanges ranges;
  for (std::uintptr_t i = 0; i < 10 * AddressRanges::kMost; ++i) {
    ranges.add({100 * i, 100 * i + 50});
    EXPECT_TRUE(ranges.contains({100 * i, 100 * i + 50}));
    ASSERT_LE(ranges.count(), AddressRanges::kMost);
  }
}

TEST(AddressRangesTest, HasRoomForTheLastAddresses) {
  AddressRanges ranges;
  ranges.add({UINTPTR_MAX - 10, UINTPTR_MAX});
  EXPECT_TRUE(ranges.contains({UINTPTR_MAX - 1, UINTPTR_MAX}));
  EXPECT_FALSE(ranges.contains({UINTPTR_MAX - 11, UINTPTR_MAX}));
}

}  // namespace
}  // namespace xd::test
