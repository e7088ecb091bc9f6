// Products over ranks in CUDA graphs: captured from the first call on, replayed between eager
// calls.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "conformance/cuda_graph.h"
#include "conformance/gemm_batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr int kReplays = 120;

// Everything that a call may enqueue beside its product.
GemmCase case_of(int num_ranks, xd_gemm_operation operation) {
  GemmCase c = plain_gemm_case(num_ranks, operation);
  c.tokens = TokenCounts::most;
  c.token_units = 64;
  c.n_units = 9;
  c.bias = Bias::like_d;
  c.epilogue = XD_GEMM_EPILOGUE_RELU;
  c.pre_activation = true;
  c.bias_grad = operation == XD_GEMM_ALL_REDUCE ? BiasGrad::own : BiasGrad::reduced;
  c.amax = true;
  c.gathered = Gathered::both;
  return c;
}

TEST(GemmGraph, OfEveryAlgorithmReplaysAndTakesTurnsWithEagerCalls) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    on_every_rank([&](Rank& rank) {
      const GemmCase c = case_of(rank.num_ranks, operation);
      for (const xd_gemm_algo algo : kGemmAlgos) {
        SCOPED_TRACE(std::string(name_of(operation)) + " by algorithm " + std::to_string(algo));
        const GemmContext context = make_context(rank.comm, c.config());
        GemmBatch batch(rank, c, 0);
        batch.args.algo = algo;
        xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
        if (xd_gemm_explain(context.get(), operation, &batch.args, &info) != XD_SUCCESS) continue;
        const Graph graph(rank, [&] { ok(batch.enqueue(context.get())); });
        for (int i = 0; i < 4; ++i) {
          batch.reset();
          graph.launch();
          ok(finish(rank, context.get(), XD_SUCCESS));
          batch.check(context.get());
          batch.reset();
          ok(batch.call(context.get()));
          batch.check(context.get());
        }
        batch.reset();
        for (int i = 0; i < kReplays; ++i) graph.launch();  // no rank waits between them
        ok(finish(rank, context.get(), XD_SUCCESS));
        batch.check(context.get());
      }
    });
  }
}

}  // namespace
}  // namespace xd::test
