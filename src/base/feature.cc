#include "base/feature.h"

namespace xd {

Feature feature(std::int32_t which) {
  switch (which) {
    case XD_FEATURE_CPU:
      return {true, "available"};
    case XD_FEATURE_CUDA:
      return {false, "not built in: this version has no CUDA executor"};
    case XD_FEATURE_NETWORK:
      return {false, "not built in: this version joins ranks of one host only"};
    case XD_FEATURE_GEMM:
      return {false, "not built in: this version has no communication overlapped with GEMM"};
    default:
      return {false, "unknown feature"};
  }
}

}  // namespace xd
