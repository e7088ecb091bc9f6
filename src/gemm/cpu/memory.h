// The memory of a context on the CPU: what a rank shares, and what it keeps to itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/layout.h"
#include "base/math.h"
#include "gemm/calls.h"
#include "gemm/config.h"
#include "gemm/family.h"
#include "turn/entry.h"

namespace xd::gemm::cpu {

// A product is computed tile by tile. An operand that is not float32, or has scales, is widened
// into a panel first. Tiles begin anew with every rank's rows, but in SEQUENTIAL.
inline constexpr std::int64_t kTileRows = 256, kTileColumns = 1024, kTileDepth = 1024;
static_assert(kTileDepth % kScaleBlock == 0);

// Byte offsets inside the memory that a rank shares.
//
//   area of rank r  written by        means
//   entry, done     src, once per op  the turns: see turn/entry.h
//   ready[src]      src, once per op  src's terms of r's sums are there (`partials`)
//   summed[src]     src, once per op  src's column sums are in its own `sums`
//   rows            r                 rows that peers gather, where they lie outside symmetric
//                                     memory
//   scales          r                 the scales of its rows
//   sums            r                 column sums of its rows
//   partials        r                 its terms of the sums of all ranks, by row of M; or rows that
//                                     bulk reduces, where they lie outside symmetric memory
//
// Nothing is ever cleared: `ready` and `summed` hold the epoch they belong to, and all else is
// written again only behind the done flags of the operation before. Their writer stores what it
// announces, then the word with release; a reader loads the word with acquire, then reads.
struct Map {
  turn::TurnMap turn;
  std::uint64_t ready, summed, rows, scales, sums, partials, end;

  static Map make(const Config& config);
};

// A word that one rank writes and another waits for.
inline constexpr std::uint64_t kWordBytes = 64;

// The memory in which products are computed: kTileRows lines and kTileColumns lines of kTileDepth
// numbers, and kTileRows rows of kTileColumns.
struct Panels {
  float *a, *b, *tile;
};

// This rank's working memory.
class Scratch {
 public:
  explicit Scratch(const Config& config);
  static std::uint64_t bytes(const Config& config);

  float* a_panel() const { return at_offset<float>(layout_.a_panel); }
  float* b_panel() const { return at_offset<float>(layout_.b_panel); }
  float* tile() const { return at_offset<float>(layout_.tile); }
  Panels panels() const { return {a_panel(), b_panel(), tile()}; }
  // Numbers of one row of a tile, and of a second one.
  float* line() const { return at_offset<float>(layout_.line); }
  float* other_line() const { return line() + kLineFloats; }
  // all_gather: rows of all ranks.
  std::byte* gathered() const { return at_offset<std::byte>(layout_.gathered); }
  // all_gather: scales of those rows, one per row or per 128 elements of it.
  float* gathered_scales() const { return at_offset<float>(layout_.gathered_scales); }
  // all_gather: column sums over the rows of each rank, N numbers for each.
  float* column_sums() const { return at_offset<float>(layout_.column_sums); }
  std::span<std::int64_t> starts() const {
    return {at_offset<std::int64_t>(layout_.starts), at(ranks_) + 1};
  }

  static constexpr std::int64_t kLineFloats = kTileColumns > kTileRows ? kTileColumns : kTileRows;

 private:
  struct Layout {
    std::uint64_t a_panel, b_panel, tile, line, gathered, gathered_scales, column_sums, starts, end;
    static Layout make(const Config& config);
  };
  template <class T>
  T* at_offset(std::uint64_t offset) const {
    return reinterpret_cast<T*>(memory_.get() + offset);
  }
  struct Free {
    void operator()(std::byte* memory) const;
  };

  const Layout layout_;
  const int ranks_;
  const std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace xd::gemm::cpu
