// Products with scales per 128 columns, as cuBLASLt takes them. Pure.
//
//   scales     as callers give them          as cuBLASLt takes them
//   of a       [rows, blocks of K]           [blocks of K][rows]
//   of b       [blocks of N, blocks of K]    the same, rows a multiple of four floats apart
//
// Rows are multiples of 16 to it. Rows of a behind the last multiple are a product of their own,
// whose 16 rows of a and of D lie in memory of the context: the rows that are missing there mean
// nothing, and are left behind.
#pragma once

#include <cstdint>

#include "cuda/cublaslt.h"

namespace xd::gemm::cuda {

// The working memory of one product: byte offsets. More rows, columns or depth need no less of it.
struct BlockScaleMap {
  std::int64_t whole_rows, rest_rows;  // of a: the multiple of 16, and the others
  std::int64_t blocks;                 // of K
  std::int64_t b_rows, b_pitch;        // of b's scales; floats from row to row
  std::uint64_t whole_scales, rest_scales, b_scales;
  std::uint64_t rest_a, rest_d;  // rows of the product of the rest
  std::uint64_t end;

  static BlockScaleMap make(std::int64_t rows, std::int64_t n, std::int64_t k);
};

// The two products that one is computed by; one of no rows is none.
xd::cuda::ProductShape whole_of(const xd::cuda::ProductShape& shape);
xd::cuda::ProductShape rest_of(const xd::cuda::ProductShape& shape);

}  // namespace xd::gemm::cuda
