// Disagreement between ranks on what products alone have.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "conformance/families/mistakes.h"

namespace xd::test {
namespace {

class Disagree : public testing::TestWithParam<xd_gemm_operation> {};

TEST_P(Disagree, OnTheAlgorithmIsAMismatch) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const GemmCase c = plain_gemm_case(world().num_ranks(), GetParam());
  on_every_rank([&](Rank& rank) {
    const GemmContext context = make_context(rank.comm, c.config());
    // The algorithms that can run here, in pairs.
    GemmBatch batch(rank, c, 0);
    std::vector<xd_gemm_algo> algos;
    for (const xd_gemm_algo algo : kGemmAlgos) {
      batch.args.algo = algo;
      xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
      const bool runs =
          xd_gemm_explain(context.get(), c.operation, &batch.args, &info) == XD_SUCCESS;
      if (runs && info.algo == algo) algos.push_back(algo);
    }
    ASSERT_GE(algos.size(), GetParam() == XD_GEMM_ALL_GATHER ? 2u : 1u) << "nothing overlaps";
    for (std::size_t i = 1; i < algos.size(); ++i) {
      batch.args.algo = rank.rank == 0 ? algos[0] : algos[i];
      expect_disagreement(rank, batch.call(context.get()));
    }
    Products::expect_works(rank, c, context.get());
  });
}

TEST_P(Disagree, OnNumbersOfTokensIsAMismatchThatNamesThem) {
  const int ranks = world().num_ranks();
  if (ranks == 1) GTEST_SKIP() << "one rank always agrees with itself";
  GemmCase c = plain_gemm_case(ranks, GetParam());
  c.tokens = TokenCounts::announced;
  on_every_rank([&](Rank& rank) {
    const GemmContext context = make_context(rank.comm, c.config());
    // Equal shares of another size: each rank's own arguments fit together.
    GemmCase own = c;
    std::uint64_t other = c.seed;
    while (own.tokens_of(0)[0] == c.tokens_of(0)[0]) own.seed = ++other;
    if (rank.rank != 0) own.seed = c.seed;
    GemmBatch batch(rank, own, 0);
    const GemmOutcome outcome = batch.call(context.get());
    expect_disagreement(rank, outcome);
    EXPECT_TRUE(outcome.mentions("tokens") || outcome.mentions("M ")) << outcome.text;
    EXPECT_TRUE(batch.guards_intact());
    Products::expect_works(rank, c, context.get());
  });
}

TEST_P(Disagree, OnTf32IsAMismatchWhereItMeansAnything) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  on_every_rank([](Rank& rank) {
    for (const Operands operands : {Operands::f32, Operands::bf16}) {
      GemmCase c = plain_gemm_case(rank.num_ranks, GetParam());
      c.operands = operands;
      const GemmContext context = make_context(rank.comm, c.config());
      GemmBatch batch(rank, c, 0);
      batch.args.allow_tf32 = rank.rank == 0 ? 1 : 0;
      const GemmOutcome outcome = batch.call(context.get());
      if (operands == Operands::bf16) {
        ok(outcome);
        batch.check(context.get());
        continue;
      }
      expect_disagreement(rank, outcome);
      EXPECT_TRUE(
          outcome.mentions(rank.rank == 0 ? "allow_tf32 0, here 1" : "allow_tf32 1, here 0"))
          << outcome.text;
      Products::expect_works(rank, c, context.get());
    }
  });
}

TEST_P(Disagree, OnTheOrderOfEqualShapesIsAMismatchWhereTagsNameProducts) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const GemmCase c = plain_gemm_case(world().num_ranks(), GetParam());
  on_every_rank([&](Rank& rank) {
    const GemmContext context = make_context(rank.comm, c.config());
    constexpr std::uint32_t kLayers[] = {7, 0xFFFFFFF9u};
    GemmBatch batch(rank, c, 0);
    for (int layer = 0; layer < 2; ++layer) {  // rank 0 goes the other way
      batch.args.tag = kLayers[rank.rank == 0 ? 1 - layer : layer];
      const std::string here = std::to_string(batch.args.tag),
                        there = std::to_string(kLayers[rank.rank == 0 ? layer : 1 - layer]);
      const GemmOutcome outcome = batch.call(context.get());
      expect_disagreement(rank, outcome);
      EXPECT_TRUE(outcome.mentions("tag " + there + ", here " + here)) << outcome.text;
      EXPECT_TRUE(batch.guards_intact());
    }
    for (const std::uint32_t layer : kLayers) {
      batch.reset();
      batch.args.tag = layer;
      batch.call_and_check(context.get());
    }
    Products::expect_works(rank, c, context.get());
  });
}

