// Whether groups of this launch may have logical experts.
#pragma once

#include <crossdock/crossdock.h>

#include "support/gtest_main.h"

namespace xd::test {

inline bool has_tables() {
  return world().memory().device().device_type != kDLCUDA ||
         xd_feature_available(XD_FEATURE_CUDA_PLACEMENT, nullptr) != 0;
}

}  // namespace xd::test
