// The parameters of a context's kernels: plain data, passed by value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/layout.h"
#include "base/math.h"
#include "gemm/config.h"
#include "gemm/family.h"
#include "turn/device/group.h"

namespace xd::gemm::cuda {

// Working state of a context: see turn::DeviceControl. An operation here may be several launches on
// two streams, which share a launch number; the first opens the turn, and the last closes it.
struct Control : turn::DeviceControl {
  // Of the operation that was opened last. Copies take it to peers as a flag, and launches on
  // another stream than the one that closes the turn read it, since `epoch` may have moved on.
  std::uint64_t opened;
  std::uint32_t agreed;  // 1 = all ranks agree about that operation, so flags will come
  std::uint32_t unused;
};

struct Findings {};
using Report = turn::DeviceReport<Record, Findings>;

// The memory that a rank shares with its peers: byte offsets, equal on all ranks.
struct ContextMap {
  turn::TurnMap turn;
  std::uint64_t landed;  // [W] words, 64 bytes apart: the epoch whose rows of a source have landed
  std::uint64_t summed;  // [W] likewise: the epoch whose partial sums of a source have landed
  std::uint64_t spread;  // [W] likewise: the epoch whose float32 sums of a source have all landed
  std::uint64_t gathered;  // rows of all ranks, in rank order
  // Of the gathered rows: those of one row after the other, or one per rank, kScaleStride apart.
  std::uint64_t scales;
  std::uint64_t sums;     // all_reduce: finished rows of all ranks
  std::uint64_t cells;    // [W] partial sums of each source for rows of this rank
  std::uint64_t words;    // [2 parities][steps][W] rows, partial sums and sums that arrive as words
  std::uint64_t columns;  // [2 parities][W] column sums that arrive as words
  std::uint64_t cell_bytes, sum_bytes, word_bytes, column_bytes;  // of one source
  std::uint64_t word_steps;                                       // 2 where sums go to all ranks
  std::uint64_t end;
  bool copies_all;  // all_reduce by copies has a place

  // Words are for small tensors: for longer ones other ways are faster.
  static constexpr std::uint64_t kMostWordBytes = std::uint64_t{8} << 20;
  static constexpr std::uint64_t kMostGatherWordBytes = std::uint64_t{256} << 10;
  static constexpr std::uint64_t kFlagStride = 64;
  static constexpr std::uint64_t kScaleStride = 16;  // cuBLASLt's alignment of scales

