// Configs of contexts: what they take, which are bad, and who hears of it; and what explain() says
// of a good context.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "conformance/gemm_batch.h"
#include "conformance/one_mistake.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

bool said(const std::string& text) {
  return std::string(xd_last_error()).find(text) != std::string::npos;
}

xd_gemm_config good_config() { return plain_gemm_case(world().num_ranks()).config(); }

template <class Enum>
void force(Enum& field, int value) {
  std::memcpy(&field, &value, sizeof(value));
}

struct BadConfig {
  const char* field;
  const char* got;
  std::function<void(xd_gemm_config&)> make;
};

const BadConfig kBadConfigs[] = {
    {"struct_size", "0", [](xd_gemm_config& c) { c.struct_size = 0; }},
    {"operations", "32", [](xd_gemm_config& c) { c.operations = 32; }},
    {"operations", "-1", [](xd_gemm_config& c) { c.operations = -1; }},
    {"max_tokens", "0", [](xd_gemm_config& c) { c.max_tokens = 0; }},
    {"max_tokens", "-5", [](xd_gemm_config& c) { c.max_tokens = -5; }},
    {"max_tokens", "67108865", [](xd_gemm_config& c) { c.max_tokens = (1 << 26) + 1; }},
    {"max_k", "0", [](xd_gemm_config& c) { c.max_k = 0; }},
    {"max_k", "-8", [](xd_gemm_config& c) { c.max_k = -8; }},
    {"max_n", "0", [](xd_gemm_config& c) { c.max_n = 0; }},
    {"dtype", "64 bits",
     [](xd_gemm_config& c) {
       c.dtype = {kDLFloat, 64, 1};
     }},
    {"dtype", "int32",
     [](xd_gemm_config& c) {
       c.dtype = {kDLInt, 32, 1};
     }},
    {"algo", "6", [](xd_gemm_config& c) { force(c.algo, 6); }},
    {"algo", "23", [](xd_gemm_config& c) { force(c.algo, 23); }},
    {"algo", "-1", [](xd_gemm_config& c) { force(c.algo, -1); }},
    {"num_comm_sms", "-1", [](xd_gemm_config& c) { c.num_comm_sms = -1; }},
    {"slots", "3", [](xd_gemm_config& c) { c.slots = 3; }},
    {"slots", "-1", [](xd_gemm_config& c) { c.slots = -1; }},
    {"keep_gathered", "2", [](xd_gemm_config& c) { c.keep_gathered = 2; }},
    {"allow_fallback", "-1", [](xd_gemm_config& c) { c.allow_fallback = -1; }},
    {"device_type", "7", [](xd_gemm_config& c) { c.device_type = 7; }},
};

