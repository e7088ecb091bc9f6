// Whether combine has wires in this launch: on CUDA devices between machines it has none.
#pragma once

#include <crossdock/crossdock.h>

#include <cstdlib>

#include "support/gtest_main.h"

namespace xd::test {

inline bool has_wires() {
  return world().memory().device().device_type != kDLCUDA || std::getenv("XD_NET_TEST") == nullptr;
}

}  // namespace xd::test
