// Tensors under TransformerEngine's names, where its own headers are absent.
#include <crossdock/compat/te_tensor.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "conformance/said.h"

namespace xd::test {
namespace {

using crossdock::te::Error;
using transformer_engine::DType;
using transformer_engine::TensorWrapper;
using Shape = std::vector<size_t>;

TEST(TeTensor, HasWhatItWasMadeWith) {
  float data[6] = {}, amax = 1, scale = 2, scale_inv = 3;
  const TensorWrapper tensor(data, Shape{2, 3}, DType::kFloat32, &amax, &scale, &scale_inv);
  EXPECT_EQ(nvte_tensor_data(tensor.data()), data);
  EXPECT_EQ(nvte_tensor_type(tensor.data()), kNVTEFloat32);
  EXPECT_EQ(nvte_tensor_scaling_mode(tensor.data()), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_EQ(nvte_tensor_ndims(tensor.data()), 2u);
  EXPECT_EQ(nvte_tensor_size(tensor.data(), 0), 2u);
  EXPECT_EQ(nvte_tensor_size(tensor.data(), 1), 3u);
  EXPECT_EQ(nvte_tensor_size(tensor.data(), 2), 0u);
  EXPECT_EQ(nvte_tensor_numel(tensor.data()), 6u);
  EXPECT_EQ(nvte_tensor_element_size(tensor.data()), 4u);
  EXPECT_EQ(nvte_tensor_element_size_bits(tensor.data()), 32u);
  EXPECT_EQ(nvte_tensor_size_bytes(tensor.data()), 24u);
  EXPECT_EQ(nvte_tensor_amax(tensor.data()), &amax);
  EXPECT_EQ(nvte_tensor_scale(tensor.data()), &scale);
  EXPECT_EQ(nvte_tensor_scale_inv(tensor.data()), &scale_inv);
  EXPECT_EQ(nvte_tensor_scale_inv_shape(tensor.data()).data[0], 1u);
  EXPECT_EQ(nvte_tensor_columnwise_data(tensor.data()), nullptr);
}

TEST(TeTensor, WithoutParametersIsEmpty) {
  const TensorWrapper tensor(NVTE_MXFP8_1D_SCALING);
  EXPECT_EQ(tensor.dptr(), nullptr);
  EXPECT_EQ(tensor.numel(), 0u);
  EXPECT_EQ(tensor.ndim(), 1u);
  EXPECT_EQ(tensor.scaling_mode(), NVTE_MXFP8_1D_SCALING);
  EXPECT_EQ(nvte_tensor_data(nullptr), nullptr);
}

TEST(TeTensor, ParametersAreSetAndReadByNumber) {
  NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  for (int number = kNVTERowwiseData; number <= kNVTEColumnwiseAmax; ++number) {
    const auto param = static_cast<NVTETensorParam>(number);
    const size_t extents[] = {4, static_cast<size_t>(number) + 1};
    const NVTEBasicTensor given = {&tensor, kNVTEBFloat16, nvte_make_shape(extents, 2)};
    nvte_set_tensor_param(&tensor, param, &given);
    const NVTEBasicTensor got = nvte_get_tensor_param(tensor, param);
    EXPECT_EQ(got.data_ptr, &tensor);
    EXPECT_EQ(got.dtype, kNVTEBFloat16);
    EXPECT_EQ(got.shape.ndim, 2u);
    EXPECT_EQ(got.shape.data[1], static_cast<size_t>(number) + 1);
  }
  const uint8_t swizzled = 1;
  nvte_set_tensor_param_v2(tensor, kNVTEWithGEMMSwizzledScales, &swizzled, sizeof(swizzled));
  uint8_t got = 0;
  size_t written = 0;
  nvte_get_tensor_param_v2(tensor, kNVTEWithGEMMSwizzledScales, &got, sizeof(got), &written);
  EXPECT_EQ(got, 1);
  EXPECT_EQ(written, 1u);
  nvte_get_tensor_param_v2(tensor, kNVTEScale, nullptr, 0, &written);
  EXPECT_EQ(written, sizeof(NVTEBasicTensor));
  nvte_destroy_tensor(tensor);
}

TEST(TeTensor, WhatIsNotThereIsRefused) {
  const TensorWrapper tensor;
  const int value = 448;
  try {
    nvte_set_tensor_param_v2(tensor.data(), kNVTENVFP4E4M3Max, &value, sizeof(value));
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), XD_ERROR_UNSUPPORTED);
    expect_words(error.what(), {"parameter 9"});
  }
  EXPECT_THROW(nvte_set_tensor_param_v2(tensor.data(), kNVTEScale, &value, sizeof(value)), Error);
  EXPECT_THROW(nvte_make_shape(nullptr, 15), std::runtime_error);
}

TEST(TeTensor, WrappersMove) {
  float data = 0;
  TensorWrapper first(&data, Shape{1}, DType::kFloat32);
  const NVTETensor handle = first.data();
  TensorWrapper second(std::move(first));
  EXPECT_EQ(second.data(), handle);
  TensorWrapper third;
  third = std::move(second);
  EXPECT_EQ(third.data(), handle);
  EXPECT_EQ(third.dptr(), &data);
}

TEST(TeTensor, ManyAreMadeAndDestroyedAtOnce) {
  NVTETensor tensors[4] = {};
  nvte_create_tensors(NVTE_MXFP8_1D_SCALING, tensors, 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(nvte_tensor_scaling_mode(tensors[i]), NVTE_MXFP8_1D_SCALING);
  }
  nvte_destroy_tensors(tensors, 4);  // the last one is none
}

}  // namespace
}  // namespace xd::test
