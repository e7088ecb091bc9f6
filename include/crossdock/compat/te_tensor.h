/* Crossdock: the tensors that TransformerEngine's C functions take, for programs that are built
 * without TransformerEngine. C++17.
 *
 * Declared as in TransformerEngine 2.20, without its memory: a tensor points to data of the
 * caller's. Names that te_ep.h and te_comm_gemm.h do not read are left out: grouped tensors, packs,
 * quantisation, NVFP4's own parameters, and functions that start kernels (nvte_zero_tensor).
 *
 * A program that also uses TransformerEngine itself includes TransformerEngine's header of tensors
 * first, or has both include paths, Crossdock's first. Nothing is declared here then, and tensors
 * are read through TransformerEngine's functions.
 */
#ifndef CROSSDOCK_COMPAT_TE_TENSOR_H_
#define CROSSDOCK_COMPAT_TE_TENSOR_H_

#if !defined(__cplusplus) || __cplusplus < 201703L
#error "crossdock/compat is C++17: its functions throw, as TransformerEngine's do"
#endif

#include <crossdock/compat/te_error.h>
#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <cstring>
#include <vector>

/* Of the CUDA runtime; declared alike there. */
typedef struct CUstream_st* cudaStream_t;

#ifndef TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_

enum NVTEDType {
  kNVTEByte = 0,
  kNVTEInt16 = 1,
  kNVTEInt32 = 2,
  kNVTEInt64 = 3,
  kNVTEFloat32 = 4,
  kNVTEFloat16 = 5,
  kNVTEBFloat16 = 6,
  kNVTEFloat8E4M3 = 7,
  kNVTEFloat8E5M2 = 8,
  kNVTEFloat8E8M0 = 9,
  kNVTEFloat4E2M1 = 10,
  kNVTENumTypes
};

struct NVTEShape {
  size_t data[15];
  size_t ndim;
};

struct NVTEBasicTensor {
  void* data_ptr;
  NVTEDType dtype;
  NVTEShape shape;
};

enum NVTETensorParam {
  kNVTERowwiseData = 0,
  kNVTEColumnwiseData = 1,
  kNVTEScale = 2,
  kNVTEAmax = 3,
  kNVTERowwiseScaleInv = 4,
  kNVTEColumnwiseScaleInv = 5,
  kNVTEColumnwiseAmax = 6,
  /* A uint8_t; the parameters before it are each an NVTEBasicTensor. */
  kNVTEWithGEMMSwizzledScales = 7,
  /* Refused here. */
  kNVTERowScaledNVFP4 = 8,
  kNVTENVFP4E4M3Max = 9,
  kNVTENumTensorParams
};

enum NVTEScalingMode {
  NVTE_DELAYED_TENSOR_SCALING = 0,
  NVTE_MXFP8_1D_SCALING = 1,
  NVTE_BLOCK_SCALING_1D = 2,
  NVTE_BLOCK_SCALING_2D = 3,
  NVTE_NVFP4_1D_SCALING = 4,
  NVTE_INVALID_SCALING = 100
};

typedef void* NVTETensor;

namespace crossdock::te::detail {

struct TensorRecord {
  NVTEScalingMode scaling_mode;
  NVTEBasicTensor parts[kNVTEWithGEMMSwizzledScales];
  uint8_t swizzled_scales;
};

inline const TensorRecord& record_of(NVTETensor tensor) {
  static const TensorRecord kEmpty{};
  return tensor != nullptr ? *static_cast<const TensorRecord*>(tensor) : kEmpty;
}

inline const NVTEBasicTensor& part_of(NVTETensor tensor, NVTETensorParam part) {
  return record_of(tensor).parts[part];
}

[[noreturn]] inline void refuse_parameter(const char* function, NVTETensorParam param) {
  throw Error(XD_ERROR_UNSUPPORTED,
              std::string(function) + ": parameter " + std::to_string(param) + ", expected 0 to 7");
}

inline void require_bytes(const char* function, size_t got, size_t expected) {
  if (got >= expected) return;
  throw Error(XD_ERROR_INVALID_ARGUMENT, std::string(function) +
                                             ": size_in_bytes = " + std::to_string(got) +
                                             ", expected at least " + std::to_string(expected));
}

inline size_t product(const NVTEShape& shape) {
  size_t count = 1;
  for (size_t d = 0; d < shape.ndim; ++d) count *= shape.data[d];
  return count;
}

inline size_t type_bits(NVTEDType type) {
  constexpr size_t kBits[] = {8, 16, 32, 64, 32, 16, 16, 8, 8, 8, 4};
  return type >= 0 && type < kNVTENumTypes ? kBits[type] : 0;
}

}  // namespace crossdock::te::detail

