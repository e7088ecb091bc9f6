// Products over ranks in every combination of circumstances, by every algorithm, element for
// element.
#include <gtest/gtest.h>

#include <cstdio>
#include <ostream>
#include <string>
#include <vector>

#include "conformance/case.h"
#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"

namespace xd::test {

// For GoogleTest's messages.
void PrintTo(const GemmCase& c, std::ostream* out) { *out << c.description(); }

namespace {

// The part of a text behind the name of the function.
std::string reason_in(const std::string& text) {
  const std::size_t colon = text.find(": ");
  return colon == std::string::npos ? text : text.substr(colon + 2);
}

// True where the header leaves it to executors and algorithms whether they can.
bool may_be_unsupported(const Rank& rank, const GemmCase& c, xd_gemm_algo algo) {
  const bool always = algo == XD_GEMM_ALGO_AUTO || algo == XD_GEMM_ALGO_SEQUENTIAL;
  if (rank.memory->device().device_type == kDLCPU) return !always;
  return !always || c.fp8();
}

class Grid : public testing::TestWithParam<GemmCase> {
 protected:
  // Runs one call by one algorithm, and returns the bytes of its outputs where all algorithms that
  // say so must agree on them.
  static std::vector<std::byte> run(const Rank& rank, xd_gemm_context* context, GemmBatch& batch,
                                    xd_gemm_algo algo) {
    const GemmCase& c = GetParam();
    SCOPED_TRACE("algorithm " + std::to_string(algo));
    batch.args.algo = algo;
    xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
    const xd_status explained = xd_gemm_explain(context, c.operation, &batch.args, &info);
    const std::string why_not = explained == XD_SUCCESS ? "" : xd_last_error();
    batch.reset();
    const GemmOutcome outcome = batch.call(context);
    EXPECT_EQ(outcome, explained) << why_not;
    if (explained != XD_SUCCESS) {
      EXPECT_EQ(explained, XD_ERROR_UNSUPPORTED) << why_not;
      EXPECT_TRUE(may_be_unsupported(rank, c, algo)) << why_not;
      EXPECT_FALSE(reason_in(why_not).empty());
      EXPECT_TRUE(outcome.mentions(reason_in(why_not))) << outcome.text << "\nexplain: " << why_not;
      EXPECT_TRUE(batch.guards_intact());
      return {};
    }
    EXPECT_FALSE(algo == XD_GEMM_ALGO_DIRECT && c.gathers()) << "it is of sums";
    EXPECT_NE(info.algo, XD_GEMM_ALGO_AUTO);
    if (outcome != XD_SUCCESS) return {};
    batch.check(context);
    return info.same_bits != 0 ? batch.output_bytes() : std::vector<std::byte>();
  }
};

TEST_P(Grid, EveryElementOfEveryOutputIsRight) {
  const GemmCase& c = GetParam();
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + c.description());
    const GemmContext context = make_context(rank.comm, c.config());
    for (int step = 0; step < GemmCase::kSteps; ++step) {
      SCOPED_TRACE("call " + std::to_string(step));
      GemmBatch batch(rank, c, step);
      std::vector<std::byte> bits;
      for (const xd_gemm_algo algo : kGemmAlgos) {
        const std::vector<std::byte> own = run(rank, context.get(), batch, algo);
        if (own.empty()) continue;
        if (bits.empty()) bits = own;
        EXPECT_EQ(own, bits) << "algorithm " << algo << " says that it gives the same bits";
      }
    }
  });
}

GemmCase large_all_reduce() {
  GemmCase all = plain_gemm_case(2, XD_GEMM_ALL_REDUCE);
  all.n_units = 515;
  all.k_units = 3;
  all.token_units = 600;
  all.bias = Bias::f32;
  all.addend = Addend::in_place;
  all.epilogue = XD_GEMM_EPILOGUE_RELU;
  return all;
}

