// Which algorithms the CPU has for an operation, which one a call takes, and what it says of them.
#include "gemm/cpu/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "unit/errors.h"

namespace xd::gemm::cpu {
namespace {

constexpr xd_gemm_operation kOperations[] = {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER,
                                             XD_GEMM_ALL_REDUCE};
constexpr xd_gemm_algo kAlgos[] = {XD_GEMM_ALGO_DIRECT, XD_GEMM_ALGO_SPLIT, XD_GEMM_ALGO_SEQUENTIAL,
                                   XD_GEMM_ALGO_CUBLASMP};
constexpr double kFlops = 1000;

// The first row of each of four ranks, and the number of all.
using Starts = std::array<std::int64_t, 5>;
constexpr Starts kFew{0, 10, 10, 40, 100};
constexpr Starts kWholeTiles{0, 256, 256, 1024, 1100};

// Numbers that are easy to work out by hand.
struct Problem {
  Config config{.ranks = 4};
  Starts starts;
  ProductCall call{};

  explicit Problem(xd_gemm_operation operation, xd_gemm_algo algo = XD_GEMM_ALGO_AUTO,
                   const Starts& starts_of_ranks = kFew)
      : starts(starts_of_ranks) {
    call.operation = operation;
    call.algo = algo;
    call.k = 64;
    call.n = 32;
    call.shares = Shares(starts);
    call.a_rows = operation == XD_GEMM_ALL_GATHER ? call.shares.rows(3) : starts.back();
    call.a.type = DType::bf16;
    call.d.type = DType::f32;
  }
  Problem(const Problem&) = delete;  // `call` refers to `starts`
  Problem& operator=(const Problem&) = delete;

