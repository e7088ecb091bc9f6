#include "comm/feature.h"

#include <string>

#if XD_CUDA
#include "cuda/device.h"
#endif

namespace xd {
namespace {

Feature cuda_feature() {
#if XD_CUDA
  // The answer is kept for good: it is expensive to find out, and cannot change while the process
  // lives.
  static const std::string& missing = *new std::string(cuda::why_unavailable());
  return {missing.empty(), missing.empty() ? "available" : missing.c_str()};
#else
  return {false, "not built in: this build has no CUDA executor"};
#endif
}

}  // namespace

Feature feature(std::int32_t which) {
  switch (which) {
    case XD_FEATURE_CPU:
      return {true, "available"};
    case XD_FEATURE_CUDA:
      return cuda_feature();
    case XD_FEATURE_NETWORK:
      return {false, "not built in: this version joins ranks of one host only"};
    case XD_FEATURE_GEMM:
      return {false, "not built in: this version has no communication overlapped with GEMM"};
    default:
      return {false, "unknown feature"};
  }
}

}  // namespace xd
