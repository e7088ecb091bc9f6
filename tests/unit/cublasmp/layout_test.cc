// That what cuBLASMp is told of a call means that call: a product that follows its documentation
// (matrices in columns, in blocks that are dealt out over a grid of ranks) computes it here.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "gemm/cublasmp/layout.h"
#include "gemm/cublasmp/library.h"

namespace xd::gemm::cublasmp {
namespace {

using Numbers = std::vector<float>;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// The rank that has element (i, j), and where: ScaLAPACK's layout with one block for each rank.
struct Home {
  int rank;
  std::int64_t at;
};
Home home(const Spread& s, std::int64_t i, std::int64_t j) {
  const std::int64_t along = s.parts_of_columns ? j / s.block_columns : i / s.block_rows;
  const std::int64_t row = s.parts_of_columns ? i : i % s.block_rows;
  const std::int64_t column = s.parts_of_columns ? j % s.block_columns : j;
  return {static_cast<int>(along), column * s.pitch + row};
}

float element(const Spread& s, const std::vector<Numbers>& parts, std::int64_t i, std::int64_t j) {
  const Home found = home(s, i, j);
  const Numbers& part = parts.at(index(found.rank));
  EXPECT_LT(found.at, static_cast<std::int64_t>(part.size())) << "element " << i << ", " << j;
  return found.at < static_cast<std::int64_t>(part.size()) ? part[index(found.at)] : 0;
}

// The results of cuBLASMp for a description, on all ranks at once.
std::vector<Numbers> multiply(const Description& s, const std::vector<Numbers>& first,
                              const std::vector<Numbers>& second, std::vector<Numbers> d) {
  for (std::int64_t i = 0; i < s.m; ++i) {
    for (std::int64_t j = 0; j < s.n; ++j) {
      float sum = 0;
      for (std::int64_t l = 0; l < s.k; ++l) {
        sum += (s.transpose_first ? element(s.first, first, l, i) : element(s.first, first, i, l)) *
               (s.transpose_second ? element(s.second, second, j, l)
                                   : element(s.second, second, l, j));
      }
      // With all-reduce D has the same columns once for each rank.
      const bool all = (s.epilogue & mp::kEpilogueAllReduce) != 0;
      for (std::int64_t copy = 0; copy < (all ? s.d.columns / s.n : 1); ++copy) {
        const Home to = home(s.d, i, j + copy * s.n);
        d.at(index(to.rank)).at(index(to.at)) = sum;
      }
    }
  }
  return d;
}

struct Case {
  xd_gemm_operation operation;
  int ranks;
  std::int64_t tokens, n, k;
  bool transpose_a, transpose_b;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << "operation " << c.operation << " of " << c.ranks << " ranks, " << c.tokens
       << " tokens, N " << c.n << ", K " << c.k << ", transposed " << c.transpose_a
       << c.transpose_b;
}

class CublasMpLayout : public testing::TestWithParam<Case> {
 protected:
  static bool gathers() { return GetParam().operation == XD_GEMM_ALL_GATHER; }
  static bool scatters() { return GetParam().operation == XD_GEMM_REDUCE_SCATTER; }

