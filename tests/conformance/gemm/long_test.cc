// Ten thousand products on end, ranks out of step by random delays, beside another context and an
// expert-parallel group: what one call leaves behind must never be taken for part of another.
#include <gtest/gtest.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/case.h"
#include "conformance/gemm/batch.h"
#include "conformance/random_delay.h"
#include "support/gtest_main.h"
#include "support/outcome.h"
#include "support/random.h"

namespace xd::test {
namespace {

constexpr int kCalls = 10000;
constexpr std::int64_t kMaxTokens = 5, kK = 8, kN = 8;

// A whole number of magnitude <= 4 for an element of a (which = 0) or b (1).
float element(int call, int which, int rank, std::int64_t row, std::int64_t column) {
  return static_cast<float>(
             mix(static_cast<std::uint64_t>(call) * 2 + static_cast<std::uint64_t>(which),
                 static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(row),
                 static_cast<std::uint64_t>(column)) %
             9) -
         4;
}

// Products of float32: every sum is exact.
class LongRun {
 public:
  explicit LongRun(const Rank& rank)
      : rank_(rank),
        delays_(static_cast<std::uint64_t>(rank.rank)),
        ranks_(rank.num_ranks),
        case_(plain_case(rank.num_ranks)),
        group_(make_group(rank.comm, case_.config(rank.rank))),
        batch_(rank, case_) {
    xd_gemm_config config = XD_GEMM_CONFIG_INIT;
    config.operations = XD_GEMM_BIT(XD_GEMM_ALL_GATHER) | XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER) |
                        XD_GEMM_BIT(XD_GEMM_ALL_REDUCE) | XD_GEMM_BIT(XD_GEMM_START_ALL_GATHER);
    config.max_tokens = kMaxTokens;
    config.max_k = kK;
    config.max_n = kN;
    config.dtype = kF32;
    for (GemmContext& context : contexts_) context = make_context(rank.comm, config);
    batch_.prepare(group_.get());
  }

  void call(int number) {
    Random chance(mix(0x10116, static_cast<std::uint64_t>(number)));
    xd_gemm_context* const context = contexts_[chance.below(2)].get();
    const xd_gemm_operation operation = kGemmProducts[chance.below(std::size(kGemmProducts))];
    tokens_.clear();
    for (int r = 0; r < ranks_; ++r) {
      tokens_.push_back(static_cast<std::int64_t>(chance.below(kMaxTokens + 1)));
    }
    random_delay(delays_);
    if (chance.one_in(16)) return interleave_a_gather(context, number);
    product(context, operation, number, chance.one_in(3));
    if (chance.one_in(8)) {
      random_delay(delays_);
      batch_.poison_outputs();
      ok(batch_.call(group_.get(), XD_EP_DISPATCH));
    }
  }

