#include "ep/executors.h"

#include "base/error.h"

namespace xd::ep {

const Executor& executor_for(std::int32_t device_type, bool slots) {
#ifdef XD_BUILT_FOR_CUDA
  if (device_type == cuda::kBulk.device_type) return slots ? cuda::kSlots : cuda::kBulk;
#endif
  if (device_type == cpu::kBulk.device_type) return slots ? cpu::kSlots : cpu::kBulk;
  fail(XD_ERROR_UNSUPPORTED, "config.device_type = ", device_type,
       ": this build has no executor for such devices");
}

}  // namespace xd::ep