  CublasMpLayout() {
    const Case& c = GetParam();
    config_.ranks = c.ranks;
    for (int r = 0; r < c.ranks; ++r) {
      starts_.push_back(starts_.back() + local_size(c.tokens, r, c.ranks));
    }
  }
  std::int64_t own_tokens(int rank) const {
    return starts_[index(rank) + 1] - starts_[index(rank)];
  }
  ProductCall call(int rank) const {
    const Case& c = GetParam();
    ProductCall call{.operation = c.operation};
    call.a.type = call.b.type = call.d.type = DType::f32;
    call.transpose_a = c.transpose_a;
    call.transpose_b = c.transpose_b;
    call.algo = XD_GEMM_ALGO_CUBLASMP;
    call.a_rows = gathers() ? own_tokens(rank) : c.tokens;
    call.n = c.n;
    call.k = c.k;
    if (c.operation != XD_GEMM_ALL_REDUCE) call.shares = Shares(starts_);
    return call;
  }
  // Element (token, l) of a, of all tokens, and (l, column) of b, on a rank.
  static float a(int rank, std::int64_t token, std::int64_t l) {
    const std::int64_t of = gathers() ? 0 : rank + 1;  // gathered tokens differ by number alone
    return static_cast<float>((token * 7 + l * 3 + of * 5) % 11 - 5);
  }
  static float b(int rank, std::int64_t l, std::int64_t column) {
    return static_cast<float>((column * 5 + l * 2 + std::int64_t{rank} * 3) % 13 - 6);
  }
  Numbers stored_a(int rank) const {
    const Case& c = GetParam();
    const std::int64_t rows = gathers() ? own_tokens(rank) : c.tokens;
    const std::int64_t first = gathers() ? starts_[index(rank)] : 0;
    Numbers all(index(rows * c.k));
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t l = 0; l < c.k; ++l) {
        all[index(c.transpose_a ? l * rows + i : i * c.k + l)] = a(rank, first + i, l);
      }
    }
    return all;
  }
  static Numbers stored_b(int rank) {
    const Case& c = GetParam();
    Numbers all(index(c.n * c.k));
    for (std::int64_t l = 0; l < c.k; ++l) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        all[index(c.transpose_b ? j * c.k + l : l * c.n + j)] = b(rank, l, j);
      }
    }
    return all;
  }
  Numbers expected_d(int rank) const {
    const Case& c = GetParam();
    const std::int64_t first = scatters() ? starts_[index(rank)] : 0;
    const std::int64_t rows = scatters() ? own_tokens(rank) : c.tokens;
    Numbers d;
    for (std::int64_t i = first; i < first + rows; ++i) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        float sum = 0;
        for (int r = gathers() ? rank : 0; r < (gathers() ? rank + 1 : c.ranks); ++r) {
          for (std::int64_t l = 0; l < c.k; ++l) sum += a(r, i, l) * b(r, l, j);
        }
        d.push_back(sum);
      }
    }
    return d;
  }

  Config config_;
  std::vector<std::int64_t> starts_{0};
};

// The rules of cublasMpMatmul for blocks of what it multiplies.
void expect_fitting_blocks(const Description& s) {
  const Spread &a = s.first, &b = s.second;
  EXPECT_EQ(s.transpose_first ? a.block_rows : a.block_columns,
            s.transpose_second ? b.block_columns : b.block_rows);
  EXPECT_EQ(s.transpose_first ? a.block_columns : a.block_rows, s.d.block_rows);
  EXPECT_EQ(s.transpose_second ? b.block_rows : b.block_columns, s.d.block_columns);
  for (const Spread* m : {&s.first, &s.second, &s.d}) {
    EXPECT_GT(m->block_rows, 0);
    EXPECT_GT(m->block_columns, 0);
    EXPECT_GT(m->pitch, 0);
  }
}

TEST_P(CublasMpLayout, MeansTheCall) {
  const int ranks = GetParam().ranks;
  // Pitches may differ by rank: each rank's part is looked at as that rank describes it.
  std::vector<Numbers> first, second, poisoned;
  for (int r = 0; r < ranks; ++r) {
    first.push_back(stored_b(r));
    second.push_back(stored_a(r));
    poisoned.emplace_back(expected_d(r).size(), -12345.0f);
  }
  // The last ranks' parts may be smaller, and then rows of a transposed a lie closer there.
  for (int r = 1; r < ranks; ++r) {
    const Spread all = describe(call(0), config_, DType::f32, false).second;
    const Spread own = describe(call(r), config_, DType::f32, false).second;
    if (own.pitch == all.pitch) continue;
    Numbers& part = second[index(r)];
    Numbers wide(part.size() / index(own.pitch) * index(all.pitch));
    for (std::size_t i = 0; i < part.size(); ++i) {
      wide[i / index(own.pitch) * index(all.pitch) + i % index(own.pitch)] = part[i];
    }
    part = wide;
  }
  const Description description = describe(call(0), config_, DType::f32, false);
  expect_fitting_blocks(description);
  EXPECT_EQ(obstacle(call(0), config_, {.version = 1000}), "");
  const std::vector<Numbers> d = multiply(description, first, second, poisoned);
  for (int r = 0; r < ranks; ++r) EXPECT_EQ(d[index(r)], expected_d(r)) << "rank " << r;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const std::int64_t tokens : {12, 10, 1}) {
      for (const auto& [a, b] : {std::pair{false, true}, {false, false}, {true, false}}) {
        all.push_back({XD_GEMM_ALL_GATHER, ranks, tokens, 5, 3, a, b});
        all.push_back({XD_GEMM_REDUCE_SCATTER, ranks, tokens, 5, 3, a, b});
      }
      all.push_back({XD_GEMM_ALL_REDUCE, ranks, tokens, 5, 3, false, true});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cases, CublasMpLayout, testing::ValuesIn(cases()));

// ---- Calls that cuBLASMp cannot do
// ---------------------------------------------------------------

