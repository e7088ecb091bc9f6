// Products by cuBLASMp: every element where it runs, and what is missing where it does not.
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
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

// The roundings of sums that docs/cublasmp.md promises. Terms travel in the type of d where nothing
// follows the sum, so each is rounded once to it; else as float32, which has these integers. With
// more than two ranks the sums on the way are rounded to that type, too, in an order of cuBLASMp's
// own: then numbers are compared by norm.
GemmCase as_cublasmp_sums(GemmCase c) {
  const bool follows = c.addend != Addend::none || c.bias != Bias::none ||
                       c.epilogue != XD_GEMM_EPILOGUE_NONE || c.pre_activation ||
                       c.bias_grad != BiasGrad::none || c.amax || c.scaled_output();
  c.exact_terms = !c.gathers() && follows;
  const bool rounds = !c.gathers() && !follows && c.d_type().bits < 32;
  if (rounds && c.num_ranks > 2) c.values = Values::random;
  return c;
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
    cases.push_back(as_cublasmp_sums(c));
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

// The calls of one algorithm: how many were computed, and how many were refused for which reason.
struct Tally {
  int computed = 0;
  std::map<std::string, int> refused;
};

void print(xd_gemm_operation operation, int algo, const Tally& tally) {
  std::printf("%s by algorithm %d: %d computed\n", name_of(operation), algo, tally.computed);
  for (const auto& [reason, calls] : tally.refused) {
    std::printf("  %d refused: %s\n", calls, reason.c_str());
  }
}

class ByCublasMp : public testing::TestWithParam<xd_gemm_operation> {};

// Makes the call, or is told why it cannot be made, as explain() says. A rank may find alone that
// cuBLASMp cannot do a call; then every rank has the same reason. cuBLASMp may also refuse a
// product when it is to be enqueued: from then on explain() knows it, and the context goes on.
// False if it went otherwise.
bool call_or_be_refused(const Rank& rank, xd_gemm_context* context, const GemmCase& c, int algo,
                        Tally& tally) {
  GemmBatch batch(rank, c, 0);
  batch.args.algo = static_cast<xd_gemm_algo>(algo);
  xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
  const auto explain = [&] { return xd_gemm_explain(context, c.operation, &batch.args, &info); };
  xd_status explained = explain();
  const GemmOutcome outcome = batch.call(context);
  if (explained == XD_SUCCESS && outcome == XD_ERROR_UNSUPPORTED) {
    EXPECT_TRUE(outcome.mentions("cublasMpMatmul: ")) << outcome.text;
    explained = explain();
  }
  const std::string why_not = explained == XD_SUCCESS ? "" : xd_last_error();
  EXPECT_EQ(outcome, explained) << why_not;
  if (outcome.status != explained) return false;
  if (explained == XD_SUCCESS) {
    EXPECT_EQ(info.algo, algo);
    EXPECT_EQ(info.same_bits, 0);
    batch.check(context);
    ++tally.computed;
    return true;
  }
  EXPECT_EQ(explained, XD_ERROR_UNSUPPORTED) << why_not;
  EXPECT_TRUE(outcome.mentions(reason_in(why_not))) << outcome.text;
  EXPECT_TRUE(batch.guards_intact());
  ++tally.refused[reason_in(why_not)];
  return true;
}

TEST_P(ByCublasMp, EveryElementOfEveryOutputIsRight) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUBLASMP, &reason) == 0) GTEST_SKIP() << reason;
  on_every_rank([](Rank& rank) {
    std::string missing;
    if (!is_there(rank, missing)) return;
    const GemmContext context = make_context(rank.comm, config_for_cublasmp());
    std::map<int, Tally> tallies;
    int computed = 0;
    for (const GemmCase& c : cases_of(GetParam())) {
      for (int algo = XD_GEMM_ALGO_CUBLASMP; algo <= XD_GEMM_ALGO_CUBLASMP_FUSED; ++algo) {
        SCOPED_TRACE(c.description() + " by algorithm " + std::to_string(algo));
        ASSERT_TRUE(call_or_be_refused(rank, context.get(), c, algo, tallies[algo]));
      }
    }
    for (const auto& [algo, tally] : tallies) {
      computed += tally.computed;
      if (rank.rank == 0) print(GetParam(), algo, tally);
    }
    EXPECT_GE(computed, 2 * 18) << "most cases cannot be what it does not support";
  });
}

// Where cuBLASMp refuses a call, also when it is to be enqueued, all ranks take another algorithm.
TEST_P(ByCublasMp, GivesWayToAnotherAlgorithmWhereCublasMpRefuses) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUBLASMP, &reason) == 0) GTEST_SKIP() << reason;
  on_every_rank([](Rank& rank) {
    std::string missing;
    if (!is_there(rank, missing)) return;
    xd_gemm_config config = config_for_cublasmp();
    config.allow_fallback = 1;
    const GemmContext context = make_context(rank.comm, config);
    GemmCase c = plain_gemm_case(rank.num_ranks, GetParam());
    c.tokens = TokenCounts::equal;
    GemmBatch batch(rank, as_cublasmp_sums(c), 0);
    for (int algo = XD_GEMM_ALGO_CUBLASMP; algo <= XD_GEMM_ALGO_CUBLASMP_FUSED; ++algo) {
      SCOPED_TRACE("algorithm " + std::to_string(algo));
      batch.args.algo = static_cast<xd_gemm_algo>(algo);
      for (int again = 0; again < 2; ++again) {
        batch.reset();
        batch.call_and_check(context.get());
      }
    }
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
    GemmBatch batch(rank, as_cublasmp_sums(c), 0);
    batch.args.algo = XD_GEMM_ALGO_CUBLASMP;
    EXPECT_TRUE(batch.can_call(context.get())) << xd_last_error();
    const xd_gemm_algo order[] = {XD_GEMM_ALGO_SEQUENTIAL,         XD_GEMM_ALGO_CUBLASMP,
                                  XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P, XD_GEMM_ALGO_CUBLASMP,
                                  XD_GEMM_ALGO_SEQUENTIAL,         XD_GEMM_ALGO_CUBLASMP};
    for (int round = 0; round < 3; ++round) {
      for (const xd_gemm_algo algo : order) {
        batch.args.algo = algo;
        if (!batch.can_call(context.get())) continue;  // all_reduce has no SPLIT_P2P of few rows
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
    GemmBatch batch(rank, as_cublasmp_sums(c), 0);
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
