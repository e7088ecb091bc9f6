// Products by cuBLASMp: every element where it runs, and what is missing where it does not.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr std::int64_t kMostUnits = 40, kMostTokens = 48;

xd_gemm_config config_for_cublasmp() {
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.num_ranks = world().num_ranks();
  config.max_tokens = kMostTokens;
  config.max_k = config.max_n = kMostUnits * 16;
  config.dtype = {kDLFloat, 32, 1};
  config.algo = XD_GEMM_ALGO_CUBLASMP;
  return config;
}

// The part of a text between the name of the function and the rank.
std::string reason_in(const std::string& text) {
  const std::size_t colon = text.find(": ");
  const std::size_t begin = colon == std::string::npos ? 0 : colon + 2;
  return text.substr(begin, text.rfind(" [rank ") - begin);
}

// Collective. True where a context for cuBLASMp can be made; else every rank is told why not.
bool is_there(const Rank& rank, std::string& reason) {
  const xd_gemm_config config = config_for_cublasmp();
  xd_gemm_context* made = nullptr;
  const xd_status status = xd_gemm_context_create(rank.comm, &config, &made);
  const GemmContext context(made);
  if (status == XD_SUCCESS) return true;
  EXPECT_EQ(status, XD_ERROR_UNSUPPORTED) << xd_last_error();
  reason = reason_in(xd_last_error());
  return false;
}

TEST(CublasMp, IsRefusedWithWhatIsMissing) {
  on_every_rank([](Rank& rank) {
    std::string reason;
    if (is_there(rank, reason)) return;
    const char* feature = nullptr;
    const bool available = xd_feature_available(XD_FEATURE_CUBLASMP, &feature) != 0;
    if (rank.memory->device().device_type == kDLCPU) {
      EXPECT_NE(reason.find("CUDA"), std::string::npos) << reason;
    } else if (available) {
      const bool shared = reason.find("share one") != std::string::npos;
      EXPECT_TRUE(shared || reason.find("cannot use cuBLASMp") != std::string::npos) << reason;
    } else {
      EXPECT_EQ(reason, feature);
    }
  });
}

// A context that may fall back is made, says in explain() what is missing, and computes.
TEST(CublasMp, GivesWayWhereTheContextMayFallBack) {
  on_every_rank([](Rank& rank) {
    std::string reason;
    if (is_there(rank, reason)) return;
    GemmCase c = plain_gemm_case(rank.num_ranks);
    xd_gemm_config config = c.config();
    config.algo = XD_GEMM_ALGO_CUBLASMP;
    config.allow_fallback = 1;
    const GemmContext context = make_context(rank.comm, config);
    GemmBatch batch(rank, c, 0);
    xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
    ASSERT_EQ(xd_gemm_explain(context.get(), c.operation, &batch.args, &info), XD_SUCCESS)
        << xd_last_error();
    EXPECT_LE(info.algo, XD_GEMM_ALGO_SEQUENTIAL);
    const std::string text = info.text;
    const std::size_t line = text.find("\nCUBLASMP: ");
    ASSERT_NE(line, std::string::npos) << text;
    if (rank.memory->device().device_type == kDLCUDA) {
      EXPECT_NE(text.find(reason, line), std::string::npos) << text;
    }
    batch.call_and_check(context.get());
  });
}

// A context that was not made for it has no communicator of NCCL.
TEST(CublasMp, IsForContextsThatAreMadeForIt) {
  on_every_rank([](Rank& rank) {
    const GemmCase c = plain_gemm_case(rank.num_ranks, XD_GEMM_REDUCE_SCATTER);
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    batch.args.algo = XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P;
    const GemmOutcome outcome = batch.call(context.get());
    EXPECT_EQ(outcome, XD_ERROR_UNSUPPORTED);
    EXPECT_TRUE(outcome.mentions("CUBLASMP_SPLIT_P2P")) << outcome.text;
    EXPECT_TRUE(batch.guards_intact());
    batch.args.algo = XD_GEMM_ALGO_AUTO;
    batch.reset();
    batch.call_and_check(context.get());
  });
}

std::vector<GemmCase> cases_of(xd_gemm_operation operation) {
  std::vector<GemmCase> cases;
  GemmCase plain = plain_gemm_case(world().num_ranks(), operation);
  plain.tokens = TokenCounts::equal;
  plain.token_units = 6;  // of up to 8 tokens
  plain.n_units = 9;
  plain.k_units = 5;
  const auto add = [&](auto&& change) {
    GemmCase c = plain;
    change(c);
    cases.push_back(c);
  };
  add([](GemmCase&) {});
  add([](GemmCase& c) { c.stored = Stored::nn; });
  add([](GemmCase& c) { c.stored = Stored::tn; });
  add([](GemmCase& c) { c.operands = Operands::f16; });
  add([](GemmCase& c) { c.operands = Operands::f32; });
  add([](GemmCase& c) { c.result = Output::f32; });
  add([](GemmCase& c) { c.alpha = -2; });
  add([](GemmCase& c) { c.bias = Bias::like_d; });
  add([](GemmCase& c) {
    c.bias = Bias::like_d;
    c.addend = Addend::added;
    c.epilogue = XD_GEMM_EPILOGUE_RELU;
  });
  add([](GemmCase& c) { c.addend = Addend::in_place; });
  add([](GemmCase& c) {
    c.bias = Bias::f32;
    c.epilogue = XD_GEMM_EPILOGUE_RELU;
    c.pre_activation = true;
    c.bias_grad = BiasGrad::own;
    c.amax = true;
  });
  add([](GemmCase& c) { c.epilogue = XD_GEMM_EPILOGUE_DRELU; });
  if (operation != XD_GEMM_ALL_REDUCE) {
    add([](GemmCase& c) { c.bias_grad = BiasGrad::reduced; });
  }
  add([](GemmCase& c) { c.operands = Operands::e4m3; });
  add([](GemmCase& c) {
    c.operands = Operands::e5m2_e4m3;
    c.result = Output::e4m3;
    c.scaling = Scaling::tensor;
    c.amax = true;
  });
  for (const TokenCounts tokens : {TokenCounts::announced, TokenCounts::uneven, TokenCounts::few,
                                   TokenCounts::one, TokenCounts::none}) {
    add([&](GemmCase& c) { c.tokens = tokens; });
  }
  add([](GemmCase& c) {
    c.values = Values::random;
    c.n_units = c.k_units = kMostUnits;
    c.token_units = kMostTokens;
    c.tokens = TokenCounts::most;
  });
  return cases;
}

