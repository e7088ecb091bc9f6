// The reference of products: by hand where that is possible.
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/gemm/reference.h"

namespace xd::test {
namespace {

Matrix matrix(std::int64_t rows, std::int64_t columns, std::vector<double> values) {
  Matrix result(rows, columns);
  result.values = std::move(values);
  return result;
}

GemmInputs inputs(Matrix a, Matrix b, std::vector<std::int64_t> tokens) {
  GemmInputs in;
  in.tokens = std::move(tokens);
  in.a = std::move(a);
  in.b = std::move(b);
  return in;
}

// Reads K and N of the inputs only: a case has them in units of rows of 16 bytes.
GemmCase small_case(xd_gemm_operation operation) {
  GemmCase c;
  c.num_ranks = 2;
  c.operation = operation;
  return c;
}

Matrix padded(const Matrix& values, std::int64_t rows, std::int64_t columns) {
  Matrix result(rows, columns);
  for (std::int64_t i = 0; i < values.rows; ++i) {
    for (std::int64_t j = 0; j < values.columns; ++j) result.at(i, j) = values.at(i, j);
  }
  return result;
}

TEST(GemmReference, GathersRowsInRankOrder) {
  const GemmCase c = small_case(XD_GEMM_ALL_GATHER);
  const std::vector<GemmInputs> all{
      inputs(padded(matrix(1, 2, {1, 2}), 1, 8), padded(matrix(2, 1, {10, 1}), 8, 8), {1, 2}),
      inputs(padded(matrix(2, 2, {3, 4, 5, 6}), 2, 8), padded(matrix(2, 1, {1, 0}), 8, 8), {1, 2}),
  };
  const GemmExpected first = gemm_expected(c, all, 0), second = gemm_expected(c, all, 1);
  ASSERT_EQ(first.d.rows, 3);
  for (int i = 0; i < 3; ++i) {
    const double left = 1 + 2 * i, right = 2 + 2 * i;
    EXPECT_EQ(first.d.at(i, 0), 10 * left + right);
    EXPECT_EQ(second.d.at(i, 0), left);
    EXPECT_EQ(first.gathered.at(i, 1), right);
  }
  EXPECT_EQ(first.amax, 56);
  EXPECT_EQ(first.bias_grad.at(0, 0), 12 + 34 + 56);
}

// 257 is no bf16: each rank's product is rounded to 256, and so is their sum.
TEST(GemmReference, RoundsEachRanksProductBeforeItAdds) {
  GemmCase c = small_case(XD_GEMM_REDUCE_SCATTER);
  const Matrix a = padded(matrix(2, 2, {1, 1, 2, 0}), 2, 8);
  const Matrix b = padded(matrix(2, 1, {256, 1}), 8, 8);
  std::vector<GemmInputs> all{inputs(a, b, {1, 1}), inputs(a, b, {1, 1})};
  EXPECT_EQ(gemm_expected(c, all, 0).d.at(0, 0), 512);
  EXPECT_EQ(gemm_expected(c, all, 1).d.at(0, 0), 1024);
  c.exact_terms = true;
  EXPECT_EQ(gemm_expected(c, all, 0).d.at(0, 0), 514);
  c.exact_terms = false;
  c.result = Output::f32;
  EXPECT_EQ(gemm_expected(c, all, 0).d.at(0, 0), 514);
  c.operation = XD_GEMM_ALL_REDUCE;
  EXPECT_EQ(gemm_expected(c, all, 1).d.at(0, 0), 514);
  EXPECT_EQ(gemm_expected(c, all, 1).d.at(1, 0), 1024);
}

TEST(GemmReference, AddsBiasOnce) {
  GemmCase c = small_case(XD_GEMM_ALL_REDUCE);
  c.bias = Bias::like_d;
  std::vector<GemmInputs> all(2, inputs(Matrix(1, 8), Matrix(8, 8), {1, 0}));
  for (GemmInputs& in : all) in.bias = padded(matrix(1, 1, {7}), 1, 8);
  EXPECT_EQ(gemm_expected(c, all, 0).d.at(0, 0), 7);
}

TEST(GemmReference, KnowsTheCurves) {
  EXPECT_EQ(gelu(0), 0);
  EXPECT_NEAR(gelu(1), 0.8411919906, 1e-9);
  EXPECT_NEAR(gelu(-1), -0.1588080094, 1e-9);
  EXPECT_NEAR(gelu(10), 10, 1e-12);
  for (const double x : {-3.0, -0.5, 0.0, 0.25, 2.0}) {
    constexpr double kStep = 1e-5;
    EXPECT_NEAR(gelu_slope(x), (gelu(x + kStep) - gelu(x - kStep)) / (2 * kStep), 1e-8);
  }
}

TEST(GemmReference, RoundsToEightBitsWithSaturation) {
  EXPECT_EQ(rounded(17, kE4m3), 16);
  EXPECT_EQ(rounded(19, kE4m3), 20);
  EXPECT_EQ(rounded(9, kE5m2), 8);
  EXPECT_EQ(round_to(1e6, kE4m3, true), 0x7Eu);
  EXPECT_EQ(round_to(-1e6, kE5m2, true), 0xFBu);
}

// The data are numbers that their types hold.
TEST(GemmReference, GivesInputsThatNeedNoRounding) {
  for (int step = 0; step < 30; ++step) {
    GemmCase c = plain_gemm_case(3);
    c.operands = static_cast<Operands>(step % 6);
    c.values = step % 2 == 0 ? Values::integers : Values::random;
    const GemmInputs in = gemm_inputs(c, step, step % 3);
    for (const double value : in.a.values) ASSERT_EQ(rounded(value, c.a_type()), value);
    for (const double value : in.b.values) ASSERT_EQ(rounded(value, c.b_type()), value);
  }
}

}  // namespace
}  // namespace xd::test
