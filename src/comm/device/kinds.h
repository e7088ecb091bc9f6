// The kinds of devices that ranks compute on, as communicators know them. device/kinds.cc alone
// names them. A kind is on its list also in builds that cannot have such devices.
#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/device/side.h"
#include "comm/feature.h"
#include "memory/segment.h"

namespace xd {

// The facts that ranks tell one another about their devices.
struct DeviceIntroduction {
  std::int32_t type = kDLCPU;
  std::int32_t ordinal = 0;            // its number in its own process
  std::array<unsigned char, 16> id{};  // identity of the device, the same in every process
  std::int32_t multiprocessors = 0;
};

struct RankInfo {
  int rank;
  int num_ranks;
  int timeout_ms;
};

struct DeviceKind {
  std::int32_t type;            // a DLDeviceType
  const char* type_name;        // its name in C
  const char* device_in_words;  // for error texts: "a CUDA device"
  xd_feature feature;
  // Tells whether this build and machine have such devices. Where not, no function below is called,
  // and each may be null.
  Feature (*availability)();
  bool is_numbered = false;  // config.device.device_id says which; -1 = the launcher's LOCAL_RANK
  // How often hosts look at what kernels have raised, since kernels cannot wake their host; -1 =
  // there are no kernels.
  int tick_ms = -1;

  // Checks that the device is there and has what the library needs, and that communicators may have
  // that many ranks. Throws UNSUPPORTED, INVALID_ARGUMENT.
  DeviceIntroduction (*introduce)(int ordinal, int num_ranks) = nullptr;
  // How many of them this process sees; 0 also after an error. Never throws.
  int (*count)() = nullptr;
  // Where a device is on PCI buses ("0000:17:00.0"); "" = not known, also after an error. Never
  // throws. Null = such devices are on none.
  std::string (*pci_address)(int ordinal) = nullptr;
  // Makes shared memory of the device.
  std::unique_ptr<SegmentMaker> (*make_memory)(int ordinal) = nullptr;
  // Bytes of that memory which every rank gives for its error board; 0 = there is no DeviceSide.
  std::size_t board_bytes = 0;
  // `boards`: the error boards of all ranks, in shared memory of their devices.
  std::unique_ptr<DeviceSide> (*make_side)(int ordinal, const RankInfo& info,
                                           std::vector<std::shared_ptr<Segment>> boards) = nullptr;
  // True while a stream of the device is captured into a graph; null = there are no streams.
  bool (*is_captured)(int ordinal, xd_stream stream) = nullptr;
  // Copies memory that this rank's device reaches, in the order of the stream.
  void (*copy)(int ordinal, void* to, const void* from, std::size_t bytes,
               xd_stream stream) = nullptr;
};

namespace devices::cpu {
extern const DeviceKind kDeviceKind;
}
namespace devices::cuda {
extern const DeviceKind kDeviceKind;
}

std::span<const DeviceKind* const> device_kinds();

// The names of all types, for error texts: "kDLCPU or kDLCUDA".
std::string device_type_names();

// Null where there is no such kind.
const DeviceKind* find_device_kind(std::int32_t type);
// The kind of a device that resolve_device() has returned.
const DeviceKind& kind_of(DLDevice device);

// The device that a config asks for. Throws INVALID_ARGUMENT; UNSUPPORTED if this machine or build
// has no such devices.
DLDevice resolve_device(DLDevice device);

}  // namespace xd
