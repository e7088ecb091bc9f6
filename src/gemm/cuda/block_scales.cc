#include "gemm/cuda/block_scales.h"

#include <cstddef>

#include "base/layout.h"
#include "base/math.h"
#include "gemm/config.h"

namespace xd::gemm::cuda {
namespace {

using xd::cuda::ProductShape;

constexpr std::int64_t kRows = ProductShape::kBlockScaledRows;
constexpr std::uint64_t kStart = 256;
constexpr std::uint64_t kFloatsBetweenRows = 4;  // of b's scales: a multiple of it

}  // namespace

BlockScaleMap BlockScaleMap::make(std::int64_t rows, std::int64_t n, std::int64_t k) {
  BlockScaleMap map{};
  map.whole_rows = rows / kRows * kRows;
  map.rest_rows = rows - map.whole_rows;
  map.blocks = scale_blocks(k);
  map.b_rows = scale_blocks(n);
  map.b_pitch = static_cast<std::int64_t>(round_up(at(map.blocks), kFloatsBetweenRows));
  LayoutCursor cursor;
  map.whole_scales = cursor.add<float>(at(map.blocks) * at(map.whole_rows), kStart);
  map.rest_scales = cursor.add<float>(at(map.blocks) * at(kRows), kStart);
  map.b_scales = cursor.add<float>(at(map.b_rows) * at(map.b_pitch), kStart);
  map.rest_a = cursor.add<std::byte>(at(kRows) * at(k), kStart);
  map.rest_d = cursor.add<float>(at(kRows) * at(n), kStart);
  map.end = cursor.at;
  return map;
}

ProductShape whole_of(const ProductShape& shape) {
  ProductShape whole = shape;
  whole.m = shape.m / kRows * kRows;
  return whole;
}

ProductShape rest_of(const ProductShape& shape) {
  ProductShape rest = shape;
  rest.m = shape.m % kRows == 0 ? 0 : kRows;
  rest.a_pitch = shape.k;
  rest.d_pitch = shape.n;
  rest.stores_at_peers = false;
  return rest;
}

}  // namespace xd::gemm::cuda
