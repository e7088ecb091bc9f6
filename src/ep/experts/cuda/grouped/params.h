// The kernels of grouped products as the host starts them. They run on compute capability 9.0, and
// on no other.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace xd::ep::cuda {

// How an operand lies in memory: the elements of a line, along which sums run, are packed; or the
// lines are, with an element of each line side by side.
enum class Lie { lines, across };

// A kernel, by what its code depends on. `outer`: a and b lie across, and sums run over the rows of
// a zone; else a lies in lines, and sums run over K.
struct GroupedKind {
  DType type = DType::bf16;  // of a and b: bf16, f16 or e4m3
  bool outer = false;
  Lie b = Lie::lines;
  int tile_rows = 128;        // 64 or 128
  bool block_scales = false;  // of e4m3: of 128 elements, else of rows and columns

  // The columns of a tile, and of it each warpgroup's. Sums of e4m3 are promoted, which takes two
  // more sets of registers. Outer products of few rows are as fast as their results are stored,
  // so small tiles leave room for another block, which multiplies meanwhile.
  constexpr int warpgroup_columns() const {
    return type == DType::e4m3 || tile_rows == 64 || outer ? 128 : 256;
  }
  constexpr int tile_columns() const {
    return tile_rows == 64 ? 2 * warpgroup_columns() : warpgroup_columns();
  }
  constexpr Lie a() const { return outer ? Lie::across : Lie::lines; }
  // Elements of a line that a stage holds: 128 bytes.
  constexpr int depth() const { return type == DType::e4m3 ? 128 : 64; }
};

// A stage holds 128 bytes of each line of a tile's operands.
inline constexpr int kLineBytes = 128;

struct GroupedParams {
  // Operands, with boxes of 128 bytes of tile_rows or tile_columns lines (Lie::lines), or of 64
  // elements of 64 lines (Lie::across).
  CUtensorMap a, b;
  const void* offsets;  // [L+1]
  bool wide_offsets;    // int64
  std::int32_t first_expert, num_experts;
  std::int32_t rows;  // of all zones' tensor
  std::int32_t k;     // the length of sums; if outer, the rows of d's matrices
  std::int32_t n;     // columns of d
  std::byte* d;
  DType d_type;
  bool accumulate;
  std::int64_t d_row_stride, d_stride;  // in elements; the latter between matrices, if outer
  const float* a_scale;                 // [R], [L,N]: of e4m3 alone
  const float* b_scale;
  // Of scales of blocks, [R,K/128] and [L,N/128,K/128], in elements.
  std::int64_t a_scale_stride, b_scale_stride, b_scale_row_stride;
};
static_assert(sizeof(GroupedParams) <= 4096);  // the limit of every device

void launch_grouped(const GroupedKind& kind, const GroupedParams& params, int blocks,
                    cudaStream_t stream);
// Loads all kernels on the current device.
void load_grouped_kernels();

}  // namespace xd::ep::cuda
