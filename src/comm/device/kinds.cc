#include "comm/device/kinds.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"

namespace xd {
namespace {

int local_rank() {
  const char* text = std::getenv("LOCAL_RANK");
  XD_REQUIRE(text != nullptr && *text != '\0',
             "environment variable LOCAL_RANK is not set: config.device.device_id = -1 stands for "
             "it, as torchrun sets it");
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  XD_REQUIRE(error == std::errc() && stop == end && value >= 0,
             "environment variable LOCAL_RANK = ", text, ", expected a number from 0");
  return value;
}

}  // namespace

std::span<const DeviceKind* const> device_kinds() {
  static constexpr const DeviceKind* kAll[] = {&devices::cpu::kDeviceKind,
                                               &devices::cuda::kDeviceKind};
  return kAll;
}

std::string device_type_names() {
  std::string names;
  for (const DeviceKind* kind : device_kinds()) {
    if (!names.empty()) names += " or ";
    names += kind->type_name;
  }
  return names;
}

const DeviceKind* find_device_kind(std::int32_t type) {
  const auto kinds = device_kinds();
  const auto found = std::ranges::find(kinds, type, &DeviceKind::type);
  return found != kinds.end() ? *found : nullptr;
}

const DeviceKind& kind_of(DLDevice device) {
  const DeviceKind* kind = find_device_kind(device.device_type);
  XD_CHECK(kind != nullptr);
  return *kind;
}

DLDevice resolve_device(DLDevice device) {
  const DeviceKind* kind = find_device_kind(device.device_type);
  XD_REQUIRE(kind != nullptr, "config.device.device_type = ", int{device.device_type},
             ", expected ", device_type_names());
  if (const Feature there = kind->availability(); !there.available) {
    fail(XD_ERROR_UNSUPPORTED, "config.device is ", kind->device_in_words, ": ", there.reason);
  }
  if (!kind->is_numbered) return device;
  XD_REQUIRE(device.device_id >= -1, "config.device.device_id = ", device.device_id,
             ", expected a device or -1");
  if (device.device_id == -1) device.device_id = local_rank();
  return device;
}

}  // namespace xd