class ByCublasMp : public testing::TestWithParam<xd_gemm_operation> {};

// A rank may find alone that cuBLASMp cannot do a call; then every rank has the same reason.
TEST_P(ByCublasMp, EveryElementOfEveryOutputIsRight) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUBLASMP, &reason) == 0) GTEST_SKIP() << reason;
  on_every_rank([](Rank& rank) {
    std::string missing;
    if (!is_there(rank, missing)) return;
    const GemmContext context = make_context(rank.comm, config_for_cublasmp());
    int computed = 0;
    for (const GemmCase& c : cases_of(GetParam())) {
      for (int algo = XD_GEMM_ALGO_CUBLASMP; algo <= XD_GEMM_ALGO_CUBLASMP_FUSED; ++algo) {
        SCOPED_TRACE(c.description() + " by algorithm " + std::to_string(algo));
        GemmBatch batch(rank, c, 0);
        batch.args.algo = static_cast<xd_gemm_algo>(algo);
        xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
        const xd_status explained = xd_gemm_explain(context.get(), c.operation, &batch.args, &info);
        const std::string why_not = explained == XD_SUCCESS ? "" : xd_last_error();
        const GemmOutcome outcome = batch.call(context.get());
        ASSERT_EQ(outcome, explained) << why_not;
        if (explained != XD_SUCCESS) {
          EXPECT_EQ(explained, XD_ERROR_UNSUPPORTED) << why_not;
          EXPECT_TRUE(outcome.mentions(reason_in(why_not))) << outcome.text;
          continue;
        }
        EXPECT_EQ(info.algo, algo);
        EXPECT_EQ(info.same_bits, 0);
        batch.check(context.get());
        ++computed;
      }
    }
    EXPECT_GE(computed, 4 * 10) << "most cases cannot be what it does not support";
  });
}

// Its calls take turns with those of the library's own algorithms, which wait for nothing of it.
TEST_P(ByCublasMp, TakesTurnsWithTheLibrarysOwnAlgorithms) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUBLASMP, &reason) == 0) GTEST_SKIP() << reason;
  on_every_rank([](Rank& rank) {
    std::string missing;
    if (!is_there(rank, missing)) return;
    const GemmContext context = make_context(rank.comm, config_for_cublasmp());
    GemmCase c = plain_gemm_case(rank.num_ranks, GetParam());
    c.tokens = TokenCounts::equal;
    GemmBatch batch(rank, c, 0);
    const xd_gemm_algo order[] = {XD_GEMM_ALGO_SEQUENTIAL,         XD_GEMM_ALGO_CUBLASMP,
                                  XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P, XD_GEMM_ALGO_CUBLASMP,
                                  XD_GEMM_ALGO_SEQUENTIAL,         XD_GEMM_ALGO_CUBLASMP};
    for (int round = 0; round < 3; ++round) {
      for (const xd_gemm_algo algo : order) {
        batch.args.algo = algo;
        batch.reset();
        batch.call_and_check(context.get());
      }
      // A mistake on one rank is heard of by all, and the context stays usable.
      batch.args.algo = XD_GEMM_ALGO_CUBLASMP;
      const DLTensor* const b = batch.args.b;
      if (rank.rank == 0) batch.args.b = nullptr;
      EXPECT_EQ(batch.call(context.get()),
                rank.rank == 0 ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
      batch.args.b = b;
    }
  });
}

// The given operands decide the type in which the terms of a sum travel, so all ranks give the
// same.
TEST_P(ByCublasMp, NamesAnOperandThatOneRankAloneGives) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUBLASMP, &reason) == 0) GTEST_SKIP() << reason;
  on_every_rank([](Rank& rank) {
    std::string missing;
    if (rank.num_ranks == 1 || !is_there(rank, missing)) return;
    const GemmContext context = make_context(rank.comm, config_for_cublasmp());
    GemmCase c = plain_gemm_case(rank.num_ranks, GetParam());
    c.tokens = TokenCounts::equal;
    c.bias = Bias::like_d;
    GemmBatch batch(rank, c, 0);
    batch.args.algo = XD_GEMM_ALGO_CUBLASMP;
    const DLTensor* const bias = batch.args.bias;
    if (rank.rank == 0) batch.args.bias = nullptr;
    const GemmOutcome outcome = batch.call(context.get());
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(
        outcome.mentions(rank.rank == 0 ? "bias given, here NULL" : "bias NULL, here given"))
        << outcome.text;
    batch.args.bias = bias;
    batch.reset();
    batch.call_and_check(context.get());
  });
}

INSTANTIATE_TEST_SUITE_P(Operations, ByCublasMp, testing::ValuesIn(kGemmProducts));

}  // namespace
}  // namespace xd::test