TEST(BadConfig, IsRefusedByThePureFunction) {
  for (const BadConfig& bad : kBadConfigs) {
    SCOPED_TRACE(std::string(bad.field) + " = " + bad.got);
    xd_gemm_config config = good_config();
    bad.make(config);
    xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
    EXPECT_EQ(xd_gemm_context_memory(&config, &memory), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(said(bad.field) && said(bad.got)) << xd_last_error();
  }
  xd_gemm_config config = good_config();
  config.num_ranks = 0;
  xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
  EXPECT_EQ(xd_gemm_context_memory(&config, &memory), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(said("num_ranks")) << xd_last_error();
  EXPECT_EQ(xd_gemm_context_memory(nullptr, &memory), XD_ERROR_INVALID_ARGUMENT);
  config = good_config();
  EXPECT_EQ(xd_gemm_context_memory(&config, nullptr), XD_ERROR_INVALID_ARGUMENT);
}

TEST(BadConfig, OfOneRankIsAnErrorOfAll) {
  on_every_rank([](Rank& rank) {
    const int guilty = rank.num_ranks - 1;
    const auto expect_refused = [&](const xd_gemm_config& config, const char* field) {
      int no_context = 0;
      auto* context = reinterpret_cast<xd_gemm_context*>(&no_context);
      EXPECT_EQ(xd_gemm_context_create(rank.comm, &config, &context),
                rank.rank == guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH)
          << xd_last_error();
      EXPECT_TRUE(said(rank.rank == guilty ? std::string(field) : "rank " + std::to_string(guilty)))
          << xd_last_error();
      EXPECT_EQ(context, nullptr);
    };
    for (const BadConfig& bad : kBadConfigs) {
      SCOPED_TRACE(std::string(bad.field) + " = " + bad.got);
      xd_gemm_config config = good_config();
      if (rank.rank == guilty) bad.make(config);
      expect_refused(config, bad.field);
    }
    xd_gemm_config config = good_config();
    if (rank.rank == guilty) config.num_ranks = rank.num_ranks + 1;
    expect_refused(config, "num_ranks");
    config = good_config();
    const bool cpu = rank.memory->device().device_type == kDLCPU;
    if (rank.rank == guilty) config.device_type = cpu ? kDLCUDA : kDLCPU;
    expect_refused(config, "device_type");
    EXPECT_NE(make_context(rank.comm, good_config()), nullptr);
  });
}

struct ConfigField {
  const char* name;
  std::function<void(xd_gemm_config&)> change;
};

TEST(Disagreement, OverAPlaceForTheContextIsToldAtOnce) {
  on_every_rank([](Rank& rank) {
    const xd_gemm_config config = good_config();
    expect_mistake<xd_gemm_context*>(
        rank, "context = NULL", nullptr,
        [&](xd_gemm_context**) { return xd_gemm_context_create(rank.comm, &config, nullptr); },
        [&](xd_gemm_context** made) { return xd_gemm_context_create(rank.comm, &config, made); });
  });
}

TEST(Disagreement, OnAContextsConfigNamesTheField) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const ConfigField fields[] = {
      {"operations", [](xd_gemm_config& c) { c.operations |= XD_GEMM_BIT(XD_GEMM_ALL_REDUCE); }},
      {"max_tokens", [](xd_gemm_config& c) { c.max_tokens += 1; }},
      {"max_k", [](xd_gemm_config& c) { c.max_k += 8; }},
      {"max_n", [](xd_gemm_config& c) { c.max_n += 8; }},
      {"dtype", [](xd_gemm_config& c) { c.dtype = kF16; }},
      {"algo", [](xd_gemm_config& c) { c.algo = XD_GEMM_ALGO_SEQUENTIAL; }},
      {"slots", [](xd_gemm_config& c) { c.slots = 2; }},
      {"keep_gathered", [](xd_gemm_config& c) { c.keep_gathered = 1; }},
      {"allow_fallback", [](xd_gemm_config& c) { c.allow_fallback = 1; }},
  };
  on_every_rank([&](Rank& rank) {
    for (const ConfigField& field : fields) {
      SCOPED_TRACE(field.name);
      xd_gemm_config config = good_config();
      if (rank.rank == 0) field.change(config);
      xd_gemm_context* context = nullptr;
      EXPECT_EQ(xd_gemm_context_create(rank.comm, &config, &context), XD_ERROR_MISMATCH)
          << xd_last_error();
      EXPECT_TRUE(said(field.name)) << xd_last_error();
      EXPECT_EQ(context, nullptr);
    }
    // The one field that may differ does no harm; zeros are defaults.
    xd_gemm_config config = good_config();
    config.num_comm_sms = rank.rank;
    config.num_ranks = rank.rank % 2 == 0 ? 0 : rank.num_ranks;
    config.slots = rank.rank % 2;
    const GemmContext context = make_context(rank.comm, config);
    const GemmCase c = plain_gemm_case(rank.num_ranks);
    GemmBatch batch(rank, c, 0);
    ok(batch.call(context.get()));
    batch.check(context.get());
  });
}

// Ranks may give their kernels as much of their devices as they like, other numbers each.
TEST(CommMultiprocessors, ChangeNoResult) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    on_every_rank([&](Rank& rank) {
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
          EXPECT_EQ(info.comm_sms, 0);
          ok(batch.call(context.get()));
          batch.check(context.get());
        }
      }
    });
  }
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
    EXPECT_TRUE(said("config.num_comm_sms = 4 on rank 0 and 8 on rank 1")) << xd_last_error();
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
    EXPECT_TRUE(said(argument)) << xd_last_error();
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
  for (const xd_gemm_operation operation : kGemmProducts) {
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(name_of(operation));
      const GemmCase c = plain_gemm_case(rank.num_ranks, operation);
      const GemmContext context = make_context(rank.comm, c.config());
      GemmBatch batch(rank, c, 0);
      const xd_gemm_plan_info chosen = explained(context.get(), c, batch.args);
      for (const char* algo : {"FUSED", "DIRECT", "SPLIT", "SPLIT_P2P", "SEQUENTIAL", "CUBLASMP"}) {
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
  for (const xd_gemm_operation operation : kGemmProducts) {
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(name_of(operation));
      const GemmCase c = plain_gemm_case(rank.num_ranks, operation);
      xd_gemm_config config = c.config();
      config.allow_fallback = 1;
      const GemmContext context = make_context(rank.comm, config);
      GemmBatch batch(rank, c, 0);
      const xd_gemm_algo chosen = explained(context.get(), c, batch.args).algo;
      batch.args.algo = XD_GEMM_ALGO_FUSED;
      EXPECT_EQ(explained(context.get(), c, batch.args).algo, chosen);
      ok(batch.call(context.get()));
      batch.check(context.get());
    });
  }
}

// Calls that say AUTO take the context's.
TEST(ContextsAlgorithm, IsTakenByCallsThatSayAuto) {
  on_every_rank([](Rank& rank) {
    GemmCase c = plain_gemm_case(rank.num_ranks, XD_GEMM_REDUCE_SCATTER);
    c.algo = XD_GEMM_ALGO_SEQUENTIAL;
    GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    EXPECT_EQ(explained(context.get(), c, batch.args).algo, XD_GEMM_ALGO_SEQUENTIAL);
    ok(batch.call(context.get()));
    batch.check(context.get());
    c.algo = XD_GEMM_ALGO_FUSED;
    context = make_context(rank.comm, c.config());
    batch.reset();
    EXPECT_EQ(batch.call(context.get()), XD_ERROR_UNSUPPORTED);
    batch.args.algo = XD_GEMM_ALGO_SEQUENTIAL;
    batch.reset();
    ok(batch.call(context.get()));
    batch.check(context.get());
  });
}

}  // namespace
}  // namespace xd::test