 private:
  std::vector<float> numbers(int call, int which, int rank, std::int64_t rows,
                             std::int64_t columns) const {
    std::vector<float> values;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        values.push_back(element(call, which, rank, i, j));
      }
    }
    return values;
  }

  // The row of d that is row `row` of the operation's M rows.
  float expected(xd_gemm_operation operation, int call, std::int64_t row, std::int64_t n) const {
    float sum = 0;
    if (operation == XD_GEMM_ALL_GATHER) {
      int source = 0;
      while (row >= tokens_[static_cast<std::size_t>(source)]) {
        row -= tokens_[static_cast<std::size_t>(source++)];
      }
      for (std::int64_t k = 0; k < kK; ++k) {
        sum += element(call, 0, source, row, k) * element(call, 1, rank_.rank, n, k);
      }
      return sum;
    }
    for (int r = 0; r < ranks_; ++r) {
      for (std::int64_t k = 0; k < kK; ++k) {
        sum += element(call, 0, r, row, k) * element(call, 1, r, n, k);
      }
    }
    return sum;
  }

  void product(xd_gemm_context* context, xd_gemm_operation operation, int number, bool other) {
    const std::int64_t own = tokens_[static_cast<std::size_t>(rank_.rank)], all = sum_of(tokens_);
    const std::int64_t rows = operation == XD_GEMM_ALL_GATHER ? own : all;
    const std::int64_t d_rows = operation == XD_GEMM_REDUCE_SCATTER ? own : all;
    // Ranks change between memory that peers reach and other memory, each at its own pace.
    const Place place = (number / (rank_.rank + 1)) % 2 == 0 ? Place::ordinary : Place::symmetric;
    Tensor a(rank_, kF32, {rows, kK}, place), b(rank_, kF32, {kN, kK}),
        d(rank_, kF32, {d_rows, kN});
    a.write(numbers(number, 0, rank_.rank, rows, kK));
    b.write(numbers(number, 1, rank_.rank, kN, kK));
    xd_gemm_args args = XD_GEMM_ARGS_INIT;
    args.a = a.dl();
    args.b = b.dl();
    args.d = d.dl();
    args.tokens_per_rank = tokens_.data();
    args.algo = other ? XD_GEMM_ALGO_SEQUENTIAL : XD_GEMM_ALGO_AUTO;
    ok(finish(rank_, context, call_product(context, operation, args, rank_.stream())));
    const std::vector<float> got = d.read_as<float>();
    const std::int64_t first =
        operation == XD_GEMM_REDUCE_SCATTER ? sum_before(tokens_, rank_.rank) : 0;
    for (std::int64_t i = 0; i < d_rows * kN; ++i) {
      const float want = expected(operation, number, first + i / kN, i % kN);
      if (got[static_cast<std::size_t>(i)] == want) continue;
      throw std::runtime_error("call " + std::to_string(number) + " (" + name_of(operation) +
                               ") element " + std::to_string(i) + ": got " +
                               std::to_string(got[static_cast<std::size_t>(i)]) + ", expected " +
                               std::to_string(want));
    }
  }

  // A gather under way in one context, and a product of the other one beside it.
  void interleave_a_gather(xd_gemm_context* context, int number) {
    const std::int64_t own = tokens_[static_cast<std::size_t>(rank_.rank)];
    Tensor in(rank_, kF32, {own, kK}), out(rank_, kF32, {sum_of(tokens_), kK});
    in.write(numbers(number, 0, rank_.rank, own, kK));
    const std::vector<std::int64_t> counts = tokens_;
    xd_gemm_gather_args args = XD_GEMM_GATHER_ARGS_INIT;
    args.in = in.dl();
    args.out = out.dl();
    args.tokens_per_rank = counts.data();
    ok(xd_gemm_start_all_gather(context, &args, rank_.stream()));
    random_delay(delays_);
    xd_gemm_context* const other =
        context == contexts_[0].get() ? contexts_[1].get() : contexts_[0].get();
    product(other, XD_GEMM_REDUCE_SCATTER, number, false);
    ok(finish(rank_, context, xd_gemm_wait(context, rank_.stream())));
    std::vector<float> want;
    for (int r = 0; r < ranks_; ++r) {
      const auto rows = numbers(number, 0, r, counts[static_cast<std::size_t>(r)], kK);
      want.insert(want.end(), rows.begin(), rows.end());
    }
    if (out.read_as<float>() != want) {
      throw std::runtime_error("call " + std::to_string(number) + ": wrong rows were gathered");
    }
  }

  const Rank& rank_;
  Random delays_;
  int ranks_;
  Case case_;
  Group group_;
  Batch batch_;
  GemmContext contexts_[2];
  std::vector<std::int64_t> tokens_;
};

TEST(LongRun, TenThousandProductsWithRandomTokensAndDelays) {
  on_every_rank([](Rank& rank) {
    LongRun run(rank);
    for (int number = 0; number < kCalls; ++number) {
      run.call(number);
      if (rank.rank == 0 && (number + 1) % 2000 == 0) {
        std::printf("%d of %d calls\n", number + 1, kCalls);
        std::fflush(stdout);
      }
    }
  });
}

}  // namespace
}  // namespace xd::test