// More rows, columns and depth than are computed and sent in one piece. Two ranks show it.
std::vector<GemmCase> large_cases() {
  if (world().num_ranks() != 2) return {};
  struct Size {
    std::int64_t n, k, tokens;
    Operands operands;
  };
  constexpr Size kSizes[] = {
      {1096, 8, 260, Operands::bf16},    // tiles from row 256 and column 1024 on
      {24, 2072, 17, Operands::f32},     // pieces of K from 1024 on
      {144, 1152, 17, Operands::e4m3}};  // with scales of blocks
  std::vector<GemmCase> cases;
  for (const xd_gemm_operation operation : kGemmProducts) {
    for (const Size& size : kSizes) {
      GemmCase c = plain_gemm_case(2, operation);
      c.operands = size.operands;
      c.n_units = size.n / c.unit();
      c.k_units = size.k / c.unit();
      c.token_units = size.tokens;
      c.tokens = TokenCounts::most;
      c.scaling = Scaling::block;
      c.addend = Addend::in_place;
      c.bias = Bias::like_d;
      c.epilogue = XD_GEMM_EPILOGUE_RELU;
      c.pre_activation = true;
      c.bias_grad = BiasGrad::own;
      c.gathered = Gathered::both;
      cases.push_back(c);
    }
  }
  // Rows of a rank that fill whole units of a device's virtual memory, for products that store into
  // it: 2 MiB, as only GPUs are fast enough to test.
  if (world().memory().stream() != nullptr) {
    GemmCase c = plain_gemm_case(2, XD_GEMM_REDUCE_SCATTER);
    c.n_units = 512;
    c.k_units = 8;
    c.token_units = 256;
    c.tokens = TokenCounts::most;
    c.bias = Bias::f32;
    c.addend = Addend::added;
    c.bias_grad = BiasGrad::reduced;
    cases.push_back(c);
    c.tokens = TokenCounts::announced;
    c.seed = 17838;  // 64 and 16 tokens
    cases.push_back(c);
    // Words of which each thread pushes, sums and takes several at once, and more behind them.
    for (const xd_gemm_operation operation : {XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALL_REDUCE}) {
      GemmCase words = large_all_reduce();
      words.operation = operation;
      words.token_units = 400;
      words.tokens = TokenCounts::uneven;
      cases.push_back(words);
    }
    // More than all_reduce sends as words.
    GemmCase all = large_all_reduce();
    all.tokens = TokenCounts::uneven;
    cases.push_back(all);
  }
  return cases;
}

// Sums of more than travel as words, of which each rank writes more than D. Ranks own an odd number
// of rows. More than three ranks show no more.
std::vector<GemmCase> whole_sum_cases() {
  const int ranks = world().num_ranks();
  if (ranks < 2 || ranks > 3 || world().memory().stream() == nullptr) return {};
  std::vector<GemmCase> cases;
  for (const Output result : {Output::like_operands, Output::f32, Output::e4m3}) {
    GemmCase c = large_all_reduce();
    c.num_ranks = ranks;
    c.tokens = TokenCounts::most;
    c.result = result;
    c.token_units = (result == Output::f32 ? 603 : 1203) / ranks;
    c.n_units = 4128 / c.unit();
    c.epilogue = result == Output::f32 ? XD_GEMM_EPILOGUE_DRELU : XD_GEMM_EPILOGUE_RELU;
    if (c.scaled_output()) c.addend = Addend::added;
    c.pre_activation = true;
    c.bias_grad = BiasGrad::own;
    c.amax = true;
    cases.push_back(c);
  }
  return cases;
}

// Terms of another type than a product of the operands comes in, also more than are rounded at
// once.
std::vector<GemmCase> rounded_term_cases() {
  std::vector<GemmCase> cases;
  for (const xd_gemm_operation operation : {XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALL_REDUCE}) {
    for (const Operands operands : {Operands::bf16, Operands::f16, Operands::f32}) {
      for (const Stored stored : {Stored::nt, Stored::tn}) {
        GemmCase c = plain_gemm_case(world().num_ranks(), operation);
        c.operands = operands;
        c.result = Output::other_half;
        c.stored = stored;
        c.token_units = 40;
        c.bias = Bias::f32;
        c.bias_grad = BiasGrad::own;
        cases.push_back(c);
      }
    }
  }
  if (world().num_ranks() == 2 && world().memory().stream() != nullptr) {
    GemmCase c = plain_gemm_case(2, XD_GEMM_REDUCE_SCATTER);
    c.operands = Operands::f16;
    c.result = Output::other_half;
    c.n_units = 515;
    c.token_units = 540;
    c.tokens = TokenCounts::most;
    cases.push_back(c);
  }
  return cases;
}

std::vector<GemmCase> cases_of_this_launch() {
  if (world().reports()) {
    std::printf("XD_TEST_SEED=%llu\n", static_cast<unsigned long long>(test_seed()));
  }
  return all_gemm_cases(world().num_ranks(), world().threads());
}

std::string name_of_case(const testing::TestParamInfo<GemmCase>& instance) {
  return std::to_string(instance.index);
}

INSTANTIATE_TEST_SUITE_P(Cases, Grid, testing::ValuesIn(cases_of_this_launch()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Large, Grid, testing::ValuesIn(large_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(WholeSums, Grid, testing::ValuesIn(whole_sum_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(RoundedTerms, Grid, testing::ValuesIn(rounded_term_cases()), name_of_case);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Grid);

}  // namespace
}  // namespace xd::test
