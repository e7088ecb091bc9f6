// How many threads a product on the CPU wakes.
#include <gtest/gtest.h>

#include <cstdint>

#include "gemm/cpu/onednn.h"

namespace xd::gemm::cpu {
namespace {

double flop_of(std::int64_t m, std::int64_t n, std::int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

TEST(GemmCpuThreads, AreOneForATinyProductAndAllForALargeOne) {
  for (const int available : {1, 2, 64}) {
    EXPECT_EQ(threads_for(flop_of(0, 4096, 4096), available), 1);
    EXPECT_EQ(threads_for(flop_of(4, 128, 128), available), 1);
    EXPECT_EQ(threads_for(flop_of(1024, 1024, 1024), available), available);
    // More operations than an int can count.
    EXPECT_EQ(threads_for(flop_of(1 << 20, 1 << 20, 1 << 20), available), available);
  }
}

TEST(GemmCpuThreads, GrowWithTheProduct) {
  int before = 1;
  for (std::int64_t rows = 1; rows <= 256; ++rows) {
    const int threads = threads_for(flop_of(rows, 256, 256), 64);
    EXPECT_GE(threads, before);
    before = threads;
  }
  EXPECT_EQ(before, 64);
}

}  // namespace
}  // namespace xd::gemm::cpu
