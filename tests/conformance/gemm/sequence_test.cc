// Products one after the other and beside one another: what a call leaves behind is nothing to the
// next, to another context, or to what follows a destroyed one.
#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "conformance/gemm/batch.h"
#include "conformance/said.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// Epochs and words of one context are nothing to another, nor to what follows a destroyed one.
TEST(Contexts, OfOneCommunicatorInterleave) {
  on_every_rank([](Rank& rank) {
    const GemmCase gather = plain_gemm_case(rank.num_ranks);
    const GemmCase reduce = plain_gemm_case(rank.num_ranks, XD_GEMM_REDUCE_SCATTER);
    const GemmContext first = make_context(rank.comm, gather.config());
    GemmContext second = make_context(rank.comm, reduce.config());
    for (int step = 0; step < 6; ++step) {
      GemmBatch a(rank, gather, step), b(rank, reduce, step);
      for (int i = 0; i <= step % 3; ++i) ok(a.call(first.get()));
      ok(b.call(second.get()));
      a.check(first.get());
      b.check(second.get());
      if (step == 3) second = make_context(rank.comm, reduce.config());
    }
  });
}

// A result depends on nothing that an earlier call has left behind.
TEST(Bits, OfEqualCallsAreEqual) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    GemmCase c = plain_gemm_case(rank.num_ranks, operation);
    c.values = Values::random;
    c.epilogue = XD_GEMM_EPILOGUE_GELU;
    c.bias = Bias::like_d;
    c.bias_grad = BiasGrad::own;
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    ok(batch.call(context.get()));
    const std::vector<std::byte> first = batch.output_bytes();
    for (int i = 0; i < 8; ++i) {
      GemmBatch other(rank, c, 1 + i % 3);
      ok(other.call(context.get()));
      batch.reset();
      ok(batch.call(context.get()));
      EXPECT_EQ(batch.output_bytes(), first);
    }
  });
}

TEST(Contexts, RunAtTheSameTimeOnTheirOwnThreads) {
  on_every_rank([](Rank& rank) {
    const xd_gemm_operation operations[] = {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER};
    std::vector<GemmContext> contexts;
    for (const xd_gemm_operation operation : operations) {
      contexts.push_back(
          make_context(rank.comm, plain_gemm_case(rank.num_ranks, operation).config()));
    }
    std::vector<std::exception_ptr> failures(contexts.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          const std::unique_ptr<Memory> memory = rank.memory->another_stream();
          const Rank there = rank.on(*memory);
          const GemmCase c = plain_gemm_case(rank.num_ranks, operations[i]);
          for (int step = 0; step < 6; ++step) {
            GemmBatch batch(there, c, step);
            batch.call_and_check(contexts[i].get());
          }
        } catch (...) {
          failures[i] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  });
}

// The needs of a call are met when its context is there: peers that are already waiting for a rank
// do not keep it from its first call.
void call_first_with_a_late_rank(const Rank& rank, const GemmCase& c) {
  for (const xd_gemm_algo algo : kGemmAlgos) {
    SCOPED_TRACE("algorithm " + std::to_string(algo) + " of " + c.description());
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    batch.args.algo = algo;
    if (!batch.can_call(context.get())) continue;
    if (rank.rank == algo % rank.num_ranks) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    batch.call_and_check(context.get());
  }
}

TEST(FirstCall, OfEveryAlgorithmWaitsForARankThatIsLate) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    call_first_with_a_late_rank(rank, plain_gemm_case(rank.num_ranks, operation));
  });
}

TEST(FirstCall, WithScalesOfBlocksWaitsForARankThatIsLate) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    call_first_with_a_late_rank(rank, block_gemm_case(rank.num_ranks, operation));
  });
}

// The next operation takes what the last one has kept.
TEST(KeptGathered, IsThereAfterAnAllGatherAloneAndInContextsThatKeep) {
  on_every_rank([](Rank& rank) {
    GemmCase c = plain_gemm_case(rank.num_ranks);
    const GemmContext plain = make_context(rank.comm, c.config());
    xd_gemm_view view = XD_GEMM_VIEW_INIT;
    EXPECT_EQ(xd_gemm_gathered(plain.get(), &view), XD_ERROR_INVALID_ARGUMENT);
    GemmBatch batch(rank, c, 0);
    ok(batch.call(plain.get()));
    EXPECT_EQ(xd_gemm_gathered(plain.get(), &view), XD_ERROR_INVALID_ARGUMENT);
    expect_said("keep_gathered");
    c.gathered = Gathered::kept;
    xd_gemm_config config = c.config();
    config.operations |= XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER);
    const GemmContext keeping = make_context(rank.comm, config);
    EXPECT_EQ(xd_gemm_gathered(keeping.get(), &view), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_gemm_gathered(keeping.get(), nullptr), XD_ERROR_INVALID_ARGUMENT);
    for (int step = 0; step < 3; ++step) {
      GemmBatch gather(rank, c, step);
      gather.call_and_check(keeping.get());  // with what is kept
      ok(xd_gemm_gathered(keeping.get(), &view));
      GemmBatch reduce(rank, plain_gemm_case(rank.num_ranks, XD_GEMM_REDUCE_SCATTER), step);
      ok(reduce.call(keeping.get()));
      EXPECT_EQ(xd_gemm_gathered(keeping.get(), &view), XD_ERROR_INVALID_ARGUMENT);
    }
  });
}

}  // namespace
}  // namespace xd::test
