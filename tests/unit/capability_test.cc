// The devices that are refused, by compute capability.
#include "cuda/capability.h"

#include <gtest/gtest.h>

namespace xd::cuda {
namespace {

TEST(Capability, BeforeHopperIsRefusedByName) {
  EXPECT_EQ(capability_obstacle(8, 0),
            "has compute capability 8.0, expected at least 9.0: the kernels need bulk copies");
  EXPECT_NE(capability_obstacle(8, 9), "");
  EXPECT_NE(capability_obstacle(7, 5), "");
}

TEST(Capability, OfHopperAndNewerChipsIsEnough) {
  EXPECT_EQ(capability_obstacle(9, 0), "");
  EXPECT_EQ(capability_obstacle(10, 0), "");
  EXPECT_EQ(capability_obstacle(12, 1), "");
}

}  // namespace
}  // namespace xd::cuda