INSTANTIATE_TEST_SUITE_P(Operations, Disagree, testing::ValuesIn(kGemmProducts),
                         [](const auto& instance) { return name_of(instance.param); });

// The outputs that all_reduce shall give beside D decide how its rows travel.
TEST(Disagreement, OnWhatAllReduceGivesIsAMismatchThatNamesIt) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  GemmCase c = plain_gemm_case(world().num_ranks(), XD_GEMM_ALL_REDUCE);
  c.epilogue = XD_GEMM_EPILOGUE_RELU;
  struct Kind {
    const char* name;
    void (*want)(GemmCase&);
  };
  const Kind kinds[] = {
      {"d_amax", [](GemmCase& o) { o.amax = true; }},
      {"bias_grad", [](GemmCase& o) { o.bias_grad = BiasGrad::own; }},
      {"pre_activation", [](GemmCase& o) { o.pre_activation = true; }},
  };
  on_every_rank([&](Rank& rank) {
    const GemmContext context = make_context(rank.comm, c.config());
    for (const Kind& kind : kinds) {
      SCOPED_TRACE(kind.name);
      GemmCase own = c;
      if (rank.rank == 0) kind.want(own);
      GemmBatch batch(rank, own, 0);
      const GemmOutcome outcome = batch.call(context.get());
      expect_disagreement(rank, outcome);
      EXPECT_TRUE(outcome.mentions(std::string(kind.name) +
                                   (rank.rank == 0 ? " NULL, here given" : " given, here NULL")))
          << outcome.text;
      GemmCase all = c;
      kind.want(all);
      Products::expect_works(rank, all, context.get());
    }
    Products::expect_works(rank, c, context.get());
  });
}

// A rank's rows are its own there.
TEST(Ranks, MayWantMoreThanTheirPeersOfGathersAndScatteredSums) {
  for (const xd_gemm_operation operation : {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER}) {
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(name_of(operation));
      GemmCase c = plain_gemm_case(rank.num_ranks, operation);
      c.epilogue = XD_GEMM_EPILOGUE_RELU;
      c.pre_activation = c.amax = rank.rank == 0;
      c.bias_grad = rank.rank == 0 ? BiasGrad::own : BiasGrad::none;
      const GemmContext context = make_context(rank.comm, c.config());
      Products::expect_works(rank, c, context.get());
    });
  }
}

// A context of all operations.
xd_gemm_config roomy(const GemmCase& c) {
  xd_gemm_config config = c.config();
  config.operations = 31;
  config.max_k = config.max_n = 256;
  return config;
}

TEST(Disagreement, OnTheTagOfATransferIsAMismatchThatNamesIt) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const GemmCase c = plain_gemm_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const GemmContext context = make_context(rank.comm, roomy(c));
    constexpr std::byte kSent{7};
    Tensor in(rank, kU8, {4, 64}), out(rank, kU8, {std::int64_t{4} * rank.num_ranks, 64});
    in.buffer().fill(kSent);
    xd_gemm_bulk_args bulk = XD_GEMM_BULK_ARGS_INIT;
    xd_gemm_gather_args gather = XD_GEMM_GATHER_ARGS_INIT;
    bulk.in = gather.in = in.dl();
    bulk.out = gather.out = out.dl();
    const auto both = [&](auto&& expect) {
      expect(finish(rank, context.get(), xd_gemm_bulk(context.get(), &bulk, rank.stream())));
      const xd_status begun = xd_gemm_start_all_gather(context.get(), &gather, rank.stream());
      expect(finish(rank, context.get(),
                    begun == XD_SUCCESS ? xd_gemm_wait(context.get(), rank.stream()) : begun));
    };
    bulk.tag = gather.tag = rank.rank == 0 ? 1 : 2;
    both([&](const GemmOutcome& outcome) {
      expect_disagreement(rank, outcome);
      EXPECT_TRUE(outcome.mentions(rank.rank == 0 ? "tag 2, here 1" : "tag 1, here 2"))
          << outcome.text;
      EXPECT_TRUE(out.buffer().guards_intact());
    });
    bulk.tag = gather.tag = 3;
    both([&](const GemmOutcome& outcome) {
      ok(outcome);
      const std::vector<std::byte> got = out.read();
      EXPECT_EQ(got, std::vector<std::byte>(got.size(), kSent));
      out.buffer().fill(kPoison);
    });
  });
}

}  // namespace
}  // namespace xd::test
