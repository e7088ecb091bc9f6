// Whether combine has wires on the devices of this launch.
#pragma once

#include <crossdock/crossdock.h>

#include "support/gtest_main.h"

namespace xd::test {

inline bool has_wires() {
  return world().memory().device().device_type != kDLCUDA ||
         xd_feature_available(XD_FEATURE_CUDA_WIRE, nullptr) != 0;
}

}  // namespace xd::test
