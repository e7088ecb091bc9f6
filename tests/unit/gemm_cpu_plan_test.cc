// Which algorithms the CPU has for an operation, which one a call takes, and what it says of them.
#include "gemm/cpu/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"

namespace xd::gemm::cpu {
namespace {

constexpr xd_gemm_operation kOperations[] = {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER,
                                             XD_GEMM_ALL_REDUCE};
constexpr xd_gemm_algo kAlgos[] = {XD_GEMM_ALGO_FUSED, XD_GEMM_ALGO_DIRECT, XD_GEMM_ALGO_SPLIT,
                                   XD_GEMM_ALGO_SPLIT_P2P, XD_GEMM_ALGO_SEQUENTIAL};
constexpr Speed kSpeed{.flops = 1000, .copied_bytes = 100};

// Four ranks of a few tokens each; numbers that are easy to work out by hand.
struct Problem {
  Config config{.ranks = 4};
  std::array<std::int64_t, 5> starts{0, 10, 10, 40, 100};
  ProductCall call{};

  explicit Problem(xd_gemm_operation operation, xd_gemm_algo algo = XD_GEMM_ALGO_AUTO) {
    call.operation = operation;
    call.algo = algo;
    call.k = 64;
    call.n = 32;
    call.shares = Shares(starts);
    call.a_rows = operation == XD_GEMM_ALL_GATHER ? 60 : 100;
    call.a.type = DType::bf16;
    call.d.type = DType::f32;
  }
  xd_gemm_plan_info explained(int rank = 3) const { return explain(config, call, kSpeed, rank); }
};

std::vector<xd_gemm_algo> those_of(xd_gemm_operation operation) {
  std::vector<xd_gemm_algo> result;
  std::ranges::copy_if(kAlgos, std::back_inserter(result),
                       [&](xd_gemm_algo algo) { return obstacle(operation, algo) == nullptr; });
  return result;
}

TEST(GemmCpuPlan, HasTheseAlgorithms) {
  using Algos = std::vector<xd_gemm_algo>;
  EXPECT_EQ(those_of(XD_GEMM_ALL_GATHER),
            (Algos{XD_GEMM_ALGO_SPLIT, XD_GEMM_ALGO_SPLIT_P2P, XD_GEMM_ALGO_SEQUENTIAL}));
  EXPECT_EQ(those_of(XD_GEMM_REDUCE_SCATTER),
            (Algos{XD_GEMM_ALGO_DIRECT, XD_GEMM_ALGO_SPLIT, XD_GEMM_ALGO_SPLIT_P2P,
                   XD_GEMM_ALGO_SEQUENTIAL}));
  EXPECT_EQ(those_of(XD_GEMM_ALL_REDUCE), Algos{XD_GEMM_ALGO_SEQUENTIAL});
}

TEST(GemmCpuPlan, AutoTakesProductsPerRankWhereThereAreSuch) {
  const auto chosen = [](xd_gemm_operation operation) {
    const Problem p(operation);
    return choose(p.config, p.call);
  };
  EXPECT_EQ(chosen(XD_GEMM_ALL_GATHER), XD_GEMM_ALGO_SPLIT_P2P);
  EXPECT_EQ(chosen(XD_GEMM_REDUCE_SCATTER), XD_GEMM_ALGO_SPLIT_P2P);
  EXPECT_EQ(chosen(XD_GEMM_ALL_REDUCE), XD_GEMM_ALGO_SEQUENTIAL);
}

TEST(GemmCpuPlan, TakesACallAtItsWordOrRefusesItWithTheReason) {
  for (const xd_gemm_operation operation : kOperations) {
    for (const xd_gemm_algo algo : kAlgos) {
      Problem p(operation, algo);
      SCOPED_TRACE(std::string(algo_name(algo)) + " in operation " + std::to_string(operation));
      const char* const why = obstacle(operation, algo);
      if (why == nullptr) {
        EXPECT_EQ(choose(p.config, p.call), algo);
        continue;
      }
      try {
        choose(p.config, p.call);
        ADD_FAILURE() << "expected UNSUPPORTED";
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), XD_ERROR_UNSUPPORTED);
        EXPECT_EQ(error.text(), "algo = XD_GEMM_ALGO_" + std::string(algo_name(algo)) + ": " + why);
      }
      p.config.allow_fallback = true;
      EXPECT_EQ(choose(p.config, p.call), choose(p.config, Problem(operation).call));
    }
  }
}

TEST(GemmCpuPlan, CountsProductsAndCopies) {
  // 2 * 100 * 64 * 32 operations; rank 3 has 60 of the 100 rows.
  constexpr double kProduct = 409.6;
  constexpr double kOwnRows = 60 * 64 * 2, kAllRows = 100 * 64 * 2;
  constexpr double kOwnTerms = 60 * 32 * 4, kAllTerms = 100 * 32 * 4;
  const auto expect = [](const xd_gemm_plan_info& info, double copied, int products) {
    EXPECT_DOUBLE_EQ(info.gemm_us, kProduct);
    EXPECT_DOUBLE_EQ(info.transfer_us, copied / kSpeed.copied_bytes);
    EXPECT_DOUBLE_EQ(info.estimate_us, info.gemm_us + info.transfer_us);
    EXPECT_EQ(info.num_products, products);
    EXPECT_EQ(info.comm_sms, 0);
    EXPECT_EQ(info.same_bits, 1);
  };
  // Own rows are staged; SEQUENTIAL copies those of all ranks as well.
  expect(Problem(XD_GEMM_ALL_GATHER).explained(), kOwnRows, 4);
  expect(Problem(XD_GEMM_ALL_GATHER, XD_GEMM_ALGO_SEQUENTIAL).explained(), kOwnRows + kAllRows, 4);
  // Terms of all rows are written, and those of the own rows of all ranks read.
  expect(Problem(XD_GEMM_REDUCE_SCATTER).explained(), kAllTerms + 4 * kOwnTerms, 4);
  expect(Problem(XD_GEMM_ALL_REDUCE).explained(), kAllTerms + 4 * kAllTerms, 1);
  // A rank without tokens still computes the product.
  expect(Problem(XD_GEMM_ALL_GATHER).explained(1), 0, 4);
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
