#include "comm/device/kinds.h"

#include <string>

#include "base/error.h"
#include "comm/cuda/segment.h"
#include "comm/cuda/side.h"
#include "cuda/device.h"
#include "cuda/error.h"
#include "cuda/stream.h"

namespace xd::devices::cuda {
namespace {

Feature availability() {
  // The answer is kept for good: it is expensive to find out, and cannot change while the process
  // lives.
  static const std::string& missing = *new std::string(xd::cuda::why_unavailable());
  return {missing.empty(), missing.empty() ? "available" : missing.c_str()};
}

DeviceIntroduction introduce(int ordinal, int num_ranks) {
  if (num_ranks > kMaxDeviceRanks) {
    fail(XD_ERROR_UNSUPPORTED, "num_ranks = ", num_ranks, ", expected at most ", kMaxDeviceRanks,
         " on CUDA devices");
  }
  const xd::cuda::DeviceFacts facts = xd::cuda::require_device(ordinal);
  return {.type = kDLCUDA,
          .ordinal = facts.ordinal,
          .id = facts.uuid,
          .multiprocessors = facts.multiprocessors};
}

std::unique_ptr<SegmentMaker> make_memory(int ordinal) {
  return std::make_unique<CudaSegmentMaker>(ordinal);
}

bool is_captured(int ordinal, xd_stream stream) {
  const xd::cuda::DeviceGuard guard(ordinal);
  return xd::cuda::is_captured(stream);
}

void copy(int ordinal, void* to, const void* from, std::size_t bytes, xd_stream stream) {
  const xd::cuda::DeviceGuard guard(ordinal);
  XD_CUDA_CHECK(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}

}  // namespace

const DeviceKind kDeviceKind{
    .type = kDLCUDA,
    .type_name = "kDLCUDA",
    .device_in_words = "a CUDA device",
    .feature = XD_FEATURE_CUDA,
    .availability = availability,
    .is_numbered = true,
    .tick_ms = 50,
    .introduce = introduce,
    .count = xd::cuda::visible_devices,
    .pci_address = xd::cuda::pci_address,
    .make_memory = make_memory,
    .board_bytes = sizeof(DeviceBoard),
    .make_side = make_cuda_side,
    .is_captured = is_captured,
    .copy = copy,
};

}  // namespace xd::devices::cuda
