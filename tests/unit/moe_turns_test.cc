// The turns of a layer's passes, and those that a rank owes its peers behind an error.
#include "moe/turns.h"

#include <gtest/gtest.h>

namespace xd::moe {
namespace {

constexpr bool kLate = true, kAtOnce = false;

Turns of(int parts, bool late) { return {XD_EP_DISPATCH, XD_EP_COMBINE, parts, late}; }

TEST(MoeTurns, AreAllCallsOfOneOperationAndThenAllOfTheOther) {
  for (const int parts : {0, 1, 3}) {
    Turns turns = of(parts, kLate);
    EXPECT_EQ(turns.calls(), parts == 3 ? 3 : 1);
    for (const xd_ep_operation expected : {XD_EP_DISPATCH, XD_EP_COMBINE}) {
      for (int call = 0; call < turns.calls(); ++call) {
        EXPECT_EQ(turns.enter(), expected);
        turns.leave();
      }
    }
    EXPECT_EQ(turns.owed(), 0);
  }
}

TEST(MoeTurns, AreOwedAllWherePeersGoOn) {
  for (const int parts : {0, 1, 3}) {
    const int all = parts == 3 ? 6 : 2;
    Turns turns = of(parts, kLate);
    for (int taken = 0; taken < all; ++taken) {
      EXPECT_EQ(turns.owed(), all - taken);  // of an error before the operation
      turns.enter();
      EXPECT_EQ(turns.owed(), all - taken - 1);  // of one in it
      turns.leave();
    }
    EXPECT_EQ(turns.owed(), 0);
  }
}

TEST(MoeTurns, AreOwedOnceWherePeersEndWithTheError) {
  Turns turns = of(3, kAtOnce);
  for (int taken = 0; taken < 6; ++taken) {
    EXPECT_EQ(turns.owed(), 1);
    turns.enter();
    EXPECT_EQ(turns.owed(), 0);
    turns.leave();
  }
  EXPECT_EQ(turns.owed(), 0);
}

}  // namespace
}  // namespace xd::moe
