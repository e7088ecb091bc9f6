#include "cuda/driver.h"

#include <cuda_runtime_api.h>

#include "base/error.h"
#include "cuda/error.h"

namespace xd::cuda {
namespace {

std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

void require_driver() {
  int version = 0;
  check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  if (version == 0) {
    fail(XD_ERROR_UNSUPPORTED, "no NVIDIA driver is installed on this machine");
  }
  // A driver runs programs made with any release of its own major version.
  if (version / 1000 < CUDART_VERSION / 1000) {
    fail(XD_ERROR_UNSUPPORTED, "the NVIDIA driver supports CUDA ", version_text(version),
         ", this library needs ", version_text(CUDART_VERSION / 1000 * 1000));
  }
}

// Returns null if the driver does not have the function.
void* find(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) return function;
  cudaGetLastError();
  return nullptr;
}

void* find_required(const char* name, unsigned version) {
  void* const function = find(name, version);
  if (function == nullptr) fail(XD_ERROR_UNSUPPORTED, "the NVIDIA driver has no ", name);
  return function;
}

Driver load() {
  require_driver();
  Driver table;
#define XD_DRIVER_FUNCTION(name, version) \
  table.name = reinterpret_cast<PFN_##name##_v##version>(find_required(#name, version));
  XD_DRIVER_FUNCTIONS
#undef XD_DRIVER_FUNCTION
#define XD_DRIVER_FUNCTION(name, version) \
  table.name = reinterpret_cast<PFN_##name##_v##version>(find(#name, version));
  XD_OPTIONAL_DRIVER_FUNCTIONS
#undef XD_DRIVER_FUNCTION
  return table;
}

}  // namespace

const Driver& driver() {
  static const Driver table = load();
  return table;
}

}  // namespace xd::cuda