  // `separate_cells`: they are memory of their own (peer_mapped_cells.h).
  static ContextMap make(const Config& config, bool separate_cells) {
    const auto ranks = static_cast<std::uint64_t>(config.ranks);
    const auto tokens = static_cast<std::uint64_t>(config.max_tokens);
    LayoutCursor cursor;
    ContextMap map{};
    map.turn = turn::TurnMap::add<Record>(cursor, config.ranks);
    map.landed = cursor.add<std::byte>(ranks * kFlagStride, kFlagStride);
    map.summed = cursor.add<std::byte>(ranks * kFlagStride, kFlagStride);
    map.spread = cursor.add<std::byte>(ranks * kFlagStride, kFlagStride);
    map.word_steps = config.has(XD_GEMM_ALL_REDUCE) ? 2 : 1;
    if (config.gathers()) {
      const auto row = static_cast<std::uint64_t>(config.max_k) * config.gathered_bytes();
      map.gathered = cursor.add<std::byte>(ranks * tokens * row, kRowStart);
      const auto row_scales = static_cast<std::uint64_t>(scale_blocks(config.max_k));
      if (config.has(XD_GEMM_ALL_GATHER)) {
        map.word_bytes = std::min(round_up(tokens * row, kRowStart), kMostGatherWordBytes);
      }
      map.scales = cursor.add<std::byte>(
          ranks * std::max<std::uint64_t>(tokens * row_scales * sizeof(float), kScaleStride),
          kRowStart);
    }
    if (config.sums()) {
      const auto row = static_cast<std::uint64_t>(config.max_n) * config.summed_bytes();
      map.cell_bytes = round_up(tokens * row, kRowStart);
      if (!separate_cells) map.cells = cursor.add<std::byte>(ranks * map.cell_bytes, kRowStart);
      // In one step of all_reduce a rank sends all its rows to everybody.
      const auto most = config.has(XD_GEMM_ALL_REDUCE) ? ranks * map.cell_bytes : map.cell_bytes;
      map.word_bytes = std::max(map.word_bytes, std::min(most, kMostWordBytes));
      // Where words have room for all there is, copies are not needed.
      map.copies_all = config.has(XD_GEMM_ALL_REDUCE) && most > kMostWordBytes;
      // Finished rows of all ranks; or of each rank the first half of the float32 sums of its rows,
      // whose second half has room in a cell.
      const auto half = exact_rows_in_sums(config.max_tokens) * config.max_n * 4;
      map.sum_bytes =
          std::max(map.cell_bytes, round_up(static_cast<std::uint64_t>(half), kRowStart));
      if (map.copies_all) map.sums = cursor.add<std::byte>(ranks * map.sum_bytes, kRowStart);
    }
    map.words = cursor.add<std::byte>(2 * map.word_steps * ranks * map.word_bytes, kRowStart);
    const auto columns = static_cast<std::uint64_t>(config.max_n) * sizeof(float);
    map.column_bytes = round_up(columns, kRowStart);
    map.columns = cursor.add<std::byte>(2 * ranks * map.column_bytes, kRowStart);
    map.end = cursor.at;
    return map;
  }

  // The words that `source` has pushed in a step (below word_steps) of an operation.
  constexpr std::uint64_t words_of(std::uint64_t epoch, int step, int source, int ranks) const {
    const std::uint64_t area = epoch % 2 * word_steps + static_cast<std::uint64_t>(step);
    return words + (area * static_cast<std::uint64_t>(ranks) + static_cast<std::uint64_t>(source)) *
                       word_bytes;
  }
  constexpr std::uint64_t columns_of(std::uint64_t epoch, int source, int ranks) const {
    return columns +
           (epoch % 2 * static_cast<std::uint64_t>(ranks) + static_cast<std::uint64_t>(source)) *
               column_bytes;
  }
  constexpr std::uint64_t cell_of(int source) const {
    return cells + static_cast<std::uint64_t>(source) * cell_bytes;
  }
  // all_reduce: where the float32 sums of a rank's first rows are, and how many of its rows these
  // are.
  constexpr std::uint64_t exact_sums_of(int source) const {
    return sums + static_cast<std::uint64_t>(source) * sum_bytes;
  }
  static constexpr std::int64_t exact_rows_in_sums(std::int64_t rows) { return (rows + 1) / 2; }
  // Of the flags that begin at an offset.
  static constexpr std::uint64_t flag_of(std::uint64_t flags, int source) {
    return flags + static_cast<std::uint64_t>(source) * kFlagStride;
  }

