// The devices that configs ask for, in builds and on machines that have them or not.
#include "comm/device/kinds.h"

#include "net/fabric/fabric.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

TEST(DeviceKinds, OfTheCpuAreThereAndTakeAnyNumber) {
  EXPECT_TRUE(feature(XD_FEATURE_CPU).available);
  EXPECT_EQ(resolve_device({kDLCPU, -7}).device_id, -7);
  EXPECT_EQ(kind_of({kDLCPU, 0}).board_bytes, 0u);
}

TEST(DeviceKinds, ThatNobodyKnowsAreRefusedAndTheKnownOnesNamed) {
  EXPECT_EQ(find_device_kind(kDLMetal), nullptr);
  expect_error(error_of([] {
                 resolve_device({kDLMetal, 0});
               }),
               XD_ERROR_INVALID_ARGUMENT,
               "config.device.device_type = 8, expected kDLCPU or kDLCUDA");
}

// Known, and perhaps not there: an argument that other builds or machines accept.
TEST(DeviceKinds, ThatAreNotThereAreUnsupportedWithTheReason) {
  const Feature cuda = feature(XD_FEATURE_CUDA);
  const auto resolved = error_of([] { resolve_device({kDLCUDA, 0}); });
  if (cuda.available) {
    EXPECT_FALSE(resolved.has_value());
  } else {
    expect_error(resolved, XD_ERROR_UNSUPPORTED,
                 std::string("config.device is a CUDA device: ") + cuda.reason);
  }
}

TEST(DeviceKinds, AnswerForTheirFeaturesAndForNoOthers) {
  const Feature network = feature(XD_FEATURE_NETWORK);  // where libfabric is
  if (network.available) {
    EXPECT_STREQ(network.reason, "available");
    EXPECT_NO_THROW(static_cast<void>(net::load_fabric()));
  } else {
    expect_error(error_of([] { static_cast<void>(net::load_fabric()); }), XD_ERROR_UNSUPPORTED,
                 network.reason);
  }
  EXPECT_STREQ(feature(99).reason, "unknown feature");
}

}  // namespace
}  // namespace xd::test
