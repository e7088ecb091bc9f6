// Grouped products in graphs, whose zones change between replays.
#include <crossdock/grouped.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "conformance/cuda/graph.h"
#include "support/gtest_main.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

TEST(GroupedGraph, ReplaysWithOtherZonesEachTime) {
  on_every_rank([](Rank& rank) {
    constexpr std::int64_t kRows = 150, kK = 64, kN = 128;
    constexpr std::uint16_t kOne = 0x3F80, kTwo = 0x4000, k64 = 0x4280, k128 = 0x4300;
    Tensor a(rank, kBf16, {kRows, kK}), b(rank, kBf16, {2, kK, kN}), d(rank, kBf16, {kRows, kN});
    Tensor offsets(rank, kI32, {3});
    a.write(std::vector<std::uint16_t>(kRows * kK, kOne));
    std::vector<std::uint16_t> matrices(kK * kN, kOne);
    matrices.resize(2 * kK * kN, kTwo);
    b.write(matrices);
    const Graph graph(rank, [&] {
      xd_grouped_product_args args = XD_GROUPED_PRODUCT_ARGS_INIT;
      args.a = a.dl();
      args.b = b.dl();
      args.d = d.dl();
      args.offsets = offsets.dl();
      ok(xd_grouped_product(rank.comm, &args, rank.stream()));
    });
    for (const std::vector<std::int32_t>& zones :
         std::vector<std::vector<std::int32_t>>{{0, 3, 150}, {5, 140, 140}, {0, 0, 1}}) {
      offsets.write(zones);
      d.buffer().fill(kPoison);
      graph.launch();
      rank.memory->synchronize();
      const auto got = d.read_as<std::uint16_t>();
      for (std::int64_t i = 0; i < kRows * kN; ++i) {
        const std::int64_t row = i / kN;
        const std::uint16_t expected = row < zones[0] || row >= zones[2] ? 0xA5A5
                                       : row < zones[1]                  ? k64
                                                                         : k128;
        ASSERT_EQ(got[static_cast<std::size_t>(i)], expected) << "row " << row;
      }
    }
  });
}

}  // namespace
}  // namespace xd::test