extern "C" {

XD_TE_FUNCTION NVTETensor nvte_create_tensor(NVTEScalingMode scaling_mode) {
  using crossdock::te::detail::TensorRecord;
  auto* const record = new TensorRecord{};
  record->scaling_mode = scaling_mode;
  for (NVTEBasicTensor& part : record->parts) part = {nullptr, kNVTEFloat32, {{0}, 1}};
  return record;
}

XD_TE_FUNCTION void nvte_destroy_tensor(NVTETensor tensor) {
  delete static_cast<crossdock::te::detail::TensorRecord*>(tensor);
}

XD_TE_FUNCTION void nvte_create_tensors(NVTEScalingMode scaling_mode, NVTETensor* tensors,
                                        size_t N) {
  std::generate_n(tensors, N, [&] { return nvte_create_tensor(scaling_mode); });
}

XD_TE_FUNCTION void nvte_destroy_tensors(NVTETensor* tensors, size_t N) {
  std::for_each(tensors, tensors + N, nvte_destroy_tensor);
}

XD_TE_FUNCTION void nvte_set_tensor_param_v2(NVTETensor tensor, NVTETensorParam param,
                                             const void* buf, size_t size_in_bytes) {
  using namespace crossdock::te::detail;
  if (param > kNVTEWithGEMMSwizzledScales) refuse_parameter("nvte_set_tensor_param_v2", param);
  auto* const record = static_cast<TensorRecord*>(tensor);
  const bool is_flag = param == kNVTEWithGEMMSwizzledScales;
  void* const to = is_flag ? static_cast<void*>(&record->swizzled_scales) : &record->parts[param];
  const size_t bytes = is_flag ? sizeof(uint8_t) : sizeof(NVTEBasicTensor);
  require_bytes("nvte_set_tensor_param_v2", size_in_bytes, bytes);
  std::memcpy(to, buf, bytes);
}

XD_TE_FUNCTION void nvte_get_tensor_param_v2(const NVTETensor tensor, NVTETensorParam param,
                                             void* buf, size_t size_in_bytes,
                                             size_t* size_written) {
  using namespace crossdock::te::detail;
  if (param > kNVTEWithGEMMSwizzledScales) refuse_parameter("nvte_get_tensor_param_v2", param);
  const bool is_flag = param == kNVTEWithGEMMSwizzledScales;
  const size_t bytes = is_flag ? sizeof(uint8_t) : sizeof(NVTEBasicTensor);
  if (size_written != nullptr) *size_written = bytes;
  if (buf == nullptr) return;
  require_bytes("nvte_get_tensor_param_v2", size_in_bytes, bytes);
  const TensorRecord& record = record_of(tensor);
  std::memcpy(buf,
              is_flag ? static_cast<const void*>(&record.swizzled_scales) : &record.parts[param],
              bytes);
}

XD_TE_FUNCTION void nvte_set_tensor_param(NVTETensor* tensor, NVTETensorParam param_name,
                                          const NVTEBasicTensor* param) {
  nvte_set_tensor_param_v2(*tensor, param_name, param, sizeof(*param));
}

XD_TE_FUNCTION NVTEBasicTensor nvte_get_tensor_param(const NVTETensor tensor,
                                                     NVTETensorParam param_name) {
  NVTEBasicTensor part{};
  nvte_get_tensor_param_v2(tensor, param_name, &part, sizeof(part), nullptr);
  return part;
}

XD_TE_FUNCTION NVTEShape nvte_make_shape(const size_t* data, size_t ndim) {
  NVTEShape shape{};
  if (ndim > 14) {
    throw crossdock::te::Error(
        XD_ERROR_INVALID_ARGUMENT,
        "nvte_make_shape: ndim = " + std::to_string(ndim) + ", expected at most 14");
  }
  shape.ndim = ndim;
  if (data != nullptr) std::copy_n(data, ndim, shape.data);
  return shape;
}

XD_TE_FUNCTION NVTEScalingMode nvte_tensor_scaling_mode(const NVTETensor tensor) {
  return crossdock::te::detail::record_of(tensor).scaling_mode;
}

XD_TE_FUNCTION void* nvte_tensor_data(const NVTETensor tensor) {
  return crossdock::te::detail::part_of(tensor, kNVTERowwiseData).data_ptr;
}

XD_TE_FUNCTION void* nvte_tensor_columnwise_data(const NVTETensor tensor) {
  return crossdock::te::detail::part_of(tensor, kNVTEColumnwiseData).data_ptr;
}

XD_TE_FUNCTION NVTEShape nvte_tensor_shape(const NVTETensor tensor) {
  return crossdock::te::detail::part_of(tensor, kNVTERowwiseData).shape;
}

XD_TE_FUNCTION NVTEShape nvte_tensor_columnwise_shape(const NVTETensor tensor) {
  return crossdock::te::detail::part_of(tensor, kNVTEColumnwiseData).shape;
}

XD_TE_FUNCTION NVTEShape nvte_tensor_scale_inv_shape(const NVTETensor tensor) {
  return crossdock::te::detail::part_of(tensor, kNVTERowwiseScaleInv).shape;
}

XD_TE_FUNCTION NVTEDType nvte_tensor_type(const NVTETensor tensor) {
  return crossdock::te::detail::part_of(tensor, kNVTERowwiseData).dtype;
}

XD_TE_FUNCTION size_t nvte_tensor_ndims(const NVTETensor tensor) {
  return nvte_tensor_shape(tensor).ndim;
}

/* 0 for a dimension that the tensor does not have. */
XD_TE_FUNCTION size_t nvte_tensor_size(const NVTETensor tensor, const size_t dim) {
  const NVTEShape shape = nvte_tensor_shape(tensor);
  return dim < shape.ndim ? shape.data[dim] : 0;
}

XD_TE_FUNCTION size_t nvte_tensor_numel(const NVTETensor tensor) {
  return crossdock::te::detail::product(nvte_tensor_shape(tensor));
}

XD_TE_FUNCTION size_t nvte_tensor_element_size_bits(const NVTETensor tensor) {
  return crossdock::te::detail::type_bits(nvte_tensor_type(tensor));
}

XD_TE_FUNCTION size_t nvte_tensor_element_size(const NVTETensor tensor) {
  return nvte_tensor_element_size_bits(tensor) / 8;
}

XD_TE_FUNCTION size_t nvte_tensor_size_bytes(const NVTETensor tensor) {
  return nvte_tensor_numel(tensor) * nvte_tensor_element_size_bits(tensor) / 8;
}

XD_TE_FUNCTION float* nvte_tensor_amax(const NVTETensor tensor) {
  return static_cast<float*>(crossdock::te::detail::part_of(tensor, kNVTEAmax).data_ptr);
}

XD_TE_FUNCTION float* nvte_tensor_scale(const NVTETensor tensor) {
  return static_cast<float*>(crossdock::te::detail::part_of(tensor, kNVTEScale).data_ptr);
}

XD_TE_FUNCTION float* nvte_tensor_scale_inv(const NVTETensor tensor) {
  return static_cast<float*>(crossdock::te::detail::part_of(tensor, kNVTERowwiseScaleInv).data_ptr);
}

}  // extern "C"

