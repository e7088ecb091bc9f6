// Classes of products on CUDA, which share an algorithm.
#include "gemm/cuda/products.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace xd::gemm::cuda {
namespace {

TEST(GemmProducts, ClassesOfRowsAreAtMostHalfAsLargeAgainAndAscend) {
  std::int64_t last = 0;
  for (std::int64_t rows = 1; rows <= 70000; ++rows) {
    const std::int64_t size = row_class(rows);
    EXPECT_GE(size, rows);
    EXPECT_TRUE(size == 16 || 2 * size <= 3 * rows) << rows << " in " << size;
    EXPECT_GE(size, last);
    EXPECT_EQ(row_class(size), size);
    last = size;
  }
}

TEST(GemmProducts, OfAClassDifferInRowsAndPitchesOnly) {
  xd::cuda::ProductShape packed{.m = 96, .n = 40, .k = 24, .a_pitch = 24, .b_pitch = 24};
  packed.d_pitch = 40;
  xd::cuda::ProductShape padded = packed;
  padded.m = 90;
  padded.d_pitch = 64;
  EXPECT_EQ(class_of(padded), class_of(packed));
  padded.stores_at_peers = true;
  EXPECT_NE(class_of(padded), class_of(packed));
  packed.transpose_a = true;
  EXPECT_EQ(class_of(packed).a_pitch, 96);
}

}  // namespace
}  // namespace xd::gemm::cuda
