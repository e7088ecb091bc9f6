// Products over ranks in CUDA graphs: captured from the first call on, replayed between eager
// calls.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "conformance/cuda/graph.h"
#include "conformance/gemm/batch.h"
#include "conformance/gemm/gather.h"
#include "conformance/said.h"
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
  ask_for_everything(c);
  return c;
}

void replay(const Rank& rank, const GemmCase& c, std::span<const xd_gemm_algo> algos) {
  for (const xd_gemm_algo algo : algos) {
    SCOPED_TRACE("algorithm " + std::to_string(algo) + " of " + c.description());
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    batch.args.algo = algo;
    if (!batch.can_call(context.get())) continue;
    const Graph graph(rank, [&] { ok(batch.enqueue(context.get())); });
    for (int i = 0; i < 4; ++i) {
      batch.reset();
      graph.launch();
      ok(finish(rank, context.get(), XD_SUCCESS));
      batch.check(context.get());
      batch.reset();
      batch.call_and_check(context.get());
    }
    batch.reset();
    for (int i = 0; i < kReplays; ++i) graph.launch();  // no rank waits between them
    ok(finish(rank, context.get(), XD_SUCCESS));
    batch.check(context.get());
  }
}

TEST(GemmGraph, OfEveryAlgorithmReplaysAndTakesTurnsWithEagerCalls) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    on_every_rank(
        [&](Rank& rank) { replay(rank, case_of(rank.num_ranks, operation), kGemmAlgos); });
  }
}

TEST(GemmGraph, WithScalesOfBlocksReplays) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    on_every_rank(
        [&](Rank& rank) { replay(rank, block_gemm_case(rank.num_ranks, operation), kGemmAlgos); });
  }
}

// More than travels as words, of which all ranks write more than D.
TEST(GemmGraph, OfWholeSumsReplays) {
  on_every_rank([](Rank& rank) {
    GemmCase c = case_of(rank.num_ranks, XD_GEMM_ALL_REDUCE);
    c.result = Output::f32;
    c.n_units = 520;
    c.token_units = 600 / rank.num_ranks + 1;
    constexpr xd_gemm_algo kOne[] = {XD_GEMM_ALGO_SEQUENTIAL};
    replay(rank, c, kOne);
  });
}

// ---- Gathers that are begun --------------------------------------------------------------------

void expect_refused(const Rank& rank, xd_status status) {
  EXPECT_EQ(status, XD_ERROR_BUSY);
  expect_said("capture");
  EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
}

TEST(StartedGatherInAGraph, EndsThere) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, gathering_config());
    Gather gather(rank);
    for (const bool joined : {false, true}) {  // by an operation
      GemmBatch batch(rank, plain_gemm_case(rank.num_ranks), 0);
      const Graph graph(rank, [&] {
        ok(gather.start(context.get()));
        if (!joined) ok(xd_gemm_wait(context.get(), rank.stream()));
        ok(batch.enqueue(context.get()));
      });
      for (int i = 0; i < 4; ++i) {
        batch.reset();
        graph.launch();
        ok(finish(rank, context.get(), XD_SUCCESS));
        gather.check();
        batch.check(context.get());
        ok(gather.start(context.get()));
        ok(finish(rank, context.get(), xd_gemm_wait(context.get(), rank.stream())));
        gather.check();
      }
    }
  });
}

// No order can be made between a capture and what runs: the call is refused, and nothing else is.
TEST(StartedGatherInAGraph, IsNotTakenOverItsBorder) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, gathering_config());
    const std::unique_ptr<Memory> beside = rank.memory->another_stream();
    const Rank there = rank.on(*beside);
    Gather gather(rank);
    GemmBatch batch(rank, plain_gemm_case(rank.num_ranks), 0),
        other(there, plain_gemm_case(rank.num_ranks), 0);
    // Begun outside.
    ok(gather.start(context.get()));
    {
      const Graph nothing(rank, [&] {
        expect_refused(rank, batch.enqueue(context.get()));
        expect_refused(rank, xd_gemm_wait(context.get(), rank.stream()));
        expect_refused(rank, gather.start(context.get()));
        expect_refused(
            rank, xd_gemm_join_failed(context.get(), XD_GEMM_ALL_GATHER, "why", rank.stream()));
      });
      nothing.launch();
    }
    ok(finish(rank, context.get(), xd_gemm_wait(context.get(), rank.stream())));
    gather.check();
    // Begun inside.
    const Graph graph(rank, [&] {
      ok(gather.start(context.get()));
      expect_refused(rank, xd_gemm_wait(context.get(), beside->stream()));
      expect_refused(rank, other.enqueue(context.get()));
      ok(batch.enqueue(context.get()));
      expect_refused(rank, other.enqueue(context.get()));
    });
    graph.launch();
    ok(finish(rank, context.get(), XD_SUCCESS));
    gather.check();
    batch.check(context.get());
    ok(finish(there, context.get(), other.enqueue(context.get())));
    other.check(context.get());
  });
}

// A gather that has been waited for outside is over for a capture, and not for the next operation
// outside, whose stream nobody has ordered behind it.
TEST(StartedGatherInAGraph, ThatWasWaitedForBeforeLeavesTheCaptureAlone) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, gathering_config());
    const std::unique_ptr<Memory> consumer = rank.memory->another_stream();
    Gather gather(rank);
    for (const xd_gemm_operation operation : kGemmProducts) {
      SCOPED_TRACE(name_of(operation));
      GemmBatch batch(rank, plain_gemm_case(rank.num_ranks, operation), 0);
      ok(xd_comm_barrier(rank.comm));
      if (rank.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ok(gather.start(context.get()));
      ok(xd_gemm_wait(context.get(), consumer->stream()));
      const Graph graph(rank, [&] { ok(batch.enqueue(context.get())); });
      ok(finish(rank, context.get(), batch.enqueue(context.get())));
      batch.check(context.get());
      gather.check();
      for (int i = 0; i < 3; ++i) {
        batch.reset();
        graph.launch();
        ok(finish(rank, context.get(), XD_SUCCESS));
        batch.check(context.get());
      }
    }
  });
}

// ---- The end of a context ----------------------------------------------------------------------

// Forbidden, and yet no reason to fault: what has been enqueued outlives its turn.
TEST(DestroyedContext, WaitsForWhatWasEnqueued) {
  on_every_rank([](Rank& rank) {
    load_occupier(rank);
    for (const xd_gemm_operation operation : kGemmProducts) {
      for (const xd_gemm_algo algo : kGemmAlgos) {
        SCOPED_TRACE(std::string(name_of(operation)) + " by algorithm " + std::to_string(algo));
        GemmContext context = make_context(rank.comm, gathering_config());
        GemmBatch batch(rank, plain_gemm_case(rank.num_ranks, operation), 0);
        batch.args.algo = algo;
        if (!batch.can_call(context.get())) continue;
        occupy(rank, 10);
        ok(batch.enqueue(context.get()));
        context.reset();
        EXPECT_EQ(cudaStreamQuery(rank.stream()), cudaSuccess);
        batch.check(nullptr);
      }
    }
    GemmContext context = make_context(rank.comm, gathering_config());
    Gather gather(rank);
    occupy(rank, 10);
    ok(gather.start(context.get()));
    context.reset();
    gather.check();
    context = make_context(rank.comm, gathering_config());
    occupy(rank, 10);
    EXPECT_EQ(xd_gemm_join_failed(context.get(), XD_GEMM_ALL_GATHER, "why", rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
    context.reset();
    EXPECT_EQ(cudaStreamQuery(rank.stream()), cudaSuccess);
  });
}

}  // namespace
}  // namespace xd::test
