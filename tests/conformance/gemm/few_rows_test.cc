// Sums and gathers of few rows behind one another, with nothing between them that waits for all
// ranks: none takes what belongs to another, and each ends when it has what it needs.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "conformance/case.h"
#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"
#include "support/random.h"

namespace xd::test {
namespace {

xd_gemm_config config_of_few_rows() {
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.operations = XD_GEMM_BIT(XD_GEMM_ALL_GATHER) | XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER) |
                      XD_GEMM_BIT(XD_GEMM_ALL_REDUCE);
  config.max_tokens = 256;
  config.max_k = config.max_n = 640;
  config.dtype = kF32;
  return config;
}

constexpr xd_gemm_operation kOperations[] = {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER,
                                             XD_GEMM_ALL_REDUCE};

// Of other sizes each: with rows on all ranks, on some, or on none.
GemmCase small_case(int num_ranks, Random& chance) {
  GemmCase c = plain_gemm_case(num_ranks, kOperations[chance.below(std::size(kOperations))]);
  constexpr TokenCounts kTokens[] = {TokenCounts::uneven, TokenCounts::holes, TokenCounts::one,
                                     TokenCounts::most,   TokenCounts::few,   TokenCounts::none};
  c.seed = chance.next();
  c.tokens = kTokens[chance.below(std::size(kTokens))];
  c.token_units = chance.one_in(3) ? 64 : 4;
  c.n_units = chance.one_in(3) ? 80 : 3;
  c.bias_grad = c.operation == XD_GEMM_REDUCE_SCATTER && chance.one_in(3) ? BiasGrad::reduced
                                                                          : BiasGrad::none;
  return c;
}

void delay(Random& random) {
  if (random.one_in(3)) {
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(2000)));
  }
}

TEST(FewRows, FollowOneAnotherWhateverDelaysARank) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, config_of_few_rows());
    Random chance(mix(test_seed(), 0x5311)),
        delays(mix(test_seed(), 0x5312, static_cast<std::uint64_t>(rank.rank)));
    for (int round = 0; round < 12; ++round) {
      std::vector<std::unique_ptr<GemmBatch>> batches;
      for (int i = 0; i < 6; ++i) {
        batches.push_back(
            std::make_unique<GemmBatch>(rank, small_case(rank.num_ranks, chance), round));
      }
      for (const auto& batch : batches) {
        delay(delays);
        ok(batch->enqueue(context.get()));
      }
      ok(finish(rank, context.get(), XD_SUCCESS));
      for (const auto& batch : batches) batch->check(context.get());
    }
  });
}

// Words that nobody reads are taken away, and the operations around are none the worse.
TEST(FewRows, GoOnAroundOneThatARankGivesUp) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, config_of_few_rows());
    for (int round = 0; round < 12; ++round) {
      const xd_gemm_operation operation = kOperations[round % 3];
      GemmBatch before(rank, plain_gemm_case(rank.num_ranks, operation), round),
          given_up(rank, plain_gemm_case(rank.num_ranks, operation), round),
          after(rank, plain_gemm_case(rank.num_ranks, operation), round + 1);
      ok(before.enqueue(context.get()));
      if (rank.rank == round % rank.num_ranks) {
        EXPECT_EQ(xd_gemm_join_failed(context.get(), operation, "why", rank.stream()),
                  XD_ERROR_INVALID_ARGUMENT);
      } else {
        const xd_status status = given_up.enqueue(context.get());
        EXPECT_EQ(status, rank.asynchronous() ? XD_SUCCESS : XD_ERROR_MISMATCH);
      }
      ok(after.enqueue(context.get()));
      rank.memory->synchronize();
      xd_gemm_status status = XD_GEMM_STATUS_INIT;
      ok(xd_gemm_context_status(context.get(), &status));
      const bool told = rank.asynchronous() && rank.rank != round % rank.num_ranks;
      EXPECT_EQ(status.status, told ? XD_ERROR_MISMATCH : XD_SUCCESS) << status.text;
      before.check(context.get());
      EXPECT_TRUE(given_up.guards_intact());
      after.check(context.get());
    }
  });
}

// It has what it came for: its peers need nothing more of it than it has sent.
TEST(FewRows, LetARankGoAtOnce) {
  on_every_rank([](Rank& rank) {
    for (int round = 0; round < 9; ++round) {
      const xd_gemm_operation operation = kOperations[round % 3];
      Comm own = rank.another_comm("brief" + std::to_string(round), std::size_t{8} << 20);
      Rank there = rank;
      there.comm = own.get();
      GemmContext context = make_context(own.get(), config_of_few_rows());
      GemmBatch first(there, plain_gemm_case(rank.num_ranks, operation), round),
          last(there, plain_gemm_case(rank.num_ranks, operation), round + 1);
      const bool leaves = rank.rank == round % rank.num_ranks;
      ok(first.enqueue(context.get()));
      if (!leaves) std::this_thread::sleep_for(std::chrono::microseconds(300));
      ok(finish(there, context.get(), last.enqueue(context.get())));
      if (!leaves) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      EXPECT_EQ(comm_error(own.get()).status, XD_SUCCESS) << comm_error(own.get()).text;
      first.check(context.get());
      last.check(context.get());
      context.reset();
      own.reset();
    }
  });
}

// Rows of about 300 KB on each rank go another way than few do, and in the same context.
TEST(FewRows, FollowMoreRows) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, config_of_few_rows());
    for (int round = 0; round < 6; ++round) {
      GemmCase c = plain_gemm_case(rank.num_ranks);
      c.tokens = TokenCounts::most;
      c.k_units = 80;
      c.token_units = round % 2 == 0 ? 240 : 8;
      GemmBatch batch(rank, c, round);
      ok(finish(rank, context.get(), batch.enqueue(context.get())));
      batch.check(context.get());
    }
  });
}

}  // namespace
}  // namespace xd::test
