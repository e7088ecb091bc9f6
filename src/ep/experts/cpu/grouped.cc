// Products of experts' rows on the CPU, zone by zone.
#include "ep/experts/grouped.h"

#include <algorithm>
#include <memory>

#include "base/float_modes.h"
#include "base/math.h"
#include "ep/experts/cpu/experts.h"
#include "gemm/cpu/elements.h"
#include "gemm/cpu/multiply.h"
#include "gemm/cpu/onednn.h"

namespace xd::ep::cpu {
namespace {

using gemm::cpu::Multiplier;
using gemm::cpu::Operand;
using gemm::cpu::Tile;

struct Zone {
  std::int64_t first, rows;
};

Zone zone_of(const GroupedCall& call, std::int32_t expert) {
  const auto bound = [&](std::int32_t i) {
    const std::int64_t offset = call.offsets.type == DType::i64
                                    ? call.offsets.as<std::int64_t>()[i]
                                    : call.offsets.as<std::int32_t>()[i];
    return std::clamp<std::int64_t>(offset, 0, call.a.rows);
  };
  const std::int64_t first = bound(expert);
  return {first, std::max<std::int64_t>(0, bound(expert + 1) - first)};
}

// Where the rows of a product go, and what is done with the sums.
struct Target {
  std::byte* data;
  DType type;
  std::int64_t stride;  // elements from one row to the next
  bool accumulate;
  const float* row_scales = nullptr;  // given together
  const float* column_scales = nullptr;

  void store(const Tile& tile) const {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      float* const x = tile.values + r * tile.stride;
      if (row_scales != nullptr) {
        gemm::cpu::scale(x, row_scales[tile.row + r], at(tile.columns));
        gemm::cpu::scale_by(x, column_scales + tile.column, at(tile.columns));
      }
      if (in_place()) continue;
      std::byte* const to = data + at((tile.row + r) * stride + tile.column) * dtype_bytes(type);
      if (accumulate) {
        gemm::cpu::add(reinterpret_cast<float*>(to), x, at(tile.columns));
      } else {
        gemm::cpu::narrow(type, to, x, at(tile.columns));
      }
    }
  }
  // True if sums are computed where they go.
  bool in_place() const { return type == DType::f32 && !accumulate; }
  gemm::cpu::Results results() const {
    if (!in_place()) return {};
    return {.values = reinterpret_cast<float*>(data), .stride = stride};
  }
};

// The memory that a call works in; what it does not touch costs nothing.
class Workplace {
 public:
  Workplace() : memory_(std::make_unique_for_overwrite<float[]>(kA + kB + kTile)) {}

  gemm::cpu::Panels panels() const {
    return {.a = memory_.get(), .b = memory_.get() + kA, .tile = memory_.get() + kA + kB};
  }

 private:
  static constexpr std::size_t kA = gemm::cpu::kTileRows * gemm::cpu::kTileDepth;
  static constexpr std::size_t kB = gemm::cpu::kTileColumns * gemm::cpu::kTileDepth;
  static constexpr std::size_t kTile = gemm::cpu::kTileRows * gemm::cpu::kTileColumns;
  const std::unique_ptr<float[]> memory_;
};

// Calls body(multiplier, expert, zone) for each expert of the range.
template <class Body>
void for_zones(const GroupedCall& call, Body&& body) {
  const StandardFloatModes standard;
  const gemm::cpu::Threads threads(gemm::cpu::cores_per_rank(call.near_ranks));
  const Workplace workplace;
  const gemm::cpu::Panels panels = workplace.panels();
  for (std::int32_t i = 0; i < call.num_experts; ++i) {
    const std::int32_t expert = call.first_expert + i;
    Multiplier multiplier(panels);
    body(multiplier, expert, zone_of(call, expert));
  }
}

std::byte* element(const Tensor& tensor, std::int64_t row) {
  return tensor.data +
         row * tensor.row_stride * static_cast<std::int64_t>(dtype_bytes(tensor.type));
}

std::byte* matrix(const Matrices& m, std::int32_t expert) {
  return m.data + expert * m.stride * static_cast<std::int64_t>(dtype_bytes(m.type));
}

}  // namespace

void compute_grouped_product(const GroupedProductCall& call) {
  for_zones(call, [&](Multiplier& multiplier, std::int32_t expert, const Zone& zone) {
    if (zone.rows == 0) return;
    Operand a{.data = element(call.a, zone.first),
              .type = call.a.type,
              .by_lines = true,
              .stride = call.a.row_stride};
    Operand b{.data = matrix(call.b, expert),
              .type = call.b.type,
              .by_lines = !call.b.by_rows(),
              .stride = call.b.line_stride()};
    Target to{.data = element(call.d, zone.first),
              .type = call.d.type,
              .stride = call.d.row_stride,
              .accumulate = call.accumulate};
    if (call.has_blocks()) {
      a.scaling = b.scaling = gemm::Scaling::blocks;
      a.scales = reinterpret_cast<const float*>(element(call.a_scale, zone.first));
      a.scale_columns = call.a_scale.row_stride;
      b.scales = reinterpret_cast<const float*>(matrix(call.b_blocks, expert));
      b.scale_columns = call.b_blocks.row_stride;
      b.lines_per_scale = gemm::kScaleBlock;
    } else if (call.a_scale) {
      to.row_scales = call.a_scale.as<float>() + zone.first;
      to.column_scales = call.b_scale.as<float>() + expert * call.n();
    }
    multiplier.product(a, zone.rows, b, call.k(), call.n(), to.results(),
                       [&](const Tile& tile) { to.store(tile); });
  });
}

void compute_grouped_outer(const GroupedOuterCall& call) {
  for_zones(call, [&](Multiplier& multiplier, std::int32_t expert, const Zone& zone) {
    const Target to{.data = matrix(call.d, expert),
                    .type = call.d.type,
                    .stride = call.d.row_stride,
                    .accumulate = call.accumulate};
    if (zone.rows == 0) {
      if (call.accumulate) return;
      for (std::int64_t row = 0; row < call.d.rows; ++row) {
        std::fill_n(to.data + row * to.stride * static_cast<std::int64_t>(dtype_bytes(to.type)),
                    at(call.d.cols) * dtype_bytes(to.type), std::byte{0});
      }
      return;
    }
    const auto columns_of = [&](const Tensor& tensor) {
      return Operand{.data = element(tensor, zone.first),
                     .type = tensor.type,
                     .by_lines = false,
                     .stride = tensor.row_stride};
    };
    multiplier.product(columns_of(call.a), call.a.cols, columns_of(call.b), zone.rows, call.b.cols,
                       to.results(), [&](const Tile& tile) { to.store(tile); });
  });
}

}  // namespace xd::ep::cpu
