// Resources that products take from the process: none per call, the announced amount per context,
// and all of them given back in the end.
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "conformance/counted_new.h"
#include "conformance/expect_usage.h"
#include "conformance/gemm_batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// Everything that a call can have.
GemmCase rich_case(xd_gemm_operation operation) {
  GemmCase c = plain_gemm_case(world().num_ranks(), operation);
  c.addend = Addend::in_place;
  c.bias = Bias::f32;
  c.epilogue = XD_GEMM_EPILOGUE_GELU;
  c.pre_activation = true;
  c.bias_grad = operation == XD_GEMM_ALL_REDUCE ? BiasGrad::own : BiasGrad::reduced;
  c.amax = true;
  c.gathered = Gathered::both;
  c.alpha = 1.0f / 64;
  return c;
}

TEST(GemmResources, CallsAllocateNothing) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    on_every_rank([&](Rank& rank) {
      for (const Spots spots : {Spots::ordinary, Spots::symmetric}) {
        GemmCase c = rich_case(operation);
        c.spots = spots;
        const GemmContext context = make_context(rank.comm, c.config());
        for (int step = 0; step < 3; ++step) {
          GemmBatch batch(rank, c, step);
          for (const xd_gemm_algo algo : kGemmAlgos) {
            batch.args.algo = algo;
            xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
            if (xd_gemm_explain(context.get(), operation, &batch.args, &info) != XD_SUCCESS)
              continue;
            batch.reset();
            const std::size_t before = allocations_of_this_thread();
            const xd_status status = batch.enqueue(context.get());
            EXPECT_EQ(allocations_of_this_thread(), before)
                << name_of(operation) << " by algorithm " << algo << ", call " << step;
            ok(finish(rank, context.get(), status));
          }
        }
      }
    });
  }
}

TEST(GemmResources, AContextTakesWhatItSaid) {
  if (world().memory().device().device_type != kDLCPU) GTEST_SKIP() << "of the host's memory";
  for (const int operations : {0, 1, 2, 4, 31}) {
    SCOPED_TRACE("operations " + std::to_string(operations));
    xd_gemm_config config = rich_case(XD_GEMM_ALL_GATHER).config();
    config.operations = operations;
    config.max_tokens = 300;
    config.slots = operations == 31 ? 2 : 1;
    on_every_rank([&](Rank& rank) {
      HostMemoryTaken taken(rank);
      ok(xd_comm_barrier(rank.comm));
      taken.begin();
      ok(xd_comm_barrier(rank.comm));
      xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
      ok(xd_gemm_context_memory(&config, &memory));
      const GemmContext context = make_context(rank.comm, config);
      ok(xd_comm_barrier(rank.comm));
      taken.expect(memory.symmetric_bytes, memory.private_bytes);
      ok(xd_comm_barrier(rank.comm));
    });
  }
}

void create_and_destroy(int rounds) {
  on_every_rank([&](Rank& rank) {
    for (int round = 0; round < rounds; ++round) {
      const Comm comm = rank.another_comm("round" + std::to_string(round), 65536);
      Rank there = rank;
      there.comm = comm.get();
      const GemmCase c = rich_case(kGemmProducts[round % 3]);
      const GemmContext context = make_context(comm.get(), c.config());
      GemmBatch batch(there, c, round % 5);
      ok(batch.call(context.get()));
      ok(xd_comm_barrier(comm.get()));
    }
  });
}

TEST(GemmResources, TwoHundredCommunicatorsAndContextsLeaveNothing) {
  create_and_destroy(6);
  const Usage before;
  create_and_destroy(200);
  const Usage after;
  expect_nothing_left(before, after);
}

// What a context leaves in its communicator would grow for as long as that lives.
TEST(GemmResources, HundredsOfContextsLeaveNothingInTheirCommunicator) {
  std::optional<Usage> before, after;
  on_every_rank([&](Rank& rank) {
    for (std::optional<Usage>* const usage : {&before, &after}) {
      for (int round = 0; round < (usage == &before ? 6 : 300); ++round) {
        make_context(rank.comm, rich_case(kGemmProducts[round % 3]).config());
      }
      ok(xd_comm_barrier(rank.comm));
      if (rank.rank == 0 || !rank.threads) usage->emplace();
      ok(xd_comm_barrier(rank.comm));
    }
  });
  expect_nothing_left(*before, *after);
}

}  // namespace
}  // namespace xd::test
