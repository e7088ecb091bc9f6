// Products of 8 bits with one scale for 128 columns of a and one for 128 x 128 of b, of sizes that
// every executor takes.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

struct Size {
  std::int64_t n, k, tokens;
};
// Blocks of K that are a multiple of four, and that are not; rows of a rank that are a multiple of
// 16 or fewer, and those that are neither.
constexpr Size kSizes[] = {{128, 512, 32}, {384, 384, 37}, {256, 128, 5}};

GemmCase block_case(int num_ranks, xd_gemm_operation operation, const Size& size) {
  GemmCase c = block_gemm_case(num_ranks, operation);
  c.n_units = size.n / c.unit();
  c.k_units = size.k / c.unit();
  c.token_units = size.tokens;
  return c;
}

// All that may follow a product.
GemmCase full_block_case(int num_ranks, xd_gemm_operation operation, const Size& size) {
  GemmCase c = block_case(num_ranks, operation, size);
  c.addend = Addend::in_place;
  ask_for_everything(c);
  return c;
}

// Whether the call can be made, as all ranks find alike. Not every library and device multiplies
// with such scales, and says so; and not every algorithm does what is asked for.
bool can_call(xd_gemm_context* context, const GemmCase& c, const GemmBatch& batch) {
  xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
  const xd_status status = xd_gemm_explain(context, c.operation, &batch.args, &info);
  if (status == XD_SUCCESS) return true;
  const std::string why_not = xd_last_error();
  EXPECT_EQ(status, XD_ERROR_UNSUPPORTED) << why_not;
  const bool always =
      batch.args.algo == XD_GEMM_ALGO_AUTO || batch.args.algo == XD_GEMM_ALGO_SEQUENTIAL;
  EXPECT_TRUE(!always || why_not.find("scales per 128 columns need") != std::string::npos)
      << why_not;
  return false;
}

void call_and_check(const Rank& rank, xd_gemm_context* context, const GemmCase& c, int step,
                    xd_gemm_algo algo) {
  SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", algorithm " + std::to_string(algo) +
               ", call " + std::to_string(step) + " of " + c.description());
  GemmBatch batch(rank, c, step);
  batch.args.algo = algo;
  if (!can_call(context, c, batch)) return;
  batch.call_and_check(context);
}

TEST(BlockScales, MultiplyByEveryAlgorithm) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    for (const Size& size : kSizes) {
      on_every_rank([&](Rank& rank) {
        for (const TokenCounts tokens : {TokenCounts::most, TokenCounts::uneven}) {
          GemmCase c = block_case(rank.num_ranks, operation, size);
          c.tokens = tokens;
          const GemmContext context = make_context(rank.comm, c.config());
          for (const xd_gemm_algo algo : kGemmAlgos) {
            call_and_check(rank, context.get(), c, 0, algo);
          }
        }
      });
    }
  }
}

TEST(BlockScales, GoWithEverythingThatFollowsAProduct) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    for (const Size& size : kSizes) {
      on_every_rank([&](Rank& rank) {
        GemmCase c = full_block_case(rank.num_ranks, operation, size);
        for (const Output result : {Output::like_operands, Output::f32, Output::e4m3}) {
          c.result = result;
          if (c.scaled_output()) c.addend = Addend::added;
          const GemmContext context = make_context(rank.comm, c.config());
          for (int step = 0; step < GemmCase::kSteps; ++step) {
            call_and_check(rank, context.get(), c, step, XD_GEMM_ALGO_AUTO);
            call_and_check(rank, context.get(), c, step, XD_GEMM_ALGO_SPLIT);
          }
        }
      });
    }
  }
}

TEST(BlockScales, OfRandomNumbersAreThoseOfTheirBlocks) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    GemmCase c = block_case(rank.num_ranks, operation, kSizes[1]);
    c.values = Values::random;
    const GemmContext context = make_context(rank.comm, c.config());
    call_and_check(rank, context.get(), c, 0, XD_GEMM_ALGO_AUTO);
  });
}

