// How many operations in parts a group remembers.
#include "ep/bulk/part_order.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "unit/errors.h"

namespace xd::ep {
namespace {

constexpr int kParts = 3;

// Takes a turn with a part of an operation on a plan. Returns the refusal, or "".
std::string take(PartOrder& order, xd_ep_operation operation, std::uint64_t plan, int part) {
  PartOrder::Step step{};
  step.record.call.operation = static_cast<std::uint8_t>(operation);
  step.record.fingerprint = plan << 5;
  step.part = {part, kParts};
  order.begin();
  std::string refusal = test::refusal_of([&] { order.require(step); });
  if (refusal.empty()) order.advance(step);
  return refusal;
}

TEST(PartOrderTest, ForgetsTheOperationThatIsIdleForLongestWhereTooManyAreUnderWay) {
  constexpr auto kMost = std::uint64_t{PartOrder::kMostUnderWay};
  PartOrder order;
  for (std::uint64_t plan = 0; plan < kMost; ++plan) {
    EXPECT_EQ(take(order, XD_EP_DISPATCH, plan, 1), "");
  }
  EXPECT_EQ(take(order, XD_EP_DISPATCH, 0, 2), "");
  EXPECT_EQ(take(order, XD_EP_COMBINE_BWD, 0, 1), "");  // another kind: plan 1 is the idle one
  for (std::uint64_t plan = 2; plan < kMost; ++plan) {
    EXPECT_EQ(take(order, XD_EP_DISPATCH, plan, 2), "") << plan;
  }
  EXPECT_EQ(take(order, XD_EP_DISPATCH, 0, 3), "");
  EXPECT_EQ(take(order, XD_EP_COMBINE_BWD, 0, 2), "");
  test::expect_words(take(order, XD_EP_DISPATCH, 1, 2), {"part = 2 of", "dispatch, expected 1"});
  // The refusal has ended all the others.
  test::expect_words(take(order, XD_EP_DISPATCH, 2, 3), {"expected 1"});
}

// Kernels have theirs in memory that begins with zeros.
TEST(PartOrderTest, OfZerosHasNothingUnderWay) {
  auto order = std::bit_cast<PartOrder>(std::array<std::byte, sizeof(PartOrder)>{});
  EXPECT_FALSE(order.has_sums());
  EXPECT_EQ(take(order, XD_EP_COMBINE, 5, 0), "");
  test::expect_words(take(order, XD_EP_DISPATCH, 5, 2), {"part = 2 of", "expected 1"});
  for (int part = 1; part <= kParts; ++part) EXPECT_EQ(take(order, XD_EP_COMBINE, 5, part), "");
}

TEST(PartOrderTest, CountsNoneThatHasEnded) {
  PartOrder order;
  EXPECT_EQ(take(order, XD_EP_DISPATCH, 0, 1), "");
  for (std::uint64_t plan = 1; plan < 20; ++plan) {
    for (int part = 1; part <= kParts; ++part) {
      EXPECT_EQ(take(order, XD_EP_DISPATCH, plan, part), "");
    }
    EXPECT_EQ(take(order, XD_EP_COMBINE, plan, 0), "");
  }
  EXPECT_EQ(take(order, XD_EP_DISPATCH, 0, 2), "");
}

}  // namespace
}  // namespace xd::ep