  xd_gemm_algo chosen() const { return choose(config, call); }
  xd_gemm_plan_info explained() const { return explain(config, call, kFlops); }
};

std::vector<xd_gemm_algo> those_of(xd_gemm_operation operation) {
  std::vector<xd_gemm_algo> result;
  std::ranges::copy_if(kAlgos, std::back_inserter(result),
                       [&](xd_gemm_algo algo) { return obstacle(operation, algo) == nullptr; });
  return result;
}

TEST(GemmCpuPlan, HasTheseAlgorithms) {
  using Algos = std::vector<xd_gemm_algo>;
  EXPECT_EQ(those_of(XD_GEMM_ALL_GATHER), (Algos{XD_GEMM_ALGO_SPLIT, XD_GEMM_ALGO_SEQUENTIAL}));
  EXPECT_EQ(those_of(XD_GEMM_REDUCE_SCATTER), Algos{XD_GEMM_ALGO_SEQUENTIAL});
  EXPECT_EQ(those_of(XD_GEMM_ALL_REDUCE), Algos{XD_GEMM_ALGO_SEQUENTIAL});
}

// A product costs more than its rows, so one for each rank is taken where it spares enough copies.
TEST(GemmCpuPlan, AutoTakesProductsPerRankWhereTheySpareMoreThanTheyCost) {
  const auto chosen = [](const Starts& starts) {
    return Problem(XD_GEMM_ALL_GATHER, XD_GEMM_ALGO_AUTO, starts).chosen();
  };
  EXPECT_EQ(chosen(kFew), XD_GEMM_ALGO_SEQUENTIAL);
  EXPECT_EQ(chosen({0, 0, 10, 10, 10}), XD_GEMM_ALGO_SPLIT);
  EXPECT_EQ(chosen({0, 0, 0, 0, 0}), XD_GEMM_ALGO_SPLIT);
  EXPECT_EQ(chosen(kWholeTiles), XD_GEMM_ALGO_SPLIT);
}

TEST(GemmCpuPlan, AutoIsNeverSlowerThanAnyOther) {
  for (const xd_gemm_operation operation : kOperations) {
    for (const Starts& starts : {kFew, kWholeTiles, Starts{0, 1, 2, 3, 4},
                                 Starts{0, 250, 500, 750, 1000}, Starts{0, 0, 0, 0, 8000}}) {
      const double best = Problem(operation, XD_GEMM_ALGO_AUTO, starts).explained().estimate_us;
      for (const xd_gemm_algo algo : those_of(operation)) {
        EXPECT_LE(best, Problem(operation, algo, starts).explained().estimate_us)
            << algo_name(algo) << " in operation " << operation << ", " << starts[1] << " rows";
      }
    }
  }
}

// One product of all rows may round otherwise than one for each rank's.
TEST(GemmCpuPlan, SaysWhichAlgorithmsGiveTheSameBits) {
  const auto same = [](xd_gemm_operation operation, xd_gemm_algo algo, const Starts& starts) {
    return Problem(operation, algo, starts).explained().same_bits;
  };
  EXPECT_EQ(same(XD_GEMM_ALL_GATHER, XD_GEMM_ALGO_SPLIT, kFew), 1);
  EXPECT_EQ(same(XD_GEMM_ALL_GATHER, XD_GEMM_ALGO_SEQUENTIAL, kFew), 0);
  EXPECT_EQ(same(XD_GEMM_ALL_GATHER, XD_GEMM_ALGO_SEQUENTIAL, {0, 0, 77, 77, 77}), 1);
  EXPECT_EQ(same(XD_GEMM_ALL_GATHER, XD_GEMM_ALGO_SEQUENTIAL, {0, 0, 0, 0, 0}), 1);
  EXPECT_EQ(same(XD_GEMM_ALL_GATHER, XD_GEMM_ALGO_SEQUENTIAL, {0, 256, 512, 768, 1024}), 0);
  for (const xd_gemm_operation operation : {XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALL_REDUCE}) {
    EXPECT_EQ(same(operation, XD_GEMM_ALGO_SEQUENTIAL, kFew), 1);
  }
}

TEST(GemmCpuPlan, TakesACallAtItsWordOrRefusesItWithTheReason) {
  for (const xd_gemm_operation operation : kOperations) {
    for (const xd_gemm_algo algo : kAlgos) {
      Problem p(operation, algo);
      SCOPED_TRACE(std::string(algo_name(algo)) + " in operation " + std::to_string(operation));
      const char* const why = obstacle(operation, algo);
      if (why == nullptr) {
        EXPECT_EQ(p.chosen(), algo);
        continue;
      }
      EXPECT_EQ(test::refusal_of([&] { choose(p.config, p.call); }, XD_ERROR_UNSUPPORTED),
                "algo = XD_GEMM_ALGO_" + std::string(algo_name(algo)) + ": " + why);
      p.config.allow_fallback = true;
      EXPECT_EQ(p.chosen(), Problem(operation).chosen());
    }
  }
}

TEST(GemmCpuPlan, CountsProductsAndCopies) {
  // Three of the ranks have rows, one of them 60 of the 100.
  constexpr double kFlopOfARow = 2 * 64 * 32, kFlopOfAByte = 12;
  constexpr double kRowsOfATile = 32 + 8;  // and of its product, as each has one tile
  constexpr double kMostRows = 60 * 64 * 2, kAllRows = 100 * 64 * 2;
  constexpr double kMostTerms = 60 * 32 * 4, kAllTerms = 100 * 32 * 4;
  const auto expect = [](const xd_gemm_plan_info& info, int tiles, double copied, int products) {
    EXPECT_DOUBLE_EQ(info.gemm_us, (100 + kRowsOfATile * tiles) * kFlopOfARow / kFlops);
    EXPECT_DOUBLE_EQ(info.transfer_us, copied * kFlopOfAByte / kFlops);
    EXPECT_DOUBLE_EQ(info.estimate_us, info.gemm_us + info.transfer_us);
    EXPECT_EQ(info.num_products, products);
  };
  constexpr auto kSplit = XD_GEMM_ALGO_SPLIT, kAtOnce = XD_GEMM_ALGO_SEQUENTIAL;
  // Own rows are staged; SEQUENTIAL copies those of all ranks as well.
  expect(Problem(XD_GEMM_ALL_GATHER, kSplit).explained(), 3, kMostRows, 4);
  expect(Problem(XD_GEMM_ALL_GATHER, kAtOnce).explained(), 1, kMostRows + kAllRows, 1);
  // Terms of all rows are written, and those of the own rows of all ranks read.
  expect(Problem(XD_GEMM_REDUCE_SCATTER, kAtOnce).explained(), 1, kAllTerms + 4 * kMostTerms, 1);
  expect(Problem(XD_GEMM_ALL_REDUCE).explained(), 1, kAllTerms + 4 * kAllTerms, 1);
}

TEST(GemmCpuPlan, HasALineForEachAlgorithm) {
  for (const xd_gemm_operation operation : kOperations) {
    const std::string text = Problem(operation).explained().text;
    EXPECT_EQ(std::ranges::count(text, '\n'), std::ssize(kAlgos)) << text;
    for (const xd_gemm_algo algo : kAlgos) {
      const char* const why = obstacle(operation, algo);
      const std::string line = std::string(algo_name(algo)) + ": " + (why != nullptr ? why : "");
      EXPECT_NE(("\n" + text).find("\n" + line), std::string::npos) << line << "\n" << text;
    }
  }
}

}  // namespace
}  // namespace xd::gemm::cpu
