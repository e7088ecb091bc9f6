#include "gemm/cpu/multiply.h"

#include <algorithm>
#include <array>

#include "gemm/cpu/elements.h"
#include "gemm/cpu/onednn.h"

namespace xd::gemm::cpu {
namespace {

const std::byte* address(const Operand& operand, std::int64_t row, std::int64_t column) {
  return operand.data + at(row * operand.stride + column) * dtype_bytes(operand.type);
}

// The line is stored as a row: elements [begin, begin + depth) of it.
void widen_line(const Operand& from, std::int64_t line, std::int64_t begin, std::int64_t depth,
                float* out) {
  widen(from.type, out, address(from, line, begin), at(depth));
  if (from.scales == nullptr) return;
  for (std::int64_t k = 0; k < depth; k += kScaleBlock) {
    scale(out + k, from.scale_of(line, (begin + k) / kScaleBlock),
          at(std::min(kScaleBlock, depth - k)));
  }
}

// Elements of lines [line, line + lines) that are stored as rows of K.
void widen_across(const Operand& from, std::int64_t line, std::int64_t lines, std::int64_t begin,
                  std::int64_t depth, float* out) {
  std::array<float, std::max(kTileRows, kTileColumns)> factors;
  for (std::int64_t k = 0; k < depth; ++k, out += lines) {
    widen(from.type, out, address(from, begin + k, line), at(lines));
    if (from.scales == nullptr) continue;
    if (k % kScaleBlock == 0) {
      for (std::int64_t l = 0; l < lines; ++l) {
        factors[at(l)] = from.scale_of(line + l, (begin + k) / kScaleBlock);
      }
    }
    scale_by(out, factors.data(), at(lines));
  }
}

}  // namespace

Operand operand_a(const ProductCall& call, const std::byte* a, std::int64_t stored_rows,
                  const float* a_scales) {
  return {.data = a,
          .type = call.a.type,
          .by_lines = !call.transpose_a,
          .stride = call.transpose_a ? stored_rows : call.k,
          .scales = a_scales,
          .scaling = call.scaling,
          .scale_columns = scale_blocks(call.k),
          .lines_per_scale = 1};
}

Operand operand_b(const ProductCall& call) {
  return {.data = call.b.data,
          .type = call.b.type,
          .by_lines = call.transpose_b,
          .stride = call.b.cols,
          .scales = call.b_scale ? call.b_scale.as<float>() : nullptr,
          .scaling = call.scaling,
          .scale_columns = scale_blocks(call.k),
          .lines_per_scale = kScaleBlock};
}

Multiplier::Panel Multiplier::panel(const Piece& piece, float* buffer, Piece& held) {
  const Operand& from = *piece.operand;
  if (from.type == DType::f32) {  // and so without scales: multiplied where it lies
    const std::byte* first = from.by_lines ? address(from, piece.line, piece.begin)
                                           : address(from, piece.begin, piece.line);
    return {reinterpret_cast<const float*>(first), from.stride};
  }
  const std::int64_t stride = from.by_lines ? piece.depth : piece.lines;
  if (piece == held) return {buffer, stride};
  if (from.by_lines) {
    for (std::int64_t l = 0; l < piece.lines; ++l) {
      widen_line(from, piece.line + l, piece.begin, piece.depth, buffer + l * stride);
    }
  } else {
    widen_across(from, piece.line, piece.lines, piece.begin, piece.depth, buffer);
  }
  held = piece;
  return {buffer, stride};
}

void Multiplier::compute_bf16(const Operand& a, const Operand& b, std::int64_t k,
                              const Tile& tile) {
  const auto elements = [](const Operand& from, std::int64_t line) {
    return reinterpret_cast<const Bf16*>(from.by_lines ? address(from, line, 0)
                                                       : address(from, 0, line));
  };
  run(Bgemm{.transpose_a = a.by_lines ? 'N' : 'T',
            .transpose_b = b.by_lines ? 'T' : 'N',
            .m = tile.rows,
            .n = tile.columns,
            .k = k,
            .a = elements(a, tile.row),
            .lda = a.stride,
            .b = elements(b, tile.column),
            .ldb = b.stride,
            .beta = 0.0f,
            .c = tile.values,
            .ldc = tile.stride});
}

// Operands of float32 and bfloat16 have no scales.
bool Multiplier::in_place(const Operand& operand) {
  return operand.type == DType::f32 || (operand.type == DType::bf16 && multiplies_bf16());
}

void Multiplier::compute(const Operand& a, const Operand& b, std::int64_t k, const Tile& tile) {
  if (a.type == DType::bf16 && multiplies_bf16()) return compute_bf16(a, b, k, tile);
  const std::int64_t most = in_place(a) ? k : kTileDepth;
  for (std::int64_t begin = 0; begin < k; begin += most) {
    const std::int64_t depth = std::min(most, k - begin);
    const Piece piece_a{&a, a.data, tile.row, tile.rows, begin, depth};
    const Piece piece_b{&b, b.data, tile.column, tile.columns, begin, depth};
    const Panel rows = panel(piece_a, panels_.a, held_a_);
    const Panel columns = panel(piece_b, panels_.b, held_b_);
    run(Sgemm{.transpose_a = a.by_lines ? 'N' : 'T',
              .transpose_b = b.by_lines ? 'T' : 'N',
              .m = tile.rows,
              .n = tile.columns,
              .k = depth,
              .a = rows.data,
              .lda = rows.stride,
              .b = columns.data,
              .ldb = columns.stride,
              .beta = begin > 0 ? 1.0f : 0.0f,
              .c = tile.values,
              .ldc = tile.stride});
  }
}

}  // namespace xd::gemm::cpu
