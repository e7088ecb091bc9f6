// Configs of contexts: what they take, and what explain() says of a good context.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "conformance/gemm/batch.h"
#include "conformance/said.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

xd_gemm_config good_config() { return plain_gemm_case(world().num_ranks()).config(); }

TEST(ContextMemory, IsOfAConfigThatNamesItsRanksAndGoesToAPlace) {
  xd_gemm_config config = good_config();
  xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
  EXPECT_EQ(xd_gemm_context_memory(nullptr, &memory), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(xd_gemm_context_memory(&config, nullptr), XD_ERROR_INVALID_ARGUMENT);
  config.num_ranks = 0;
  EXPECT_EQ(xd_gemm_context_memory(&config, &memory), XD_ERROR_INVALID_ARGUMENT);
  expect_said("num_ranks");
}

// Ranks may give their kernels as much of their devices as they like, other numbers each.
TEST(CommMultiprocessors, ChangeNoResult) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    GemmCase c = plain_gemm_case(rank.num_ranks, operation);
    c.n_units = 17;
    c.token_units = 70;
    c.bias_grad = operation == XD_GEMM_ALL_REDUCE ? BiasGrad::own : BiasGrad::reduced;
    for (const int multiprocessors : {1, 5 - rank.rank % 2, 4096}) {
      xd_gemm_config config = c.config();
      config.num_comm_sms = multiprocessors;
      const GemmContext context = make_context(rank.comm, config);
      for (const xd_gemm_algo algo : kGemmAlgos) {
        SCOPED_TRACE(std::string(name_of(operation)) + " by algorithm " + std::to_string(algo));
        GemmBatch batch(rank, c, 0);
        batch.args.algo = algo;
        xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
        if (xd_gemm_explain(context.get(), operation, &batch.args, &info) != XD_SUCCESS) continue;
        batch.call_and_check(context.get());
      }
    }
  });
}

// Kernels of cuBLASMp on one rank wait for those on the others.
TEST(Disagreement, OnTheMultiprocessorsOfCublasMpIsNamed) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  on_every_rank([](Rank& rank) {
    xd_gemm_config config = good_config();
    config.algo = XD_GEMM_ALGO_CUBLASMP;
    config.allow_fallback = 1;
    config.num_comm_sms = rank.rank == 0 ? 4 : 8;
    xd_gemm_context* context = nullptr;
    EXPECT_EQ(xd_gemm_context_create(rank.comm, &config, &context), XD_ERROR_MISMATCH);
    expect_said("config.num_comm_sms = 4 on rank 0 and 8 on rank 1");
    EXPECT_EQ(context, nullptr);
  });
}

TEST(ContextMemory, GrowsWithWhatTheContextIsFor) {
  const auto bytes = [](const std::function<void(xd_gemm_config&)>& change) {
    xd_gemm_config config = good_config();
    config.max_tokens = 64;
    change(config);
    xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
    ok(xd_gemm_context_memory(&config, &memory));
    EXPECT_GT(memory.symmetric_bytes, 0u);
    return memory.symmetric_bytes + memory.private_bytes;
  };
  const std::size_t one = bytes([](xd_gemm_config&) {});  // all_gather
  EXPECT_EQ(bytes([](xd_gemm_config&) {}), one);
  const std::size_t usual = bytes([](xd_gemm_config& c) { c.operations = 0; });
  EXPECT_GT(usual, one);
  EXPECT_EQ(usual, bytes([](xd_gemm_config& c) { c.operations = 7; }));
  for (const xd_gemm_operation operation : kGemmProducts) {
    EXPECT_LT(bytes([&](xd_gemm_config& c) { c.operations = XD_GEMM_BIT(operation); }), usual)
        << name_of(operation);
  }
  EXPECT_GT(bytes([](xd_gemm_config& c) { c.max_tokens = 1 << 20; }), one);
  EXPECT_GT(bytes([](xd_gemm_config& c) { c.dtype = kF32; }), one);
  EXPECT_LT(bytes([](xd_gemm_config& c) { c.dtype = kE4m3; }), one);
  if (world().num_ranks() > 1) {
    EXPECT_GT(bytes([](xd_gemm_config& c) { c.max_k *= 1024; }), one);
  }
}

TEST(LocalSize, DealsOutCeilShares) {
  struct Row {
    std::int64_t global;
    std::vector<std::int64_t> shares;
  };
  const Row rows[] = {
      {0, {0, 0, 0}},
      {1, {1, 0, 0}},
      {2, {1, 1, 0}},
      {3, {1, 1, 1}},
      {4, {2, 2, 0}},
      {5, {2, 2, 1}},
      {9, {2, 2, 2, 2, 1}},
      {10, {2, 2, 2, 2, 2}},
      {7, {7}},
      {(std::int64_t{1} << 40) + 1, {(std::int64_t{1} << 39) + 1, std::int64_t{1} << 39}},
  };
  for (const Row& row : rows) {
    for (std::size_t rank = 0; rank < row.shares.size(); ++rank) {
      std::int64_t local = -7;
      ok(xd_gemm_local_size(row.global, static_cast<std::int32_t>(rank),
                            static_cast<std::int32_t>(row.shares.size()), &local));
      EXPECT_EQ(local, row.shares[rank]) << row.global << " on rank " << rank;
    }
  }
}

