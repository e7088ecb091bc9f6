// The judge of measured products: which roundings of a sum it lets pass.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "gemm/data.h"

namespace bench {
namespace {

float rounded(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

std::vector<float> read_bf16(const std::vector<std::uint16_t>& elements) {
  std::vector<float> values;
  for (const std::uint16_t element : elements) {
    values.push_back(std::bit_cast<float>(std::uint32_t{element} << 16));
  }
  return values;
}

// Sums over ranks of bfloat16, of which a rank's term is a product in float32, rounded.
struct Summed {
  explicit Summed(std::uint64_t seed) {
    problem.shape = {.name = "test", .operation = XD_GEMM_ALL_REDUCE, .n = 16, .k = 4096};
    problem.tokens = 4;
    problem.element = Element::bf16;
    problem.seed = seed;
    problem.ranks = 4;
  }

  std::vector<float> terms_of(int rank) const {
    const std::int64_t m = problem.tokens, n = problem.shape.n, k = problem.shape.k;
    std::vector<std::uint16_t> a(static_cast<std::size_t>(m * k)),
        b(static_cast<std::size_t>(n * k));
    fill_a(problem, rank, a.data());
    fill_b(problem, rank, b.data());
    const std::vector<float> left = read_bf16(a), right = read_bf16(b);
    std::vector<float> terms;
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        float sum = 0;
        for (std::int64_t l = 0; l < k; ++l) {
          sum += left[static_cast<std::size_t>(i * k + l)] *
                 right[static_cast<std::size_t>(j * k + l)];
        }
        terms.push_back(rounded(sum));
      }
    }
    return terms;
  }

  // Rounds after every addition, or at the end.
  std::vector<float> sums(bool each_time) const {
    std::vector<float> all = terms_of(0);
    for (int rank = 1; rank < problem.ranks; ++rank) {
      const std::vector<float> terms = terms_of(rank);
      for (std::size_t i = 0; i < all.size(); ++i) {
        all[i] += terms[i];
        if (each_time) all[i] = rounded(all[i]);
      }
    }
    for (float& x : all) x = rounded(x);
    return all;
  }

  std::string judge(const std::vector<float>& values, Sums how) const {
    std::vector<std::uint16_t> d;
    for (const float x : values) {
      d.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16));
    }
    return check_result(problem, 0, d.data(), how);
  }

  GemmProblem problem;
};

TEST(BenchResult, LetsSumsBeRoundedAsOftenAsTheirMakerDoes) {
  int refused = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    const Summed summed(seed);
    const std::vector<float> once = summed.sums(false), each_time = summed.sums(true);
    EXPECT_EQ(summed.judge(once, Sums::rounded_once), "") << seed;
    EXPECT_EQ(summed.judge(each_time, Sums::rounded_each_time), "") << seed;
    if (!summed.judge(each_time, Sums::rounded_once).empty()) ++refused;
  }
  EXPECT_GT(refused, 0) << "both bounds are one";
}

TEST(BenchResult, RefusesMoreThanRoundings) {
  const Summed summed(1);
  std::vector<float> wrong = summed.sums(true);
  for (float& x : wrong) x += 64;
  EXPECT_NE(summed.judge(wrong, Sums::rounded_each_time), "");
}

}  // namespace
}  // namespace bench
