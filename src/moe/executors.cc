#include "moe/executors.h"

#include <limits>

namespace xd::moe {

std::unique_ptr<Streams> make_streams(const DLDevice& device) {
#ifdef XD_BUILT_FOR_CUDA
  if (device.device_type == kDLCUDA) return cuda::make_streams(device.device_id);
#endif
  static_cast<void>(device);
  return std::make_unique<Streams>();
}

int most_sms(const ep::Group& group) {
#ifdef XD_BUILT_FOR_CUDA
  if (group.comm().device().device_type == kDLCUDA) return cuda::most_sms(group);
#endif
  const int own = group.config().num_sms;
  return own > 0 ? own : std::numeric_limits<int>::max();
}

void require_memory(const DLDevice& device, std::initializer_list<Tensor> tensors) {
#ifdef XD_BUILT_FOR_CUDA
  if (device.device_type == kDLCUDA) cuda::require_memory(device.device_id, tensors);
#endif
  static_cast<void>(device);
  static_cast<void>(tensors);
}

}  // namespace xd::moe
