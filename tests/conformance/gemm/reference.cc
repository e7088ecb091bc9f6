#include "conformance/gemm/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "support/random.h"

namespace xd::test {
namespace {

constexpr std::int64_t kScaleBlock = 128;

enum class Input : std::uint64_t { a, b, a_scale, b_scale, c, pre_activation, bias, d_scale };

// Fills matrices of one rank in one call.
class Numbers {
 public:
  Numbers(const GemmCase& c, int step, int rank)
      : random_(c.values == Values::random),
        seed_(mix(c.seed, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(rank))) {}

  // Whole numbers of magnitude <= `bound`, or random numbers between -1 and 1 of the type.
  Matrix values(Input input, std::int64_t rows, std::int64_t columns, DLDataType type,
                int bound) const {
    Random random(mix(seed_, static_cast<std::uint64_t>(input)));
    Matrix matrix(rows, columns);
    for (double& value : matrix.values) {
      value = random_
                  ? rounded(2 * random.unit() - 1, type)
                  : static_cast<double>(random.below(2 * static_cast<std::uint64_t>(bound) + 1)) -
                        bound;
    }
    return matrix;
  }

  // Powers of two.
  Matrix scales(Input input, std::int64_t rows, std::int64_t columns) const {
    Random random(mix(seed_, static_cast<std::uint64_t>(input)));
    Matrix matrix(rows, columns);
    for (double& value : matrix.values) {
      value = random_ ? static_cast<float>(0.5 + random.unit())
                      : std::ldexp(1.0, static_cast<int>(random.below(3)) - 1);
    }
    return matrix;
  }

 private:
  bool random_;
  std::uint64_t seed_;
};

void set_scales(const GemmCase& c, const Numbers& numbers, GemmInputs& in) {
  const std::int64_t rows = in.a.rows, blocks = (c.k() + kScaleBlock - 1) / kScaleBlock;
  switch (c.scales()) {
    case Scaling::none:
      return;
    case Scaling::tensor:
      in.a_scale = numbers.scales(Input::a_scale, 1, 1);
      in.b_scale = numbers.scales(Input::b_scale, 1, 1);
      return;
    case Scaling::row:
      in.a_scale = numbers.scales(Input::a_scale, rows, 1);
      in.b_scale = numbers.scales(Input::b_scale, c.n(), 1);
      return;
    case Scaling::block:
      in.a_scale = numbers.scales(Input::a_scale, rows, blocks);
      in.b_scale = numbers.scales(Input::b_scale, (c.n() + kScaleBlock - 1) / kScaleBlock, blocks);
      return;
  }
}

// a and b of a rank with their scales multiplied in: [rows, K] and [K, N].
Matrix scaled_a(const GemmCase& c, const GemmInputs& in) {
  Matrix a = in.a;
  if (c.scales() == Scaling::none) return a;
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t k = 0; k < a.columns; ++k) {
      a.at(i, k) *= c.scales() == Scaling::tensor ? in.a_scale.at(0, 0)
                    : c.scales() == Scaling::row  ? in.a_scale.at(i, 0)
                                                  : in.a_scale.at(i, k / kScaleBlock);
    }
  }
  return a;
}

Matrix scaled_b(const GemmCase& c, const GemmInputs& in) {
  Matrix b = in.b;
  if (c.scales() == Scaling::none) return b;
  for (std::int64_t k = 0; k < b.rows; ++k) {
    for (std::int64_t n = 0; n < b.columns; ++n) {
      b.at(k, n) *= c.scales() == Scaling::tensor ? in.b_scale.at(0, 0)
                    : c.scales() == Scaling::row  ? in.b_scale.at(n, 0)
                                                  : in.b_scale.at(n / kScaleBlock, k / kScaleBlock);
    }
  }
  return b;
}

void append_rows(Matrix& matrix, const Matrix& more) {
  matrix.columns = more.columns;
  matrix.rows += more.rows;
  matrix.values.insert(matrix.values.end(), more.values.begin(), more.values.end());
}

// The sum over K, times alpha: all_gather.
Matrix gathered_product(const GemmCase& c, const std::vector<GemmInputs>& inputs, int rank) {
  Matrix all(0, c.k());
  for (const GemmInputs& in : inputs) append_rows(all, scaled_a(c, in));
  Matrix sums(all.rows, c.n());
  multiply_add(sums, all, scaled_b(c, inputs[static_cast<std::size_t>(rank)]));
  for (double& value : sums.values) value *= c.alpha;
  return sums;
}

