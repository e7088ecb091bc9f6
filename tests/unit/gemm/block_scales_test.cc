// Scales per 128 columns as cuBLASLt takes them, and the products that have them.
#include "gemm/cuda/block_scales.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <vector>

#include "base/math.h"
#include "gemm/cuda/call_shape.h"
#include "gemm/cuda/params.h"

namespace xd::gemm::cuda {
namespace {

using xd::cuda::ProductShape;
namespace lt = xd::cuda::lt;

TEST(GemmBlockScales, HaveRoomForTheProductsOfAllRowsAndOfTheRest) {
  const BlockScaleMap map = BlockScaleMap::make(37, 390, 400);
  EXPECT_EQ(map.whole_rows, 32);
  EXPECT_EQ(map.rest_rows, 5);
  EXPECT_EQ(map.blocks, 4);
  EXPECT_EQ(map.b_rows, 4);
  EXPECT_EQ(map.b_pitch, 4);
  EXPECT_EQ(BlockScaleMap::make(32, 128, 640).b_pitch, 8);
  struct Area {
    std::uint64_t begin, bytes;
  };
  const std::array<Area, 5> areas = {{{map.whole_scales, sizeof(float) * 4 * 32},
                                      {map.rest_scales, sizeof(float) * 4 * 16},
                                      {map.b_scales, sizeof(float) * 4 * 4},
                                      {map.rest_a, 16ULL * 400},
                                      {map.rest_d, sizeof(float) * 16 * 390}}};
  std::uint64_t end = 0;
  for (const Area& area : areas) {
    EXPECT_GE(area.begin, end);
    EXPECT_EQ(area.begin % 16, 0u);
    end = area.begin + area.bytes;
  }
  EXPECT_LE(end, map.end);
}

// A context has memory for its bounds, and a smaller call fits into it, whatever its rest.
TEST(GemmBlockScales, OfSmallerProductsNeedNoMoreMemory) {
  for (std::int64_t rows = 0; rows < 70; ++rows) {
    for (const std::int64_t n : {8, 128, 136, 1000}) {
      for (const std::int64_t k : {16, 128, 144, 1024}) {
        const std::uint64_t end = BlockScaleMap::make(rows, n, k).end;
        EXPECT_LE(end, BlockScaleMap::make(rows + 1, n, k).end);
        EXPECT_LE(end, BlockScaleMap::make(rows, n + 8, k).end);
        EXPECT_LE(end, BlockScaleMap::make(rows, n, k + 16).end);
      }
    }
  }
}

// In cuBLASLt's order all rows' scales of a block lie beside one another, and none twice.
TEST(GemmBlockScales, LieByBlocksOfTheRowsOfEitherProduct) {
  constexpr std::int64_t kRows = 37, kBlocks = 3, kWhole = 32, kRest = 16;
  std::vector<float> whole(kWhole * kBlocks), rest(kRest * kBlocks);
  BlockScalesParams params{};
  params.whole = whole.data();
  params.rest = rest.data();
  params.rows = kRows;
  params.blocks = kBlocks;
  params.whole_rows = kWhole;
  params.rest_pitch = kRest;
  std::set<const float*> places;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t block = 0; block < kBlocks; ++block) {
      const float* const place = params.place_of(row, block);
      EXPECT_EQ(place, row < kWhole ? &whole[at(block * kWhole + row)]
                                    : &rest[at(block * kRest + row - kWhole)]);
      places.insert(place);
    }
  }
  EXPECT_EQ(places.size(), at(kRows * kBlocks));
}

TEST(GemmBlockScales, AreOfTwoProductsOfMultiplesOf16Rows) {
  ProductShape shape{.m = 37, .n = 384, .k = 256, .a_pitch = 256, .b_pitch = 256};
  shape.d_pitch = 1024;
  shape.stores_at_peers = true;
  const ProductShape whole = whole_of(shape), rest = rest_of(shape);
  EXPECT_EQ(whole.m, 32);
  EXPECT_EQ(whole.d_pitch, 1024);
  EXPECT_TRUE(whole.stores_at_peers);
  EXPECT_EQ(rest.m, 16);
  EXPECT_EQ(rest.a_pitch, 256);
  EXPECT_EQ(rest.d_pitch, 384);
  EXPECT_FALSE(rest.stores_at_peers);
  shape.m = 48;
  EXPECT_EQ(rest_of(shape).m, 0);
  shape.m = 3;
  EXPECT_EQ(whole_of(shape).m, 0);
}

