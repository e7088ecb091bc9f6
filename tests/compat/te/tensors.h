// Tensors of tests as TransformerEngine's functions take them.
#pragma once

#include <crossdock/compat/te_tensor.h>

#include <stdexcept>
#include <vector>

#include "support/tensor.h"

namespace xd::test {

inline transformer_engine::DType te_type(DLDataType type) {
  using transformer_engine::DType;
  const auto is = [&](DLDataType other) {
    return type.code == other.code && type.bits == other.bits;
  };
  if (is(kU8)) return DType::kByte;
  if (is(kI32)) return DType::kInt32;
  if (is(kI64)) return DType::kInt64;
  if (is(kF32)) return DType::kFloat32;
  if (is(kF16)) return DType::kFloat16;
  if (is(kBf16)) return DType::kBFloat16;
  if (is(kE4m3)) return DType::kFloat8E4M3;
  if (is(kE5m2)) return DType::kFloat8E5M2;
  if (is(kE8m0)) return DType::kFloat8E8M0;
  throw std::logic_error("TransformerEngine has no such type");
}

inline std::vector<size_t> te_shape(const DLTensor& tensor) {
  return {tensor.shape, tensor.shape + tensor.ndim};
}

// The same tensor, or an empty one for NULL, whose handle te_handle() does not pass on.
inline transformer_engine::TensorWrapper te_tensor(const DLTensor* tensor) {
  if (tensor == nullptr) return transformer_engine::TensorWrapper();
  return transformer_engine::TensorWrapper(tensor->data, te_shape(*tensor), te_type(tensor->dtype));
}

// fp8 rows with a scale for each 32 columns.
inline transformer_engine::TensorWrapper te_mxfp8_tensor(const DLTensor& rows,
                                                         const DLTensor& scales) {
  transformer_engine::TensorWrapper tensor(NVTE_MXFP8_1D_SCALING);
  tensor.set_rowwise_data(rows.data, te_type(rows.dtype), te_shape(rows));
  tensor.set_rowwise_scale_inv(scales.data, te_type(scales.dtype), te_shape(scales));
  return tensor;
}

}  // namespace xd::test
