// Products of one rank, tile by tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "gemm/calls.h"
#include "gemm/cpu/memory.h"

namespace xd::gemm::cpu {

// An operand as lines of K elements: rows of tokens of a, columns of b.
struct Operand {
  const std::byte* data = nullptr;
  DType type = DType::f32;
  // True: stored line by line, each of K elements. False: stored as K rows, with an element of each
  // line in every row.
  bool by_lines = true;
  std::int64_t stride = 0;  // elements from one stored row to the next
  const float* scales = nullptr;
  Scaling scaling = Scaling::none;
  std::int64_t scale_columns = 1;    // blocks: along K
  std::int64_t lines_per_scale = 1;  // blocks: 1 for a, 128 for b

  // The scale of K block `block` of a line.
  float scale_of(std::int64_t line, std::int64_t block) const {
    if (scaling == Scaling::tensor) return scales[0];
    if (scaling == Scaling::rows) return scales[line];
    return scales[line / lines_per_scale * scale_columns + block];
  }
};

// The operands of a call. `a_rows`: rows of a that are stored at `a`, whose scales are `a_scales`.
Operand operand_a(const ProductCall& call, const std::byte* a, std::int64_t stored_rows,
                  const float* a_scales);
Operand operand_b(const ProductCall& call);

// Where a product's float32 results go if nothing else is done with them: the address of its first
// row. Without one, each tile goes into scratch memory.
struct Results {
  float* values = nullptr;
  std::int64_t stride = kTileColumns;
};

// A part of the product: row r of it lies at values + r * stride.
struct Tile {
  float* values;
  std::int64_t stride;
  std::int64_t row, rows;  // of a
  std::int64_t column, columns;
};

class Multiplier {
 public:
  explicit Multiplier(const Panels& panels) : panels_(panels) {}

  // Forgets what it has widened: operands may have changed.
  void begin() { held_a_ = held_b_ = {}; }

  // Calls use(tile) for the tiles of `rows` rows of a times b.
  template <class Use>
  void product(const Operand& a, std::int64_t rows, const Operand& b, std::int64_t k,
               std::int64_t n, const Results& results, Use&& use) {
    // A product that is neither widened nor finished is computed at once.
    const bool whole = results.values != nullptr && in_place(a);
    const std::int64_t most_rows = whole ? rows : kTileRows;
    const std::int64_t most_columns = whole ? n : kTileColumns;
    for (std::int64_t j = 0; j < n; j += most_columns) {
      for (std::int64_t i = 0; i < rows; i += most_rows) {
        float* const stored = results.values;
        const Tile tile{.values = stored ? stored + i * results.stride + j : panels_.tile,
                        .stride = results.stride,
                        .row = i,
                        .rows = std::min(most_rows, rows - i),
                        .column = j,
                        .columns = std::min(most_columns, n - j)};
        compute(a, b, k, tile);
        use(tile);
      }
    }
  }

 private:
  // A piece of an operand in float32: the address and row length to multiply with.
  struct Panel {
    const float* data;
    std::int64_t stride;
  };
  struct Piece {
    const Operand* operand = nullptr;
    const std::byte* data = nullptr;
    std::int64_t line = 0, lines = 0, begin = 0, depth = 0;
    bool operator==(const Piece&) const = default;
  };

  // Whether operands like this one are multiplied where they lie.
  static bool in_place(const Operand& operand);
  void compute(const Operand& a, const Operand& b, std::int64_t k, const Tile& tile);
  static void compute_bf16(const Operand& a, const Operand& b, std::int64_t k, const Tile& tile);
  static Panel panel(const Piece& piece, float* buffer, Piece& held);

  const Panels panels_;
  Piece held_a_{}, held_b_{};
};

}  // namespace xd::gemm::cpu
