#include "comm/device/kinds.h"

#include "memory/host_segment.h"

namespace xd::devices::cpu {
namespace {

std::unique_ptr<SegmentMaker> make_memory(int) { return std::make_unique<HostSegmentMaker>(); }

}  // namespace

const DeviceKind kDeviceKind{
    .type = kDLCPU,
    .type_name = "kDLCPU",
    .device_in_words = "the CPU",
    .feature = XD_FEATURE_CPU,
    .availability =
        [] {
          return Feature{true, "available"};
        },
    .introduce = [](int, int) { return DeviceIntroduction{}; },
    .make_memory = make_memory,
};

}  // namespace xd::devices::cpu
