#include "ep/tensor.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/math.h"

namespace xd::ep {
namespace {

std::string names(std::span<const DType> types) {
  std::string list;
  for (const DType type : types) {
    if (!list.empty()) list += " or ";
    list += dtype_name(type);
  }
  return list;
}

// DLPack 0.x leaves strides NULL for C-contiguous tensors; later versions always set them. A stride
// of a dimension of extent 1 (or of an empty tensor) is never used and may be anything.
bool contiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  for (int d = tensor.ndim - 1; d >= 0; --d) {
    if (tensor.shape[d] == 0) return true;
    if (tensor.shape[d] != 1 && tensor.strides[d] != expected) return false;
    expected *= tensor.shape[d];
  }
  return true;
}

void require_device(const DLTensor& tensor, const TensorSpec& spec) {
  const auto type = tensor.device.device_type;
  const bool on_cpu = spec.device.device_type == kDLCPU;
  if (type == kDLCUDAHost && (on_cpu || spec.pinned_host)) return;
  XD_REQUIRE(type == spec.device.device_type, spec.name, ": on DLPack device type ", int{type},
             ", expected ", int{spec.device.device_type}, ", that of the communicator");
  XD_REQUIRE(on_cpu || tensor.device.device_id == spec.device.device_id, spec.name,
             ": on CUDA device ", tensor.device.device_id, ", expected ", spec.device.device_id,
             ", that of the communicator");
}

void require_shape(const DLTensor& tensor, const TensorSpec& spec) {
  XD_REQUIRE(tensor.ndim == spec.ndim, spec.name, ": has ", tensor.ndim, " dimensions, expected ",
             spec.ndim);
  XD_REQUIRE(tensor.shape != nullptr, spec.name, ".shape = NULL");
  for (int d = 0; d < tensor.ndim; ++d) {
    XD_REQUIRE(tensor.shape[d] >= 0 && tensor.shape[d] <= INT32_MAX, spec.name, ".shape[", d,
               "] = ", tensor.shape[d], ", expected 0 to ", INT32_MAX);
  }
  XD_REQUIRE(contiguous(tensor), spec.name, ": is not contiguous, expected C-contiguous rows");
}

}  // namespace

Tensor read_tensor(const DLTensor* user, const TensorSpec& spec) {
  if (user == nullptr) {
    XD_REQUIRE(spec.optional, spec.name, " = NULL, expected a tensor");
    return Tensor{.name = spec.name};
  }
  require_device(*user, spec);
  require_shape(*user, spec);
  const auto type = dtype_of(user->dtype);
  XD_REQUIRE(type && std::ranges::find(spec.types, *type) != spec.types.end(), spec.name, ": is ",
             describe_dtype(user->dtype), ", expected ", names(spec.types));
  Tensor tensor{.name = spec.name,
                .data = static_cast<std::byte*>(user->data),
                .type = *type,
                .rows = user->shape[0],
                .cols = user->ndim > 1 ? user->shape[1] : 1,
                .given = true};
  checked_mul(static_cast<std::uint64_t>(tensor.rows), tensor.row_bytes(), spec.name);
  if (tensor.bytes() > 0) {
    XD_REQUIRE(tensor.data != nullptr, spec.name, ".data = NULL, expected ", tensor.bytes(),
               " bytes");
    tensor.data += user->byte_offset;
    XD_REQUIRE(reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0, spec.name, ": data is at ",
               static_cast<const void*>(tensor.data), ", expected a 16-byte aligned address");
  }
  return tensor;
}

void require_rows(const Tensor& tensor, std::int64_t rows, const char* what) {
  XD_REQUIRE(tensor.rows == rows, tensor.name, ": has ", tensor.rows, " rows, expected ", rows,
             " (", what, ")");
}

void require_cols(const Tensor& tensor, std::int64_t cols, const char* what) {
  XD_REQUIRE(tensor.cols == cols, tensor.name, ": has ", tensor.cols, " columns, expected ", cols,
             " (", what, ")");
}

void require_same_type(const Tensor& tensor, const Tensor& other) {
  XD_REQUIRE(tensor.type == other.type, tensor.name, ": is ", dtype_name(tensor.type),
             ", expected ", dtype_name(other.type), ", as ", other.name);
}

void require_together(const Tensor& a, const Tensor& b) {
  XD_REQUIRE(a.given == b.given, a.name, " and ", b.name, " go together: ", (a ? a : b).name,
             " is given and ", (a ? b : a).name, " is NULL");
}

}  // namespace xd::ep