// The sum over ranks of their rounded products: `count` rows from `first` on.
Matrix summed_products(const GemmCase& c, const std::vector<GemmInputs>& inputs, std::int64_t first,
                       std::int64_t count, double& norm) {
  Matrix sums(count, c.n());
  for (const GemmInputs& in : inputs) {
    Matrix part(count, c.n());
    multiply_add(part, rows_of(scaled_a(c, in), first, count), scaled_b(c, in));
    for (std::size_t i = 0; i < sums.values.size(); ++i) {
      sums.values[i] += rounded(part.values[i] * c.alpha, c.term_type());
      norm = std::hypot(norm, part.values[i] * c.alpha);
    }
  }
  return sums;
}

double activated(xd_gemm_epilogue epilogue, double x, double pre_activation) {
  switch (epilogue) {
    case XD_GEMM_EPILOGUE_NONE:
      return x;
    case XD_GEMM_EPILOGUE_GELU:
      return gelu(x);
    case XD_GEMM_EPILOGUE_DGELU:
      return x * gelu_slope(pre_activation);
    case XD_GEMM_EPILOGUE_RELU:
      return std::max(x, 0.0);
    case XD_GEMM_EPILOGUE_DRELU:
      return pre_activation > 0 ? x : 0;
  }
  return x;
}

}  // namespace

Matrix transposed(const Matrix& matrix) {
  Matrix result(matrix.columns, matrix.rows);
  for (std::int64_t i = 0; i < matrix.rows; ++i) {
    for (std::int64_t j = 0; j < matrix.columns; ++j) result.at(j, i) = matrix.at(i, j);
  }
  return result;
}

Matrix rows_of(const Matrix& matrix, std::int64_t first, std::int64_t count) {
  Matrix result(count, matrix.columns);
  std::copy_n(matrix.values.begin() + first * matrix.columns, count * matrix.columns,
              result.values.begin());
  return result;
}

Format number_format(DLDataType type) {
  constexpr Format kFormatE5m2{1, 5, 2, true};
  if (type.bits == 8) return type.code == kE4m3.code ? kFormatE4m3 : kFormatE5m2;
  return format_of(type);
}

std::uint32_t round_to(double value, DLDataType type, bool saturating) {
  if (type.bits == 32) return std::bit_cast<std::uint32_t>(static_cast<float>(value));
  const Format format = number_format(type);
  const double largest = static_cast<double>(decode(format.max_finite(), format));
  if (saturating) value = std::clamp(value, -largest, largest);
  return encode(static_cast<float>(value), format);
}

double rounded(double value, DLDataType type) {
  if (type.bits == 32) return static_cast<float>(value);
  return static_cast<double>(decode(round_to(value, type), number_format(type)));
}

std::vector<std::byte> codes_of(const Matrix& matrix, DLDataType type, bool saturating) {
  const std::size_t size = element_bytes(type);
  std::vector<std::byte> codes(matrix.values.size() * size);
  for (std::size_t i = 0; i < matrix.values.size(); ++i) {
    const std::uint32_t code = round_to(matrix.values[i], type, saturating);
    std::memcpy(&codes[i * size], &code, size);  // little-endian
  }
  return codes;
}

Matrix decoded(const std::vector<std::byte>& codes, std::int64_t rows, std::int64_t columns,
               DLDataType type) {
  Matrix matrix(rows, columns);
  const std::size_t size = element_bytes(type);
  for (std::size_t i = 0; i < matrix.values.size(); ++i) {
    std::uint32_t code = 0;
    std::memcpy(&code, &codes[i * size], size);
    matrix.values[i] = type.bits == 32 ? static_cast<double>(std::bit_cast<float>(code))
                                       : static_cast<double>(decode(code, number_format(type)));
  }
  return matrix;
}

double gelu(double x) {
  const double inner = std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
  return x / 2 * (1 + std::tanh(inner));
}

double gelu_slope(double x) {
  const double factor = std::sqrt(2 / 3.14159265358979323846);
  const double tanh = std::tanh(factor * (x + 0.044715 * x * x * x));
  return (1 + tanh) / 2 + x / 2 * (1 - tanh * tanh) * factor * (1 + 3 * 0.044715 * x * x);
}

