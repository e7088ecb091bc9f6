// A tensor of a call: a DLTensor after its checks.
#pragma once

#include <dlpack/dlpack.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace xd {

// Rows that are copied in bulk begin at multiples of so many bytes.
inline constexpr std::uint64_t kRowAlignment = 16;

struct Tensor {
  const char* name = "";
  std::byte* data = nullptr;
  DType type = DType::u8;
  std::int64_t rows = 0;
  std::int64_t cols = 0;  // 1 for a one-dimensional tensor
  bool given = false;
  std::int64_t row_stride = 0, col_stride = 1;  // in elements

  explicit operator bool() const { return given; }
  // True if rows follow one another, and so do their elements.
  bool packed() const {
    return (rows <= 1 || row_stride == cols) && (cols <= 1 || col_stride == 1);
  }
  // Bytes of a row and of all rows, packed.
  std::uint64_t row_bytes() const { return static_cast<std::uint64_t>(cols) * dtype_bytes(type); }
  std::uint64_t bytes() const { return static_cast<std::uint64_t>(rows) * row_bytes(); }
  // The memory from its first element to the end of its last, for any strides.
  struct Extent {
    const std::byte* first;
    std::uint64_t bytes;
  };
  Extent extent() const {
    if (bytes() == 0) return {data, 0};
    const auto element = static_cast<std::int64_t>(dtype_bytes(type));
    const std::int64_t down = (rows - 1) * row_stride * element;
    const std::int64_t along = (cols - 1) * col_stride * element;
    const std::int64_t lowest = std::min<std::int64_t>(down, 0) + std::min<std::int64_t>(along, 0);
    const std::int64_t highest = std::max<std::int64_t>(down, 0) + std::max<std::int64_t>(along, 0);
    return {data + lowest, static_cast<std::uint64_t>(highest - lowest + element)};
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

// The ways in which the elements of a tensor may lie.
enum class Fit {
  rows,      // packed, and aligned for copies in bulk
  elements,  // packed, each element aligned to its size
  input,     // each element aligned to its size, any strides
  output,    // likewise, and no two elements in one place
};

// The properties that a tensor argument must have; any other tensor is INVALID_ARGUMENT with name,
// expected and got.
struct TensorSpec {
  const char* name;
  int ndim;
  std::span<const DType> types;
  DLDevice device;  // the communicator's
  Fit fit = Fit::elements;
  bool optional = false;
  bool pinned_host = false;  // may lie in pinned host memory instead
  bool shape_only = false;   // the elements are not looked at: data may be NULL
};

// Checks device, number and size of dimensions, and type, for tensors of any number of dimensions.
// Returns the type.
DType read_element_type(const DLTensor& tensor, const TensorSpec& spec);

// Reads a tensor of up to two dimensions; `given` is false for an optional one that is NULL.
Tensor read_tensor(const DLTensor* tensor, const TensorSpec& spec);

// Checks a dimension: `what`, followed by `of`, says what it must equal. The text is made only if
// the check fails, as operations allocate nothing unless they fail.
void require_rows(const Tensor& tensor, std::int64_t rows, const char* what, const char* of = "");
void require_cols(const Tensor& tensor, std::int64_t cols, const char* what, const char* of = "");
void require_same_type(const Tensor& tensor, const Tensor& other);
// Checks two optional tensors of which one makes no sense without the other.
void require_together(const Tensor& a, const Tensor& b);
// Checks that a tensor that is written shares no memory with another one.
void require_apart(const Tensor& written, const Tensor& other);

}  // namespace xd
