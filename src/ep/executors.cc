#include "ep/executors.h"

#include "base/error.h"

namespace xd::ep {
namespace {

template <class Executor>
const Executor& find(std::initializer_list<const Executor*> built, std::int32_t device_type) {
  for (const Executor* executor : built) {
    if (executor->device_type == device_type) return *executor;
  }
  fail(XD_ERROR_UNSUPPORTED, "config.device_type = ", device_type,
       ": this build has no executor for such devices");
}

}  // namespace

const BulkExecutor& bulk_executor_for(std::int32_t device_type) {
#ifdef XD_BUILT_FOR_CUDA
  return find({&cpu::kBulk, &cuda::kBulk}, device_type);
#else
  return find({&cpu::kBulk}, device_type);
#endif
}

const ExpertsExecutor& experts_executor_for(std::int32_t device_type) {
#ifdef XD_BUILT_FOR_CUDA
  return find({&cpu::kExperts, &cuda::kExperts}, device_type);
#else
  return find({&cpu::kExperts}, device_type);
#endif
}

const SlotsExecutor& slots_executor_for(std::int32_t device_type) {
#ifdef XD_BUILT_FOR_CUDA
  return find({&cpu::kSlots, &cuda::kSlots}, device_type);
#else
  return find({&cpu::kSlots}, device_type);
#endif
}

}  // namespace xd::ep