void multiply_add(Matrix& out, const Matrix& a, const Matrix& b) {
  const auto columns = static_cast<std::size_t>(b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    double* const row = out.values.data() + i * out.columns;
    for (std::int64_t k = 0; k < a.columns; ++k) {
      const double factor = a.at(i, k);
      const double* const other = b.values.data() + k * b.columns;
      for (std::size_t n = 0; n < columns; ++n) row[n] += factor * other[n];
    }
  }
}

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::int64_t sum_before(const std::vector<std::int64_t>& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

GemmInputs gemm_inputs(const GemmCase& c, int step, int rank) {
  GemmInputs in;
  in.tokens = c.tokens_of(step);
  const std::int64_t own = in.tokens[static_cast<std::size_t>(rank)], all = sum_of(in.tokens);
  const Numbers numbers(c, step, rank);
  // All ranks of an all-reduce compute the same rows of d.
  const Numbers shared(c, step, c.operation == XD_GEMM_ALL_REDUCE ? 0 : rank);
  const std::int64_t rows = c.gathers() ? own : all;
  const std::int64_t d_rows = c.operation == XD_GEMM_REDUCE_SCATTER ? own : all;
  in.a = numbers.values(Input::a, rows, c.k(), c.a_type(), 8);
  in.b = numbers.values(Input::b, c.k(), c.n(), c.b_type(), 8);
  set_scales(c, numbers, in);
  if (c.addend != Addend::none) {
    in.c = shared.values(Input::c, d_rows, c.n(), c.side_type(), c.curved() ? 3 : 100);
  }
  if (c.reads_pre_activation()) {
    in.pre_activation = shared.values(Input::pre_activation, d_rows, c.n(), c.side_type(), 3);
  }
  if (c.bias != Bias::none) {
    in.bias = shared.values(Input::bias, 1, c.n(), c.bias == Bias::f32 ? kF32 : c.side_type(),
                            c.curved() ? 3 : 50);
  }
  if (c.scaled_output()) in.d_scale = shared.scales(Input::d_scale, 1, 1).at(0, 0);
  return in;
}

void finish_expected(const GemmCase& c, const GemmInputs& mine, GemmExpected& expected) {
  Matrix& x = expected.x;
  expected.d = Matrix(x.rows, x.columns);
  expected.bias_grad = Matrix(1, x.columns);
  for (std::int64_t i = 0; i < x.rows; ++i) {
    for (std::int64_t n = 0; n < x.columns; ++n) {
      if (c.beta() != 0) x.at(i, n) += static_cast<double>(c.beta()) * mine.c.at(i, n);
      if (c.bias != Bias::none) x.at(i, n) += mine.bias.at(0, n);
      const double before = c.reads_pre_activation() ? mine.pre_activation.at(i, n) : 0;
      const double value = activated(c.epilogue, x.at(i, n), before);
      expected.d.at(i, n) = value;
      expected.norm = std::hypot(expected.norm, value);
      expected.bias_grad.at(0, n) += value;
      expected.amax = std::max(expected.amax, std::fabs(value));
    }
  }
}

namespace {

GemmExpected expected_alone(const GemmCase& c, const std::vector<GemmInputs>& inputs, int rank) {
  const GemmInputs& mine = inputs[static_cast<std::size_t>(rank)];
  GemmExpected expected;
  if (c.gathers()) {
    expected.x = gathered_product(c, inputs, rank);
  } else {
    const bool scatter = c.operation == XD_GEMM_REDUCE_SCATTER;
    expected.x = summed_products(
        c, inputs, scatter ? sum_before(mine.tokens, rank) : 0,
        scatter ? mine.tokens[static_cast<std::size_t>(rank)] : sum_of(mine.tokens), expected.norm);
  }
  finish_expected(c, mine, expected);
  return expected;
}

}  // namespace

GemmExpected gemm_expected(const GemmCase& c, const std::vector<GemmInputs>& inputs, int rank) {
  GemmExpected expected = expected_alone(c, inputs, rank);
  if (c.bias_grad == BiasGrad::reduced) {
    for (int r = 0; r < c.num_ranks; ++r) {
      if (r == rank) continue;
      const Matrix other = expected_alone(c, inputs, r).bias_grad;
      for (std::int64_t n = 0; n < c.n(); ++n) expected.bias_grad.at(0, n) += other.at(0, n);
    }
  }
  if (c.gathers()) {
    expected.gathered = Matrix(0, c.k());
    for (const GemmInputs& in : inputs) {
      append_rows(expected.gathered, in.a);
      if (c.scales() != Scaling::none) append_rows(expected.gathered_scale, in.a_scale);
    }
  }
  return expected;
}

}  // namespace xd::test
