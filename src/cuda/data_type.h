// The names that CUDA's libraries have for element types.
#pragma once

#include <library_types.h>

#include "base/dtype.h"

namespace xd::cuda {

inline cudaDataType_t data_type(DType type) {
  switch (type) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::f16:
      return CUDA_R_16F;
    case DType::e4m3:
      return CUDA_R_8F_E4M3;
    case DType::e5m2:
      return CUDA_R_8F_E5M2;
    default:
      return CUDA_R_16BF;
  }
}

}  // namespace xd::cuda
