#include "base/tensor.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/error.h"
#include "base/math.h"

namespace xd {
namespace {

std::string names(std::span<const DType> types) {
  std::string list;
  for (const DType type : types) {
    if (!list.empty()) list += " or ";
    list += dtype_name(type);
  }
  return list;
}

// Strides of a matrix, in elements. DLPack 0.x leaves them NULL for C-contiguous tensors; later
// versions always set them.
void read_strides(const DLTensor& user, Tensor& tensor) {
  tensor.row_stride = tensor.cols;
  if (user.strides == nullptr) return;
  tensor.row_stride = user.strides[0];
  if (user.ndim > 1) tensor.col_stride = user.strides[1];
}

// A stride along an extent of 1, and every stride of an empty tensor, is never used and may be
// anything.
void require_strides(const Tensor& tensor, const TensorSpec& spec) {
  if (tensor.bytes() == 0 || tensor.packed()) return;
  XD_REQUIRE(spec.fit == Fit::input || spec.fit == Fit::output, spec.name,
             ": is not contiguous, expected C-contiguous rows");
  const auto magnitude = [](std::int64_t stride) {
    return stride < 0 ? 0 - static_cast<std::uint64_t>(stride) : static_cast<std::uint64_t>(stride);
  };
  const std::uint64_t down = magnitude(tensor.row_stride), along = magnitude(tensor.col_stride);
  const std::uint64_t rows = at(tensor.rows), cols = at(tensor.cols);
  constexpr std::uint64_t kFarthest = std::uint64_t{1} << 56;  // bytes to any element fit 64 bits
  XD_REQUIRE((rows == 1 || down <= kFarthest / rows) && (cols == 1 || along <= kFarthest / cols),
             spec.name, ": has strides ", tensor.row_stride, " and ", tensor.col_stride,
             ", expected ones that stay within 2^56 elements");
  if (spec.fit == Fit::input) return;
  // Two elements meet where some steps down equal some steps along. These are the fewest such
  // steps.
  const std::uint64_t common = std::max<std::uint64_t>(1, std::gcd(down, along));
  XD_REQUIRE(along / common >= rows || down / common >= cols, spec.name, ": has strides ",
             tensor.row_stride, " and ", tensor.col_stride,
             ", expected each element to have a place of its own");
}

void require_alignment(const Tensor& tensor, const TensorSpec& spec) {
  const std::size_t wanted = spec.fit == Fit::rows ? kRowAlignment : dtype_bytes(tensor.type);
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(tensor.data) % wanted == 0, spec.name,
             ": data is at ", static_cast<const void*>(tensor.data), ", expected a ", wanted,
             "-byte aligned address");
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
}

}  // namespace

DType read_element_type(const DLTensor& tensor, const TensorSpec& spec) {
  require_device(tensor, spec);
  require_shape(tensor, spec);
  const auto type = dtype_of(tensor.dtype);
  XD_REQUIRE(type && std::ranges::find(spec.types, *type) != spec.types.end(), spec.name, ": is ",
             describe_dtype(tensor.dtype), ", expected ", names(spec.types));
  return *type;
}

Tensor read_tensor(const DLTensor* user, const TensorSpec& spec) {
  if (user == nullptr) {
    XD_REQUIRE(spec.optional, spec.name, " = NULL, expected a tensor");
    return Tensor{.name = spec.name};
  }
  const DType type = read_element_type(*user, spec);
  Tensor tensor{.name = spec.name,
                .data = static_cast<std::byte*>(user->data),
                .type = type,
                .rows = user->shape[0],
                .cols = user->ndim > 1 ? user->shape[1] : 1,
                .given = true};
  checked_mul(static_cast<std::uint64_t>(tensor.rows), tensor.row_bytes(), spec.name);
  read_strides(*user, tensor);
  require_strides(tensor, spec);
  if (tensor.bytes() > 0 && !spec.shape_only) {
    XD_REQUIRE(tensor.data != nullptr, spec.name, ".data = NULL, expected ", tensor.bytes(),
               " bytes");
    tensor.data += user->byte_offset;
    require_alignment(tensor, spec);
  }
  return tensor;
}

void require_rows(const Tensor& tensor, std::int64_t rows, const char* what, const char* of) {
  XD_REQUIRE(tensor.rows == rows, tensor.name, ": has ", tensor.rows, " rows, expected ", rows,
             " (", what, of, ")");
}

void require_cols(const Tensor& tensor, std::int64_t cols, const char* what, const char* of) {
  XD_REQUIRE(tensor.cols == cols, tensor.name, ": has ", tensor.cols, " columns, expected ", cols,
             " (", what, of, ")");
}

void require_same_type(const Tensor& tensor, const Tensor& other) {
  XD_REQUIRE(tensor.type == other.type, tensor.name, ": is ", dtype_name(tensor.type),
             ", expected ", dtype_name(other.type), ", as ", other.name);
}

void require_together(const Tensor& a, const Tensor& b) {
  XD_REQUIRE(a.given == b.given, a.name, " and ", b.name, " go together: ", (a ? a : b).name,
             " is given and ", (a ? b : a).name, " is NULL");
}

void require_apart(const Tensor& written, const Tensor& other) {
  const auto begin = [](const Tensor::Extent& e) {
    return reinterpret_cast<std::uintptr_t>(e.first);
  };
  const Tensor::Extent a = written.extent(), b = other.extent();
  if (a.bytes == 0 || b.bytes == 0) return;
  XD_REQUIRE(begin(a) + a.bytes <= begin(b) || begin(b) + b.bytes <= begin(a), written.name,
             ": lies at ", static_cast<const void*>(a.first), ", ", a.bytes,
             " bytes that it shares with ", other.name, " at ", static_cast<const void*>(b.first),
             ", expected memory of its own");
}

}  // namespace xd
