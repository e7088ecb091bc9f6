// The memory that a context takes on the CPU grows with what it is for, and with nothing else.
#include "gemm/cpu/memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <ostream>

namespace xd::gemm::cpu {
namespace {

constexpr std::uint64_t kRanks = 4, kTokens = 64;
constexpr std::int64_t kColumns = 1024;  // areas begin at multiples of less

int bits(std::initializer_list<xd_gemm_operation> operations) {
  int result = 0;
  for (const xd_gemm_operation operation : operations) result |= XD_GEMM_BIT(operation);
  return result;
}

Config config_of(int operations) {
  return {.ranks = int{kRanks},
          .operations = operations,
          .max_tokens = std::int64_t{kTokens},
          .max_k = kColumns,
          .max_n = kColumns};
}

struct Bytes {
  std::uint64_t shared, own;
  bool operator==(const Bytes&) const = default;
};
void PrintTo(const Bytes& bytes, std::ostream* out) {
  *out << bytes.shared << " shared, " << bytes.own << " own";
}

Bytes bytes_of(const Config& config) { return {Map::make(config).end, Scratch::bytes(config)}; }

// The cost of a change of the config, in multiples of `units`.
template <class Change>
Bytes growth(Config config, std::uint64_t units, Change&& change) {
  const Bytes before = bytes_of(config);
  change(config);
  const Bytes after = bytes_of(config);
  return {(after.shared - before.shared) / units, (after.own - before.own) / units};
}

Bytes per_token(int operations, DType type = DType::bf16) {
  Config config = config_of(operations);
  config.type = type;
  return growth(config, kTokens, [](Config& c) { c.max_tokens += kTokens; });
}

TEST(GemmCpuMemory, GrowsWithTokensByWhatOperationsMoveAndKeep) {
  constexpr std::uint64_t kRow = kColumns * 2, kScales = 4 * kColumns / kScaleBlock;
  constexpr auto kAg = XD_GEMM_ALL_GATHER;
  constexpr auto kRs = XD_GEMM_REDUCE_SCATTER;
  constexpr auto kAr = XD_GEMM_ALL_REDUCE;
  constexpr auto kBulk = XD_GEMM_BULK;
  constexpr auto kStart = XD_GEMM_START_ALL_GATHER;
  EXPECT_EQ(per_token(bits({kAg})), (Bytes{kRow + kScales, kRanks * (kRow + kScales)}));
  EXPECT_EQ(per_token(bits({kRs})), (Bytes{kRanks * kRow, 0}));
  EXPECT_EQ(per_token(bits({kAr})), (Bytes{kRanks * kRow, 0}));
  EXPECT_EQ(per_token(bits({kRs, kAr})), (Bytes{kRanks * kRow, 0}));
  EXPECT_EQ(per_token(bits({kStart})), (Bytes{kRow, 0}));
  EXPECT_EQ(per_token(bits({kBulk})), (Bytes{kRow + kRanks * kRow, 0}));
  EXPECT_EQ(per_token(bits({kAg, kRs, kAr, kBulk, kStart})),
            (Bytes{kRow + kScales + kRanks * kRow, kRanks * (kRow + kScales)}));
  // Elements count as they are moved; terms of sums of 8 bits are bfloat16.
  EXPECT_EQ(per_token(bits({kAg}), DType::f32),
            (Bytes{2 * kRow + kScales, kRanks * (2 * kRow + kScales)}));
  EXPECT_EQ(per_token(bits({kAg}), DType::e4m3),
            (Bytes{kRow / 2 + kScales, kRanks * (kRow / 2 + kScales)}));
  EXPECT_EQ(per_token(bits({kRs}), DType::f32), (Bytes{2 * kRanks * kRow, 0}));
  EXPECT_EQ(per_token(bits({kRs}), DType::e4m3), (Bytes{kRanks * kRow, 0}));
}

TEST(GemmCpuMemory, GrowsWithColumnsOfTheOperationsThatMoveThem) {
  const auto k = [](Config& c) { c.max_k += kColumns; };
  const auto n = [](Config& c) { c.max_n += kColumns; };
  const Config gather = config_of(bits({XD_GEMM_ALL_GATHER}));
  const Config reduce = config_of(bits({XD_GEMM_REDUCE_SCATTER}));
  constexpr std::uint64_t kUnit = kColumns;
  constexpr std::uint64_t kBlock = kScaleBlock;
  // Rows of two bytes an element, and their scales; likewise of each rank.
  constexpr std::uint64_t kOfARank = kTokens * 2 + kTokens * 4 / kBlock;
  EXPECT_EQ(growth(gather, kUnit, k), (Bytes{kOfARank, kRanks * kOfARank}));
  EXPECT_EQ(growth(reduce, kUnit, k), (Bytes{0, 0}));
  // Column sums of this rank; those of the rows of each rank; terms.
  EXPECT_EQ(growth(gather, kUnit, n), (Bytes{4, kRanks * 4}));
  EXPECT_EQ(growth(reduce, kUnit, n), (Bytes{4 + kRanks * kTokens * 2, 0}));
}

}  // namespace
}  // namespace xd::gemm::cpu