ProductCall call_of_blocks() {
  ProductCall call{.operation = XD_GEMM_ALL_GATHER};
  call.a.type = call.b.type = DType::e4m3;
  call.d.type = DType::bf16;
  call.scaling = Scaling::blocks;
  call.fast_accumulate = true;
  call.n = 384;
  call.k = 300;
  return call;
}

TEST(GemmBlockScales, MakeAProductThatOurKernelsFinish) {
  ProductCall call = call_of_blocks();
  const ProductShape shape = product_shape(call, 48, 48, DType::bf16, true);
  EXPECT_TRUE(shape.has_block_scales());
  EXPECT_EQ(shape.a_scale_mode, lt::kScaleVector128);
  EXPECT_EQ(shape.b_scale_mode, lt::kScaleBlock128);
  EXPECT_FALSE(shape.fast_accumulate);
  EXPECT_TRUE(is_plain(call));
  std::byte some[16]{};
  call.bias.given = true;
  call.bias.data = some;
  EXPECT_FALSE(is_plain(call));
  call.bias = {};
  call.epilogue = XD_GEMM_EPILOGUE_RELU;
  EXPECT_FALSE(is_plain(call));
  call.epilogue = XD_GEMM_EPILOGUE_NONE;
  call.d.type = DType::f16;
  EXPECT_FALSE(is_plain(call));
}

TEST(GemmScales, LeaveABiasOfFloat32BesideFp8ToOurKernels) {
  std::byte some[16]{};
  ProductCall call{.operation = XD_GEMM_ALL_GATHER};
  call.bias.given = true;
  call.bias.data = some;
  for (const DType type : {DType::bf16, DType::f32}) {
    call.d.type = call.bias.type = type;
    call.a.type = call.b.type = DType::e4m3;
    EXPECT_EQ(is_plain(call), type == DType::bf16);
    call.a.type = call.b.type = type;
    EXPECT_TRUE(is_plain(call));
  }
}

TEST(GemmBlockScales, OfATokenFollowThoseOfTheTokenBefore) {
  ProductCall call = call_of_blocks();
  EXPECT_EQ(product_pointers(call, 5, nullptr, nullptr).a_scale, nullptr);
  std::array<float, 64> scales{};
  call.a_scale.given = true;
  call.a_scale.data = reinterpret_cast<std::byte*>(scales.data());
  const auto from = product_pointers(call, 5, nullptr, nullptr);
  EXPECT_EQ(from.a_scale, scales.data() + 15);  // three blocks of 300 columns
  EXPECT_EQ(from.b_scale, nullptr);
}

// Kernels are loaded before a call may launch them.
TEST(GemmBlockScales, AreAmongTheProductsThatAreLaunchedOnce) {
  Config config;
  config.ranks = 2;
  config.operations = XD_GEMM_BIT(XD_GEMM_ALL_GATHER);
  config.max_tokens = 64;
  config.max_k = config.max_n = 256;
  config.type = DType::e4m3;
  const auto have = [](const std::vector<ProductShape>& shapes) {
    return std::ranges::count_if(shapes, &ProductShape::has_block_scales);
  };
  EXPECT_EQ(have(usual_shapes(config)), 0);
  EXPECT_EQ(have(warmed_shapes(config)), 2);  // into bfloat16 and float32
  EXPECT_EQ(have(all_products()), 6);         // likewise of three pairs of types
  for (const ProductShape& shape : all_products()) {
    if (!shape.has_block_scales()) continue;
    EXPECT_EQ(shape.epilogue, lt::kEpilogueNone);
    EXPECT_FALSE(shape.fast_accumulate);
  }
  config.type = DType::bf16;
  EXPECT_EQ(have(warmed_shapes(config)), 0);
}

}  // namespace
}  // namespace xd::gemm::cuda
