#include "moe/streams.h"

namespace xd::moe {

std::unique_ptr<Streams> make_streams(const DLDevice& device) {
#ifdef XD_BUILT_FOR_CUDA
  if (device.device_type == kDLCUDA) return cuda::make_streams(device.device_id);
#endif
  static_cast<void>(device);
  return std::make_unique<Streams>();
}

}  // namespace xd::moe