class CublasMpObstacle : public testing::Test {
 protected:
  CublasMpObstacle() { config_.ranks = 2; }
  ProductCall call(xd_gemm_operation operation, xd_gemm_algo algo = XD_GEMM_ALGO_CUBLASMP) {
    ProductCall call{.operation = operation};
    call.algo = algo;
    call.shares = Shares(starts_);
    return call;
  }
  void expect(const ProductCall& call, const std::string& part, const Abilities& abilities) {
    const std::string found = obstacle(call, config_, abilities);
    EXPECT_NE(found.find(part), std::string::npos) << "'" << found << "' says no '" << part << "'";
  }

  Config config_;
  std::vector<std::int64_t> starts_{0, 4, 8};
  const Abilities old_{.version = 901, .multicast = true};
  const Abilities all_{.version = 1000, .multicast = true};
  const Abilities no_multicast_{.version = 1000, .multicast = false};
};

TEST_F(CublasMpObstacle, IsToldByAlgorithm) {
  const auto gather = XD_GEMM_ALL_GATHER;
  const auto scatter = XD_GEMM_REDUCE_SCATTER;
  const auto reduce = XD_GEMM_ALL_REDUCE;
  for (const auto algo : {XD_GEMM_ALGO_CUBLASMP, XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P,
                          XD_GEMM_ALGO_CUBLASMP_ATOMIC_P2P, XD_GEMM_ALGO_CUBLASMP_NO_OVERLAP}) {
    for (const auto operation : {gather, scatter, reduce}) {
      EXPECT_EQ(obstacle(call(operation, algo), config_, no_multicast_), "");
    }
  }
  const auto split = XD_GEMM_ALGO_CUBLASMP_SPLIT_MULTICAST;
  const auto atomic = XD_GEMM_ALGO_CUBLASMP_ATOMIC_MULTICAST;
  const auto fused = XD_GEMM_ALGO_CUBLASMP_FUSED;
  expect(call(gather, split), "sums over ranks only", all_);
  expect(call(reduce, atomic), "reduce_scatter only", all_);
  expect(call(scatter, fused), "all_reduce only", all_);
  expect(call(reduce, fused), "needs cuBLASMp 0.10.0 or later, found 0.9.1", old_);
  for (const auto& [operation, algo] :
       {std::pair{scatter, split}, {scatter, atomic}, {reduce, fused}}) {
    EXPECT_EQ(obstacle(call(operation, algo), config_, all_), "");
    expect(call(operation, algo), "NVLink multicast", no_multicast_);
  }
}

TEST_F(CublasMpObstacle, IsToldByCall) {
  ProductCall product = call(XD_GEMM_ALL_REDUCE);
  product.transpose_b = false;
  expect(product, "transpose_b = 1 in all_reduce", all_);

  starts_ = {0, 3, 8};  // cuBLASMp deals 8 tokens out as 4 and 4
  expect(call(XD_GEMM_REDUCE_SCATTER), "ceil(M / W)", all_);
  starts_ = {0, 4, 7};
  EXPECT_EQ(obstacle(call(XD_GEMM_REDUCE_SCATTER), config_, all_), "");

  product = call(XD_GEMM_ALL_GATHER);
  product.gathered.given = true;
  expect(product, "gathered", all_);
  product = call(XD_GEMM_ALL_GATHER);
  product.scaling = Scaling::tensor;
  product.b_scale.given = true;
  EXPECT_EQ(obstacle(product, config_, all_), "");
  product.a_scale.given = true;
  expect(product, "a_scale", all_);
  product.operation = XD_GEMM_REDUCE_SCATTER;
  EXPECT_EQ(obstacle(product, config_, all_), "");
  for (const auto algo :
       {XD_GEMM_ALGO_CUBLASMP_ATOMIC_P2P, XD_GEMM_ALGO_CUBLASMP_ATOMIC_MULTICAST}) {
    product.algo = algo;
    expect(product, "scales of the rank that keeps it", all_);
    product.a_scale.given = false;
    expect(product, "scales of the rank that keeps it", all_);
    product.b_scale.given = false;
    EXPECT_EQ(obstacle(product, config_, all_), "");
    product.a_scale.given = product.b_scale.given = true;
  }
  config_.ranks = 1;
  starts_ = {0, 7};
  product.shares = Shares(starts_);
  EXPECT_EQ(obstacle(product, config_, all_), "");
  config_.ranks = 2;
  starts_ = {0, 4, 7};
  product.shares = Shares(starts_);
  product.algo = XD_GEMM_ALGO_CUBLASMP;
  product.scaling = Scaling::rows;
  expect(product, "one number", all_);
  config_.keep_gathered = true;
  expect(call(XD_GEMM_ALL_GATHER), "keep_gathered", all_);
}

}  // namespace
}  // namespace xd::gemm::cublasmp
