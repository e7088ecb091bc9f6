// Grouped products: the sizes that a kernel's code depends on, and the tile that a block computes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ep/experts/cuda/grouped/params.h"

namespace xd::ep::cuda {

inline constexpr int kConsumers = 256;
inline constexpr int kMostStages = 6;
inline constexpr int kChunkBytes = 64 * kLineBytes;  // Lie::across: 64 lines

template <DType kType, bool kOuter, Lie kB, int kTileRows, bool kBlockScales>
struct Shape {
  static constexpr GroupedKind kKind{kType, kOuter, kB, kTileRows, kBlockScales};
  static constexpr bool kPromotes = kType == DType::e4m3;
  static constexpr int kColumns = kKind.warpgroup_columns();
  static_assert(!kBlockScales || (kKind.depth() == 128 && kColumns == 128));
  static constexpr int kSums = kColumns / 2;  // of a thread
  static constexpr int kABytes = kTileRows * kLineBytes;
  static constexpr int kBBytes = kKind.tile_columns() * kLineBytes;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kBlocks = kOuter ? 2 : 1;  // of a multiprocessor
  static constexpr int kStages = 200 * 1024 / kBlocks / kStageBytes;
  static_assert(kStages >= 3 && kStages <= kMostStages);
  static constexpr int kThreads = kConsumers + (kPromotes ? 128 : 32);
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;  // to align the first one
};

struct Tile {
  std::int32_t expert;
  std::int32_t row, rows;     // of d: of the tensor, or if outer of the expert's matrix
  std::int32_t column;        // of d
  std::int32_t first, depth;  // the sum's first element (if outer, a row of the tensor), and length
};

struct Shared {
  std::uint64_t full[kMostStages], empty[kMostStages];
  Tile tile;
};

struct Zone {
  std::int32_t first, end;
};

// Offsets of a plan that overflows go on behind the tensor.
__device__ inline Zone zone_of(const GroupedParams& p, int expert) {
  const auto bound = [&](int i) {
    const std::int64_t offset = p.wide_offsets ? static_cast<const std::int64_t*>(p.offsets)[i]
                                               : static_cast<const std::int32_t*>(p.offsets)[i];
    return static_cast<std::int32_t>(min(max(offset, std::int64_t{0}), std::int64_t{p.rows}));
  };
  const std::int32_t first = bound(expert);
  return {first, max(first, bound(expert + 1))};
}

__device__ inline int tiles_of(int extent, int of_tile) { return (extent + of_tile - 1) / of_tile; }

// A warp looks for the block's tile; a tile without rows is none. All lanes.
template <class S>
__device__ void find_tile(const GroupedParams& p, Tile& tile) {
  constexpr int kRows = S::kKind.tile_rows, kColumns = S::kKind.tile_columns();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int wide = tiles_of(p.n, kColumns);
  int left = static_cast<int>(blockIdx.x);  // tiles from the first of these experts to this block's
  if (lane == 0) tile.rows = 0;
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i - lane < p.num_experts; i += 32) {
    const bool there = i < p.num_experts;
    const Zone zone = there ? zone_of(p, p.first_expert + i) : Zone{0, 0};
    const int high = S::kKind.outer ? (there ? tiles_of(p.k, kRows) : 0)
                                    : tiles_of(zone.end - zone.first, kRows);
    int behind = high * wide;  // tiles up to the end of this lane's expert
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, behind, step);
      if (lane >= step) behind += other;
    }
    const int before = behind - high * wide;
    if (before <= left && left < behind) {
      const int at = left - before;
      const int row = at % high * kRows;
      tile.expert = p.first_expert + i;
      tile.column = at / high * kColumns;
      if (S::kKind.outer) {
        tile.row = row;
        tile.rows = min(kRows, p.k - row);
        tile.first = zone.first;
        tile.depth = zone.end - zone.first;
      } else {
        tile.row = zone.first + row;
        tile.rows = min(kRows, zone.end - tile.row);
        tile.first = 0;
        tile.depth = p.k;
      }
    }
    const int all = __shfl_sync(0xFFFFFFFFu, behind, 31);
    if (left < all) return;
    left -= all;
  }
}

}  // namespace xd::ep::cuda
