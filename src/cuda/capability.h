// The devices that the library's kernels run on, by compute capability. Pure.
#pragma once

#include <string>

#include "base/error.h"

namespace xd::cuda {

// The first with bulk copies between global and shared memory.
inline constexpr int kLeastMajor = 9;

// The reason why a device of this compute capability cannot be used; empty if it can.
inline std::string capability_obstacle(int major, int minor) {
  if (major >= kLeastMajor) return "";
  return concat("has compute capability ", major, ".", minor, ", expected at least ", kLeastMajor,
                ".0: the kernels need bulk copies");
}

}  // namespace xd::cuda
