// The results that a product over ranks must give, by plain loops in double. No code of the
// library.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "conformance/gemm/case.h"
#include "conformance/numeric.h"

namespace xd::test {

// Numbers of a matrix, row by row.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<double> values;

  Matrix() = default;
  Matrix(std::int64_t row_count, std::int64_t column_count)
      : rows(row_count),
        columns(column_count),
        values(static_cast<std::size_t>(row_count * column_count)) {}
  double& at(std::int64_t row, std::int64_t column) {
    return values[static_cast<std::size_t>(row * columns + column)];
  }
  double at(std::int64_t row, std::int64_t column) const {
    return values[static_cast<std::size_t>(row * columns + column)];
  }
};

Matrix transposed(const Matrix& matrix);
// `count` rows from `first` on.
Matrix rows_of(const Matrix& matrix, std::int64_t first, std::int64_t count);

// bf16, fp16, fp32, and the two fp8.
Format number_format(DLDataType type);
// The number of this type that is nearest to `value`, ties to even. `saturating`: a value that is
// too large becomes the largest number.
std::uint32_t round_to(double value, DLDataType type, bool saturating = false);
double rounded(double value, DLDataType type);

std::vector<std::byte> codes_of(const Matrix& matrix, DLDataType type, bool saturating = false);
Matrix decoded(const std::vector<std::byte>& codes, std::int64_t rows, std::int64_t columns,
               DLDataType type);

double gelu(double x);
double gelu_slope(double x);

// out += a * b, [rows, K] * [K, columns].
void multiply_add(Matrix& out, const Matrix& a, const Matrix& b);

// Inputs of one rank in one call: numbers that their types hold, whatever the case says about
// storage. Every rank can compute those of every other.
struct GemmInputs {
  std::vector<std::int64_t> tokens;  // of all ranks
  Matrix a, b;                       // [rows of tokens, K], [K, N]
  Matrix a_scale, b_scale;           // as the tensors are; empty = none
  Matrix c, pre_activation;          // shape of d; empty = not read
  Matrix bias;                       // [1, N]; empty = none
  double d_scale = 1;
};
GemmInputs gemm_inputs(const GemmCase& c, int step, int rank);

// The results that one rank must get.
struct GemmExpected {
  Matrix x;          // before the activation
  Matrix d;          // before d_scale and rounding
  Matrix bias_grad;  // [1, N]
  double amax = 0;
  // Norm of all numbers that were rounded on their way to d: the measure of errors of random data.
  double norm = 0;
  Matrix gathered;        // [M, K]
  Matrix gathered_scale;  // as a_scale with M rows, or one per rank; empty = none
};
// `inputs` are those of all ranks.
GemmExpected gemm_expected(const GemmCase& c, const std::vector<GemmInputs>& inputs, int rank);

// Computes the steps after the sum: d, bias_grad (of this rank alone) and amax of x. Fills in the
// rest.
void finish_expected(const GemmCase& c, const GemmInputs& mine, GemmExpected& expected);

std::int64_t sum_of(const std::vector<std::int64_t>& counts);
std::int64_t sum_before(const std::vector<std::int64_t>& counts, int rank);

}  // namespace xd::test
