// Tensors [L,S,columns] of low latency after their checks: a row for each slot of each local
// expert. Tensors [N,columns] of groups that receive without gaps are such tensors of one expert
// with N slots, so a row's number is its place there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/tensor.h"

namespace xd::ep {

struct SlotTensor {
  const char* name = "";
  std::byte* data = nullptr;
  DType type = DType::u8;
  std::int64_t experts = 0, slots = 0, cols = 0;
  bool given = false;
  std::int64_t expert_stride = 0, slot_stride = 0, col_stride = 1;  // in elements

  explicit operator bool() const { return given; }
  std::uint64_t row_bytes() const { return static_cast<std::uint64_t>(cols) * dtype_bytes(type); }
  std::uint64_t bytes() const {
    return static_cast<std::uint64_t>(experts) * static_cast<std::uint64_t>(slots) * row_bytes();
  }
  // The first element of a row.
  std::byte* row(std::int64_t expert, std::int64_t slot) const {
    return data + (expert * expert_stride + slot * slot_stride) *
                      static_cast<std::int64_t>(dtype_bytes(type));
  }
  bool row_is_contiguous() const { return cols <= 1 || col_stride == 1; }
};

// The ways in which the rows of a SlotTensor may lie.
enum class SlotFit {
  rows_in,   // contiguous rows that begin at multiples of 16 bytes
  rows_out,  // likewise, and no two rows share memory
  elements,  // an output: each element aligned to its size, and no two elements in one place
};

// Reads a tensor; `given` is false for an optional one that is NULL. spec.ndim is 3 or 2, and
// spec.fit is not looked at. Throws INVALID_ARGUMENT with name, expected and got.
SlotTensor read_slot_tensor(const DLTensor* tensor, const TensorSpec& spec, SlotFit fit);

// Throw INVALID_ARGUMENT unless the tensor is of that type, and has so many columns (`what`).
void require_type(const SlotTensor& tensor, DType type);
void require_columns(const SlotTensor& tensor, std::uint64_t columns, const char* what);

}  // namespace xd::ep