namespace transformer_engine {

enum class DType {
  kByte = 0,
  kInt16 = 1,
  kInt32 = 2,
  kInt64 = 3,
  kFloat32 = 4,
  kFloat16 = 5,
  kBFloat16 = 6,
  kFloat8E4M3 = 7,
  kFloat8E5M2 = 8,
  kFloat8E8M0 = 9,
  kFloat4E2M1 = 10,
  kNumTypes
};

/* Owner of an NVTETensor. It does not own the tensor's data. */
class TensorWrapper {
 public:
  TensorWrapper(void* dptr, const NVTEShape& shape, const DType dtype, float* amax_dptr = nullptr,
                float* scale_dptr = nullptr, float* scale_inv_dptr = nullptr,
                NVTEShape scale_inv_shape = {{1}, 1},
                const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : TensorWrapper(scaling_mode) {
    set_rowwise_data(dptr, dtype, shape);
    const NVTEShape one{{1}, 1};
    if (amax_dptr != nullptr) set_amax(amax_dptr, DType::kFloat32, one);
    if (scale_dptr != nullptr) set_scale(scale_dptr, DType::kFloat32, one);
    if (scale_inv_dptr != nullptr) {
      set_rowwise_scale_inv(scale_inv_dptr, DType::kFloat32, scale_inv_shape);
    }
  }
  TensorWrapper(void* dptr, const std::vector<size_t>& shape, const DType dtype,
                float* amax_dptr = nullptr, float* scale_dptr = nullptr,
                float* scale_inv_dptr = nullptr, const std::vector<size_t>& scale_inv_shape = {1},
                const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : TensorWrapper(dptr, as_shape(shape), dtype, amax_dptr, scale_dptr, scale_inv_dptr,
                      as_shape(scale_inv_shape), scaling_mode) {}
  explicit TensorWrapper(const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : tensor_(nvte_create_tensor(scaling_mode)) {}
  ~TensorWrapper() { nvte_destroy_tensor(tensor_); }
  TensorWrapper(const TensorWrapper&) = delete;
  TensorWrapper& operator=(const TensorWrapper&) = delete;
  TensorWrapper(TensorWrapper&& other) noexcept : tensor_(other.tensor_) {
    other.tensor_ = nullptr;
  }
  TensorWrapper& operator=(TensorWrapper&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }

  template <typename ShapeType>
  TensorWrapper& set_parameter(const NVTETensorParam param, void* dptr, DType type,
                               const ShapeType& shape) {
    const NVTEBasicTensor part = {dptr, static_cast<NVTEDType>(type), as_shape(shape)};
    nvte_set_tensor_param_v2(tensor_, param, &part, sizeof(part));
    return *this;
  }
  template <typename ShapeType>
  TensorWrapper& set_rowwise_data(void* dptr, DType type, const ShapeType& shape) {
    return set_parameter(kNVTERowwiseData, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper& set_columnwise_data(void* dptr, DType type, const ShapeType& shape) {
    return set_parameter(kNVTEColumnwiseData, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper& set_scale(void* dptr, DType type, const ShapeType& shape) {
    return set_parameter(kNVTEScale, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper& set_amax(void* dptr, DType type, const ShapeType& shape) {
    return set_parameter(kNVTEAmax, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper& set_rowwise_scale_inv(void* dptr, DType type, const ShapeType& shape) {
    return set_parameter(kNVTERowwiseScaleInv, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper& set_columnwise_scale_inv(void* dptr, DType type, const ShapeType& shape) {
    return set_parameter(kNVTEColumnwiseScaleInv, dptr, type, shape);
  }
  void set_with_gemm_swizzled_scales(bool swizzled) {
    const uint8_t value = swizzled ? 1 : 0;
    nvte_set_tensor_param_v2(tensor_, kNVTEWithGEMMSwizzledScales, &value, sizeof(value));
  }

  NVTETensor data() const noexcept { return tensor_; }
  const NVTEShape shape() const { return nvte_tensor_shape(tensor_); }
  size_t size(const size_t dim) const { return nvte_tensor_size(tensor_, dim); }
  size_t ndim() const { return nvte_tensor_ndims(tensor_); }
  size_t numel() const { return nvte_tensor_numel(tensor_); }
  size_t element_size() const { return nvte_tensor_element_size(tensor_); }
  size_t bytes() const { return nvte_tensor_size_bytes(tensor_); }
  DType dtype() const { return static_cast<DType>(nvte_tensor_type(tensor_)); }
  void* dptr() const { return nvte_tensor_data(tensor_); }
  void* columnwise_dptr() const { return nvte_tensor_columnwise_data(tensor_); }
  float* amax() const { return nvte_tensor_amax(tensor_); }
  float* scale() const { return nvte_tensor_scale(tensor_); }
  float* scale_inv() const { return nvte_tensor_scale_inv(tensor_); }
  NVTEScalingMode scaling_mode() const { return nvte_tensor_scaling_mode(tensor_); }

 private:
  static NVTEShape as_shape(const NVTEShape& shape) { return shape; }
  static NVTEShape as_shape(const std::vector<size_t>& shape) {
    return nvte_make_shape(shape.data(), shape.size());
  }

  NVTETensor tensor_ = nullptr;
};

}  // namespace transformer_engine

#endif /* TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_ */
#endif /* CROSSDOCK_COMPAT_TE_TENSOR_H_ */
