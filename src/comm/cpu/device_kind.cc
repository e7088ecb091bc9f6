#include <cstring>

#include "comm/device/kinds.h"
#include "memory/host_segment.h"

namespace xd::devices::cpu {
namespace {

std::unique_ptr<SegmentMaker> make_memory(int) { return std::make_unique<HostSegmentMaker>(); }

void copy(int, void* to, const void* from, std::size_t bytes, xd_stream) {
  if (bytes > 0) std::memmove(to, from, bytes);
}

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
    .copy = copy,
};

}  // namespace xd::devices::cpu
