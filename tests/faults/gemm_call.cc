#include "faults/gemm_call.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace xd::test {
namespace {

constexpr std::int64_t kColumns = 8;

GemmCase case_of(const Rank& rank, xd_gemm_operation operation, std::int64_t token_units) {
  const bool product = operation <= XD_GEMM_ALL_REDUCE;
  GemmCase c =
      plain_gemm_case(product ? rank.num_ranks : 1, product ? operation : XD_GEMM_ALL_GATHER);
  c.token_units = token_units;
  c.tokens = TokenCounts::most;
  return c;
}

Rank alone(const Rank& rank) {
  Rank result = rank;
  result.rank = 0;
  result.num_ranks = 1;
  return result;
}

}  // namespace

xd_gemm_config gemm_fault_config(int num_ranks, std::int64_t token_units) {
  GemmCase c = plain_gemm_case(num_ranks);
  c.token_units = token_units;
  xd_gemm_config config = c.config();
  for (const xd_gemm_operation operation : kGemmOperations) {
    config.operations |= XD_GEMM_BIT(operation);
  }
  return config;
}

GemmCall::GemmCall(const Rank& rank, xd_gemm_operation operation, std::int64_t token_units)
    : rank_(rank), operation_(operation) {
  const GemmCase c = case_of(rank, operation, token_units);
  const bool moves = operation >= XD_GEMM_BULK;
  product_ = std::make_unique<GemmBatch>(moves ? alone(rank) : rank, c, 0);
  if (!moves) return;
  in_ = std::make_unique<Tensor>(rank, kF16, std::vector{c.max_tokens(), kColumns});
  out_ =
      std::make_unique<Tensor>(rank, kF16, std::vector{c.max_tokens() * rank.num_ranks, kColumns});
  in_->buffer().fill(static_cast<std::byte>(rank.rank + 1));
}

GemmOutcome GemmCall::call(xd_gemm_context* context) {
  product_->reset();
  if (operation_ <= XD_GEMM_ALL_REDUCE) return product_->call(context);
  if (operation_ == XD_GEMM_BULK) {
    xd_gemm_args product = product_->args;
    product.tokens_per_rank = nullptr;
    xd_gemm_bulk_args args = XD_GEMM_BULK_ARGS_INIT;
    args.product = &product;
    args.in = in_->dl();
    args.out = out_->dl();
    return finish(rank_, context, xd_gemm_bulk(context, &args, rank_.stream()));
  }
  xd_gemm_gather_args args = XD_GEMM_GATHER_ARGS_INIT;
  args.in = in_->dl();
  args.out = out_->dl();
  GemmOutcome begun =
      finish(rank_, context, xd_gemm_start_all_gather(context, &args, rank_.stream()));
  if (begun.status != XD_SUCCESS) return begun;
  return finish(rank_, context, xd_gemm_wait(context, rank_.stream()));
}

void GemmCall::check(xd_gemm_context* context) {
  if (operation_ != XD_GEMM_START_ALL_GATHER) product_->check(context);
  if (!out_) return;
  const std::vector<std::byte> bytes = out_->read();
  const std::size_t share = bytes.size() / static_cast<std::size_t>(rank_.num_ranks);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    ASSERT_EQ(bytes[i], static_cast<std::byte>(i / share + 1)) << "byte " << i << " of out";
  }
}

}  // namespace xd::test
