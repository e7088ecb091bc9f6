#include "gemm/executors.h"

#include <string>

#include "base/error.h"
#include "comm/device/kinds.h"

namespace xd::gemm {

std::span<const Executor* const> executors() {
#ifdef XD_BUILT_FOR_CUDA
  static constexpr const Executor* kAll[] = {&cpu::kExecutor, &cuda::kExecutor};
#else
  static constexpr const Executor* kAll[] = {&cpu::kExecutor};
#endif
  return kAll;
}

const Executor& executor_for(std::int32_t device_type) {
  for (const Executor* executor : executors()) {
    if (executor->device_type == device_type) return *executor;
  }
  const auto name_of = [](std::int32_t type) {
    const DeviceKind* const kind = find_device_kind(type);
    return kind != nullptr ? std::string(kind->type_name) : std::to_string(type);
  };
  std::string names;
  for (const Executor* executor : executors()) {
    if (!names.empty()) names += " or ";
    names += name_of(executor->device_type);
  }
  fail(XD_ERROR_UNSUPPORTED, "device = ", name_of(device_type), ", expected ", names,
       ": this version computes products over ranks (xd_gemm_*) on communicators of that device "
       "only");
}

Feature cublasmp_feature() {
  for (const Executor* executor : executors()) {
    if (executor->cublasmp != nullptr) return executor->cublasmp();
  }
  return {false, "this library was built without CUDA, which cuBLASMp needs"};
}

Feature feature() {
  for (const Executor* executor : executors()) {
    if (executor->availability().available) return executor->availability();
  }
  return executors()[0]->availability();
}

}  // namespace xd::gemm
