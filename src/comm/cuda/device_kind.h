// Ranks that compute on CUDA devices. Not every build has them.
#pragma once

#include "comm/device_kinds.h"

namespace xd::devices::cuda {

extern const DeviceKind kDeviceKind;

}  // namespace xd::devices::cuda