TEST(LocalSize, RefusesWhatIsNoRankOrSize) {
  std::int64_t local = 0;
  const auto expect_refused = [&](xd_status status, const char* argument) {
    EXPECT_EQ(status, XD_ERROR_INVALID_ARGUMENT);
    expect_said(argument);
  };
  expect_refused(xd_gemm_local_size(-1, 0, 2, &local), "global");
  expect_refused(xd_gemm_local_size(5, 2, 2, &local), "rank");
  expect_refused(xd_gemm_local_size(5, -1, 2, &local), "rank");
  expect_refused(xd_gemm_local_size(5, 0, 0, &local), "rank");
  expect_refused(xd_gemm_local_size(5, 0, 2, nullptr), "local");
}

// ---- explain() ---------------------------------------------------------------------------------

xd_gemm_plan_info explained(xd_gemm_context* context, const GemmCase& c, const xd_gemm_args& args) {
  xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
  ok(xd_gemm_explain(context, c.operation, &args, &info));
  return info;
}

TEST(Explain, HasALineForEachAlgorithmAndNeverChoosesASlowerOneThanSequential) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    const GemmCase c = plain_gemm_case(rank.num_ranks, operation);
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    const xd_gemm_plan_info chosen = explained(context.get(), c, batch.args);
    for (const char* algo : {"DIRECT", "SPLIT", "SEQUENTIAL", "CUBLASMP"}) {
      EXPECT_NE(std::string(chosen.text).find(algo), std::string::npos) << chosen.text;
    }
    EXPECT_GT(chosen.num_products, 0);
    EXPECT_GT(chosen.estimate_us, 0);
    EXPECT_GE(chosen.estimate_us, chosen.gemm_us);
    batch.args.algo = XD_GEMM_ALGO_SEQUENTIAL;
    const xd_gemm_plan_info sequential = explained(context.get(), c, batch.args);
    EXPECT_EQ(sequential.algo, XD_GEMM_ALGO_SEQUENTIAL);
    EXPECT_LE(chosen.estimate_us, sequential.estimate_us);
    // Taken at its word, it says the same of itself.
    batch.args.algo = chosen.algo;
    const xd_gemm_plan_info again = explained(context.get(), c, batch.args);
    EXPECT_EQ(again.algo, chosen.algo);
    EXPECT_EQ(again.num_products, chosen.num_products);
    EXPECT_EQ(again.estimate_us, chosen.estimate_us);
    ok(xd_comm_barrier(rank.comm));
  });
}

// It reads shapes and types only.
TEST(Explain, NeedsNoData) {
  on_every_rank([](Rank& rank) {
    const GemmCase c = plain_gemm_case(rank.num_ranks);
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    const xd_gemm_plan_info with = explained(context.get(), c, batch.args);
    DLTensor a = *batch.args.a, b = *batch.args.b, d = *batch.args.d;
    a.data = b.data = d.data = nullptr;
    batch.args.a = &a;
    batch.args.b = &b;
    batch.args.d = &d;
    const xd_gemm_plan_info without = explained(context.get(), c, batch.args);
    EXPECT_EQ(without.algo, with.algo);
    EXPECT_EQ(without.estimate_us, with.estimate_us);
    EXPECT_STREQ(without.text, with.text);
  });
}

TEST(Fallback, TakesWhatAutoTakesWhereAnAlgorithmCannotRun) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    const GemmCase c = plain_gemm_case(rank.num_ranks, operation);
    xd_gemm_config config = c.config();
    config.allow_fallback = 1;
    const GemmContext context = make_context(rank.comm, config);
    GemmBatch batch(rank, c, 0);
    const xd_gemm_algo chosen = explained(context.get(), c, batch.args).algo;
    batch.args.algo = XD_GEMM_ALGO_CUBLASMP;
    EXPECT_EQ(explained(context.get(), c, batch.args).algo, chosen);
    batch.call_and_check(context.get());
  });
}

// Calls that say AUTO take the context's.
TEST(ContextsAlgorithm, IsTakenByCallsThatSayAuto) {
  on_every_rank([](Rank& rank) {
    GemmCase c = plain_gemm_case(rank.num_ranks);
    c.algo = XD_GEMM_ALGO_SEQUENTIAL;
    GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    EXPECT_EQ(explained(context.get(), c, batch.args).algo, XD_GEMM_ALGO_SEQUENTIAL);
    batch.call_and_check(context.get());
    c.algo = XD_GEMM_ALGO_DIRECT;
    context = make_context(rank.comm, c.config());
    batch.reset();
    EXPECT_EQ(batch.call(context.get()), XD_ERROR_UNSUPPORTED);
    batch.args.algo = XD_GEMM_ALGO_SEQUENTIAL;
    batch.reset();
    batch.call_and_check(context.get());
  });
}

}  // namespace
}  // namespace xd::test
