// Products of experts' rows with a matrix for each expert (xd_grouped_*): the arguments.
#pragma once

#include <crossdock/grouped.h>

#include "base/tensor.h"

namespace xd::ep {

// Matrices of equal shape. Strides are in elements and not negative, and one of those inside a
// matrix is 1.
struct Matrices {
  const char* name = "";
  std::byte* data = nullptr;
  DType type = DType::u8;
  std::int64_t count = 0, rows = 0, cols = 0;
  std::int64_t stride = 0, row_stride = 0, col_stride = 1;

  // True if the elements of a row follow one another, not those of a column.
  bool by_rows() const { return col_stride == 1; }
  // From one row, or column if these are packed, to the next.
  std::int64_t line_stride() const { return by_rows() ? row_stride : col_stride; }
  // All elements from the first to the last, as of one dimension.
  Tensor memory() const;
  // The same elements, with rows in the place of columns.
  Matrices transposed() const;
};

// Reads [L,K,N] of a caller. Throws INVALID_ARGUMENT.
Matrices read_matrices(const DLTensor* user, const TensorSpec& spec);

// The arguments that both calls have.
struct GroupedCall {
  Tensor a, offsets;
  std::int32_t first_expert = 0, num_experts = 0;  // the range
  bool accumulate = false;
  int near_ranks = 1;  // ranks of this machine, which share its cores
};

struct GroupedProductCall : GroupedCall {
  Matrices b;
  // Of fp8: scales of rows and columns [R] and [L,N], or of blocks [R,K/128] and [L,N/128,K/128].
  Tensor a_scale, b_scale;
  Matrices b_blocks;
  Tensor d;

  bool has_blocks() const { return b_blocks.count > 0; }

  std::int64_t k() const { return b.rows; }
  std::int64_t n() const { return b.cols; }
};

struct GroupedOuterCall : GroupedCall {
  Tensor b;
  Matrices d;
};

// Each throws INVALID_ARGUMENT.
GroupedProductCall read_grouped(const xd_grouped_product_args* args, DLDevice device);
GroupedOuterCall read_grouped(const xd_grouped_outer_args* args, DLDevice device);

}  // namespace xd::ep
