// Ranks that compute on the CPU. They share host memory, and there are no kernels.
#pragma once

#include "comm/device_kinds.h"

namespace xd::devices::cpu {

extern const DeviceKind kDeviceKind;

}  // namespace xd::devices::cpu
