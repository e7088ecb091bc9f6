// In the place of device_kind.cc in builds without CUDA.
#include "comm/device/kinds.h"

namespace xd::devices::cuda {

const DeviceKind kDeviceKind{
    .type = kDLCUDA,
    .type_name = "kDLCUDA",
    .device_in_words = "a CUDA device",
    .feature = XD_FEATURE_CUDA,
    .availability =
        [] {
          return Feature{false,
                         "not built in: this build has no CUDA executor; "
                         "-DCROSSDOCK_CUDA=ON asks for it"};
        },
};

}  // namespace xd::devices::cuda
