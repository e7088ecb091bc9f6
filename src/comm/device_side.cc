#include "comm/device_side.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "comm/feature.h"
#include "memory/host_segment.h"

#if XD_CUDA
#include "cuda/device.h"
#include "memory/cuda_segment.h"
#endif

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

DLDevice resolve_device(DLDevice device) {
  XD_REQUIRE(device.device_type == kDLCPU || device.device_type == kDLCUDA,
             "config.device.device_type = ", int{device.device_type},
             ", expected kDLCPU or kDLCUDA");
  if (device.device_type == kDLCPU) return device;
  if (const Feature cuda = feature(XD_FEATURE_CUDA); !cuda.available) {
    fail(XD_ERROR_UNSUPPORTED, "config.device is a CUDA device: ", cuda.reason);
  }
  XD_REQUIRE(device.device_id >= -1, "config.device.device_id = ", device.device_id,
             ", expected a device or -1");
  if (device.device_id == -1) device.device_id = local_rank();
  return device;
}

// resolve_device() lets CUDA devices pass only in builds with CUDA.
#if XD_CUDA

DeviceIntroduction introduce_device(DLDevice device) {
  if (device.device_type == kDLCPU) return {};
  const cuda::DeviceFacts facts = cuda::require_device(device.device_id);
  return {.type = kDLCUDA,
          .ordinal = facts.ordinal,
          .id = facts.uuid,
          .multiprocessors = facts.multiprocessors};
}

std::unique_ptr<SegmentMaker> make_segment_maker(DLDevice device) {
  if (device.device_type == kDLCPU) return std::make_unique<HostSegmentMaker>();
  return std::make_unique<CudaSegmentMaker>(device.device_id);
}

std::size_t device_board_bytes(DLDevice device) {
  return device.device_type == kDLCUDA ? sizeof(DeviceBoard) : 0;
}

std::unique_ptr<DeviceSide> make_device_side(DLDevice device, const RankSeat& seat,
                                             std::vector<std::shared_ptr<Segment>> boards) {
  return make_cuda_side(device.device_id, seat, std::move(boards));
}

#else

DeviceIntroduction introduce_device(DLDevice) { return {}; }

std::unique_ptr<SegmentMaker> make_segment_maker(DLDevice) {
  return std::make_unique<HostSegmentMaker>();
}

std::size_t device_board_bytes(DLDevice) { return 0; }

std::unique_ptr<DeviceSide> make_device_side(DLDevice, const RankSeat&,
                                             std::vector<std::shared_ptr<Segment>>) {
  return nullptr;
}

#endif

}  // namespace xd