 private:
  static constexpr std::uint64_t kRowStart = 1024;
};

using Group = turn::DeviceGroup<Control, Report, ContextMap>;
using TurnParams = turn::DeviceTurnParams<Group, Record>;

// The steps of a float32 sum before it is stored. Products have applied alpha.
struct Epilogue {
  float beta;
  const std::byte* c;     // nullptr = none
  const std::byte* bias;  // nullptr = none
  xd_gemm_epilogue activation;
  std::byte* pre_activation;  // nullptr = none; read by DGELU and DRELU, written by the others
  std::byte* d;
  const float* d_scale;  // nullptr = 1
  float* d_amax;         // nullptr = not wanted; 0 before the launch
  float* exact;          // nullptr = not wanted; d before d_scale and rounding
  DType c_type, bias_type, pre_type, d_type;
};

// The epilogue of a sum that is rounded and stored, and nothing else.
inline Epilogue rounding_to(DType type, std::byte* d) {
  Epilogue epilogue{};
  epilogue.activation = XD_GEMM_EPILOGUE_NONE;
  epilogue.d = d;
  epilogue.d_type = type;
  return epilogue;
}

// Sums the partial products of all ranks for the rows of this one.
struct SumParams {
  TurnParams turn;
  // The partial sums of source s begin at partials + s * stride; rows are `pitch` elements apart.
  const std::byte* partials;
  std::uint64_t stride;
  std::int64_t rows, columns, pitch;
  Epilogue epilogue;
  // Ranks store them by other addresses. Only launches that wait for the ranks themselves mind.
  bool aliased = false;
};

// Pushes partial sums as words, sums, and in all_reduce pushes the sums.
struct InlineFlagParams {
  TurnParams turn;
  const std::byte* product;  // [M,N] of this rank, packed
  // The part of each rank in vectors of 16 bytes of the product: the first one, and behind the last
  // rank's their number. In reduce_scatter a rank's rows, in all_reduce equal parts.
  std::int64_t starts[kMaxDeviceRanks + 1];
  std::int64_t row_vectors;  // of a row
  bool gathers;              // all_reduce: sums go to everybody
  bool one_step;             // all_reduce: the products go to everybody
  bool dependent;            // the launch may begin while the product before it still runs
  Epilogue epilogue;
};

// Pushes this rank's rows as words, and takes those of all ranks into the gathered rows.
struct GatherInlineParams {
  TurnParams turn;
  const std::byte* rows;
  // The rows of each rank among the gathered ones in vectors of 16 bytes: the first one, and behind
  // the last rank's their number.
  std::int64_t starts[kMaxDeviceRanks + 1];
};

// Pushes this rank's rows into the gathered rows of all ranks.
struct PushParams {
  TurnParams turn;
  const std::byte* rows;
  std::uint64_t bytes;   // of this rank's rows, a multiple of 16
  std::uint64_t offset;  // of them in the gathered rows
};

// Waits until what sources have copied has landed.
struct LandedParams {
  Group group;
  std::int32_t operation;
  std::uint64_t flags;  // ContextMap::landed or summed
  int first, count;     // sources first, first + 1, .. modulo the number of ranks
};

// Applies an epilogue to a float32 product of this rank alone.
struct FinishParams {
  const float* product;
  std::int64_t rows, columns;
  Epilogue epilogue;
};

// Lays scales per 128 columns out as cuBLASLt takes them: see block_scales.h.
struct BlockScalesParams {
  const float* a;  // [rows, blocks]; nullptr = all are 1
  float* whole;    // [blocks][whole_rows]: of the first rows
  float* rest;     // [blocks][rest_pitch]: of the other rows, behind which there is room
  const float* b;  // [b_rows, blocks]; nullptr = all are 1
  float* b_to;     // [b_rows][b_pitch], with 1 behind each row; nullptr = not wanted
  std::int64_t rows, blocks, whole_rows, rest_pitch, b_rows, b_pitch;

  // Where a scale of `a` goes.
  constexpr float* place_of(std::int64_t row, std::int64_t block) const {
    return row < whole_rows ? whole + block * whole_rows + row
                            : rest + block * rest_pitch + (row - whole_rows);
  }
};

// Column sums of an epilogue's exact results.
struct ColumnSumParams {
  const float* values;  // [rows, columns]
  std::int64_t rows, columns;
  float* sums;  // [columns]
  bool adds;    // to what is in `sums`
};

// Adds column sums of all ranks.
struct ColumnMeetingParams {
  Group group;
  std::int32_t operation;
  const float* own;      // [columns], at a multiple of 16 bytes
  std::int64_t columns;  // a multiple of 4
  float* sums;           // [columns]
};

}  // namespace xd::gemm::cuda
