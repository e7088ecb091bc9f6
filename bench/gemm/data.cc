#include "data.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "../ranks.h"
#include "../routing.h"

namespace bench {
namespace {

constexpr std::array<float, 4> kValues{-2, -1, 1, 2};

// Calls use(k, index of a value) for each element of a row, which depends on the seed, the matrix,
// its rank and the row only.
template <class Use>
void for_each_in_row(const GemmProblem& p, char matrix, int rank, std::int64_t row, Use&& use) {
  Random random((p.seed * 2 + (matrix == 'b' ? 1 : 0)) * 1'000'003 +
                static_cast<std::uint64_t>(rank));
  Random of_row(random.next() + static_cast<std::uint64_t>(row) * 0xD1342543DE82EF95u);
  std::uint64_t bits = 0;
  for (std::int64_t k = 0; k < p.shape.k; ++k, bits >>= 2) {
    if (k % 32 == 0) bits = of_row.next();
    use(k, static_cast<std::size_t>(bits & 3));
  }
}

void fill(const GemmProblem& p, char matrix, int rank, std::int64_t first, std::int64_t rows,
          void* data) {
  std::array<std::uint32_t, kValues.size()> table{};
  std::ranges::transform(kValues, table.begin(),
                         [&](float value) { return bits_of(p.element, value); });
  auto* out = static_cast<unsigned char*>(data);
  const std::size_t bytes = p.element_bytes();
  for (std::int64_t row = first; row < first + rows; ++row) {
    for_each_in_row(p, matrix, rank, row, [&](std::int64_t, std::size_t value) {
      std::memcpy(out, &table[value], bytes);  // little endian
      out += bytes;
    });
  }
}

std::vector<float> row_of(const GemmProblem& p, char matrix, int rank, std::int64_t row) {
  std::vector<float> values(static_cast<std::size_t>(p.shape.k));
  for_each_in_row(p, matrix, rank, row, [&](std::int64_t k, std::size_t value) {
    values[static_cast<std::size_t>(k)] = kValues[value];
  });
  return values;
}

// The rank whose rows of a they are: gathered rows are one matrix, summed ones a matrix per rank.
int matrix_of(const GemmProblem& p, int rank) { return p.gathers() ? 0 : rank; }

double exact_term(const GemmProblem& p, int rank, std::int64_t token, std::int64_t column) {
  const std::vector<float> a = row_of(p, 'a', matrix_of(p, rank), token);
  const std::vector<float> b = row_of(p, 'b', rank, column);
  double sum = 0;
  for (std::size_t k = 0; k < a.size(); ++k) sum += static_cast<double>(a[k]) * b[k];
  return sum;
}

struct Expected {
  double sum = 0;
  double error = 0;  // allowed for roundings
};

// Sums of float32 are exact. Sums of other types are rounded at the end, or after each of W - 1
// additions, in any order; and so is each rank's term.
Expected expected(const GemmProblem& p, int rank, std::int64_t token, std::int64_t column,
                  Sums sums) {
  Expected all;
  for (int source = p.gathers() ? rank : 0; source <= (p.gathers() ? rank : p.ranks - 1);
       ++source) {
    const double term = exact_term(p, source, token, column);
    all.sum += term;
    all.error += std::abs(term);
  }
  const double unit = p.element == Element::fp32   ? 0
                      : p.element == Element::bf16 ? 0x1p-8
                                                   : 0x1p-11;
  // No sum on the way is larger than the terms together.
  const double rounded = sums == Sums::rounded_once ? std::abs(all.sum) : (p.ranks - 1) * all.error;
  // Roundings of what is rounded already: their number times 2^-8 at most.
  all.error = (1.01 + p.ranks * unit) * unit * (all.error + rounded);
  return all;
}

// Sums are integers, so there are no subnormal numbers.
double value_at(Element element, const void* data, std::size_t index) {
  const std::size_t bytes = element == Element::fp32 ? 4 : 2;
  std::uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const unsigned char*>(data) + index * bytes, bytes);
  if (element == Element::bf16) bits <<= 16;
  if (element == Element::fp16) {
    const std::uint32_t rest = bits & 0x7fffu;
    bits = (bits & 0x8000u) << 16 | (rest == 0 ? 0 : (rest + (112u << 10)) << 13);
  }
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace

std::int64_t GemmProblem::tokens_of(int rank) const {
  std::int64_t local = 0;
  ok(xd_gemm_local_size(tokens, rank, ranks, &local));
  return local;
}

std::int64_t GemmProblem::first_token(int rank) const {
  std::int64_t first = 0;
  for (int before = 0; before < rank; ++before) first += tokens_of(before);
  return first;
}

std::vector<std::int64_t> GemmProblem::tokens_per_rank() const {
  std::vector<std::int64_t> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(tokens_of(rank));
  return all;
}

double GemmProblem::flop() const {
  return 2.0 * static_cast<double>(tokens) * static_cast<double>(shape.n) *
         static_cast<double>(shape.k);
}

void fill_a(const GemmProblem& p, int rank, void* a) {
  if (p.gathers()) {
    fill(p, 'a', 0, p.first_token(rank), p.tokens_of(rank), a);
  } else {
    fill(p, 'a', rank, 0, p.tokens, a);
  }
}

void fill_b(const GemmProblem& p, int rank, void* b) { fill(p, 'b', rank, 0, p.shape.n, b); }

std::string check_result(const GemmProblem& p, int rank, const void* d, Sums sums) {
  const std::int64_t first = p.scatters() ? p.first_token(rank) : 0;
  const std::int64_t rows = p.scatters() ? p.tokens_of(rank) : p.tokens;
  if (rows == 0) return {};
  Random random(p.seed + static_cast<std::uint64_t>(rank));
  for (int sample = 0; sample < 32; ++sample) {
    const auto row = static_cast<std::int64_t>(random.next() % static_cast<std::uint64_t>(rows));
    const auto column =
        static_cast<std::int64_t>(random.next() % static_cast<std::uint64_t>(p.shape.n));
    const auto index = static_cast<std::size_t>(row * p.shape.n + column);
    const double got = value_at(p.element, d, index);
    const Expected want = expected(p, rank, first + row, column, sums);
    if (std::abs(got - want.sum) <= want.error) continue;  // also refuses what is no number
    return "d[" + std::to_string(row) + "," + std::to_string(column) + "] of rank " +
           std::to_string(rank) + " is " + std::to_string(got) + ", expected " +
           std::to_string(want.sum) + " +- " + std::to_string(want.error);
  }
  return {};
}

}  // namespace bench
