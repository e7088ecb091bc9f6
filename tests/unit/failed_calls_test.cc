// The call whose mistake finishes a communicator is the one whose launch ran.
#include "turn/failed_calls.h"

#include <gtest/gtest.h>

#include <string>

#include "ep/bulk/family.h"

namespace xd::ep {
namespace {

using FailedCalls = turn::FailedCalls<Family>;

OperationError mistake(const std::string& text) {
  return {.status = XD_ERROR_INVALID_ARGUMENT, .text = text, .rank = 1};
}

TEST(FailedCallsTest, TellTheCallThatRanFromOthers) {
  FailedCalls calls;
  calls.note(3, XD_EP_COMBINE, mistake("captured, and never launched"));
  calls.note(5, XD_EP_DISPATCH, mistake("launched"));
  const auto found = calls.find(5);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->operation, XD_EP_DISPATCH);
  EXPECT_EQ(found->operation_error.text, "launched");
  EXPECT_EQ(found->operation_error.rank, 1);
  EXPECT_FALSE(calls.find(4)) << "a call without a mistake";
}

TEST(FailedCallsTest, DoNotKnowALaunchThatWasNotMade) {
  FailedCalls calls;
  calls.note(1, XD_EP_PREPARE, mistake("the stream took no work"));
  calls.forget(1);
  EXPECT_FALSE(calls.find(1));
}

TEST(FailedCallsTest, KeepTheLatestOfAnyNumber) {
  FailedCalls calls;
  constexpr std::uint32_t kLast = 10 * FailedCalls::kMost;
  for (std::uint32_t launch = 1; launch <= kLast; ++launch) {
    calls.note(launch, XD_EP_PREPARE, mistake(std::to_string(launch)));
  }
  for (std::uint32_t launch = 1; launch <= kLast; ++launch) {
    EXPECT_EQ(calls.find(launch).has_value(), launch > kLast - FailedCalls::kMost) << launch;
  }
}

}  // namespace
}  // namespace xd::ep