// Scales that are not given are 1.
TEST(BlockScales, MayBeOfOneOperandAlone) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    const GemmCase c = block_case(rank.num_ranks, operation, kSizes[1]);
    const GemmContext context = make_context(rank.comm, c.config());
    for (const char* const name : {"a_scale", "b_scale"}) {
      SCOPED_TRACE(std::string(name_of(operation)) + " without " + name);
      GemmBatch batch(rank, c, 0);
      if (!can_call(context.get(), c, batch)) continue;
      GemmBatch::Field& field = batch.field(name);
      const std::vector<std::int64_t> shape = field.tensor->shape();
      field.tensor->write(std::vector<float>(static_cast<std::size_t>(shape[0] * shape[1]), 1));
      ok(batch.call(context.get()));
      const std::vector<std::byte> scaled = batch.output_bytes();
      *field.slot = nullptr;
      batch.reset();
      ok(batch.call(context.get()));
      EXPECT_EQ(batch.output_bytes(), scaled);
    }
  });
}

// The product of bulk has no bounds; where an executor lays its scales out anew, it has room for
// some.
TEST(BlockScales, OfAProductBesideATransferAreItsOwn) {
  on_every_rank([](Rank& rank) {
    const GemmCase c = block_case(rank.num_ranks, XD_GEMM_ALL_GATHER, kSizes[1]);
    xd_gemm_config config = c.config();
    config.operations |= XD_GEMM_BIT(XD_GEMM_BULK);
    const GemmContext context = make_context(rank.comm, config);
    GemmCase alone = block_case(1, XD_GEMM_ALL_GATHER, kSizes[1]);
    alone.seed += static_cast<std::uint64_t>(rank.rank);
    Rank self = rank;
    self.rank = 0;
    self.num_ranks = 1;
    GemmBatch product(self, alone, 0), moved(rank, c, 0);
    if (!can_call(context.get(), c, moved)) return;
    Tensor gathered(rank, kE4m3, {moved.expected().gathered.rows, c.k()}, Place::ordinary);
    xd_gemm_bulk_args args = XD_GEMM_BULK_ARGS_INIT;
    args.product = &product.args;
    args.in = moved.args.a;
    args.out = gathered.dl();
    args.tokens_per_rank = moved.args.tokens_per_rank;
    ok(finish(rank, context.get(), xd_gemm_bulk(context.get(), &args, rank.stream())));
    product.check(context.get());
    EXPECT_EQ(gathered.read(), codes_of(moved.expected().gathered, kE4m3));
  });
}

// Nothing bounds K where rows are summed, so an executor may lack the memory for more scales than
// max_k and max_n tell of: it says so on every rank, and what to do.
TEST(BlockScales, OfLongerSumsThanTheContextWasMadeForAreMultipliedOrRefused) {
  on_every_rank([](Rank& rank) {
    const GemmCase c =
        block_case(rank.num_ranks, XD_GEMM_REDUCE_SCATTER, {128, std::int64_t{128} * 64, 37});
    xd_gemm_config config = c.config();
    GemmContext context = make_context(rank.comm, config);
    call_and_check(rank, context.get(), c, 0, XD_GEMM_ALGO_AUTO);
    config.max_k = 128;
    context = make_context(rank.comm, config);
    GemmBatch batch(rank, c, 0);
    xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
    const xd_status can = xd_gemm_explain(context.get(), c.operation, &batch.args, &info);
    const GemmOutcome outcome = batch.call(context.get());
    EXPECT_EQ(outcome, can);
    if (can == XD_SUCCESS) return batch.check(context.get());
    EXPECT_EQ(can, XD_ERROR_UNSUPPORTED);
    EXPECT_TRUE(outcome.mentions("max_k")) << outcome.text;
    EXPECT_NE(rank.memory->device().device_type, kDLCPU);
  });
}

}  // namespace
}  // namespace xd::test
