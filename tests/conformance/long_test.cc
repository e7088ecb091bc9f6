// Ten thousand steps on end, ranks out of step by random delays: what one step leaves behind must
// never be taken for part of another.
#include <gtest/gtest.h>

#include <cstdio>
#include <deque>
#include <string>
#include <vector>

#include "conformance/numeric.h"
#include "conformance/random_delay.h"
#include "conformance/routing.h"
#include "conformance/slots/batch.h"
#include "support/gtest_main.h"
#include "support/outcome.h"
#include "support/random.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

constexpr int kSteps = 10000;
constexpr int kMaxTokens = 5;
constexpr int kTopk = 3;
constexpr int kLocalExperts = 2;
constexpr int kHidden = 8;

// Small enough that n <= K copies of it add up exactly.
float token_value(int step, int rank, int token, int column) {
  return static_cast<float>(mix(static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(rank),
                                static_cast<std::uint64_t>(token),
                                static_cast<std::uint64_t>(column)) %
                            2000);
}

class LongRun {
 public:
  explicit LongRun(const Rank& rank) : rank_(rank), delays_(static_cast<std::uint64_t>(rank.rank)) {
    config_.num_experts = rank.num_ranks * kLocalExperts;
    config_.max_topk = kTopk;
    config_.max_tokens_per_rank = kMaxTokens;
    config_.hidden = kHidden;
    config_.dtype = kF32;
    config_.num_ranks = rank.num_ranks;
    group_ = make_group(rank.comm, config_);
    ok(xd_ep_recv_bound(&config_, &bound_));
    plan_ = make_plan(rank, config_);
  }

  // Dispatch, then combine what arrived: each token comes back as often as it was sent.
  void step(int number) {
    const RoutingShape shape{rank_.num_ranks, config_.num_experts, kTopk,
                             kMaxTokens,      Pattern::holes,      Tokens::differ};
    const Choices mine = make_routing(
        shape, static_cast<std::uint64_t>(number))[static_cast<std::size_t>(rank_.rank)];
    Tensor topk_idx(rank_, kI64, {mine.tokens, kTopk});
    topk_idx.write(mine.ids);
    Tensor tokens(rank_, kF32, {mine.tokens, kHidden});
    std::vector<float> values;
    for (int token = 0; token < mine.tokens; ++token) {
      for (int column = 0; column < kHidden; ++column) {
        values.push_back(token_value(number, rank_.rank, token, column));
      }
    }
    tokens.write(values);
    const std::vector<float> back = round_trip(topk_idx, tokens, number);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const int token = static_cast<int>(i) / kHidden;
      int copies = 0;
      for (int k = 0; k < kTopk; ++k) copies += mine.id(token, k) >= 0 ? 1 : 0;
      if (back[i] != static_cast<float>(copies) * values[i]) {
        throw std::runtime_error("step " + std::to_string(number) + " token " +
                                 std::to_string(token) + ": got " + std::to_string(back[i]) +
                                 ", expected " + std::to_string(copies) + " x " +
                                 std::to_string(values[i]));
      }
    }
  }

 private:
  // Three operations on end; nothing waits between them but what they wait for themselves.
  std::vector<float> round_trip(Tensor& topk_idx, Tensor& tokens, int number) {
    // Ranks change between staging and zero-copy, each at its own pace.
    const Place place = (number / (rank_.rank + 1)) % 2 == 0 ? Place::ordinary : Place::symmetric;
    Tensor rows(rank_, kF32, {bound_, kHidden}, place);
    Tensor out(rank_, kF32, tokens.shape());
    xd_ep_prepare_args prepare = XD_EP_PREPARE_ARGS_INIT;
    prepare.topk_idx = topk_idx.dl();
    set_plan(prepare, plan_);
    random_delay(delays_);
    ok(xd_ep_prepare(group_.get(), &prepare, rank_.stream()));
    xd_ep_dispatch_args dispatch = XD_EP_DISPATCH_ARGS_INIT;
    set_plan(dispatch, plan_);
    dispatch.tokens = tokens.dl();
    dispatch.recv_tokens = rows.dl();
    random_delay(delays_);
    ok(xd_ep_dispatch(group_.get(), &dispatch, rank_.stream()));
    xd_ep_combine_args combine = XD_EP_COMBINE_ARGS_INIT;
    set_plan(combine, plan_);
    combine.expert_out = rows.dl();
    combine.out = out.dl();
    random_delay(delays_);
    ok(finish(rank_, group_.get(), xd_ep_combine(group_.get(), &combine, rank_.stream())));
    return out.read_as<float>();
  }

  const Rank& rank_;
  Random delays_;
  xd_ep_config config_ = XD_EP_CONFIG_INIT;
  Group group_;
  std::int64_t bound_ = 0;
  Buffer plan_;
};

constexpr int kBatches = 4;

// Low-latency steps of some batches, all of one kind first: a rank may be ahead of its peers by as
// much as they have places. For each pair a rank decides by itself whether both sends come first.
void ll_steps(const Rank& rank, const LlCase& c, xd_ll_group* group, int number, Random& delays) {
  std::deque<LlBatch> batches;
  for (int i = 0; i < kBatches; ++i) batches.emplace_back(rank, c, number + i);
  using Half = void (LlBatch::*)(xd_ll_group*, xd_ll_phase);
  for (const Half operation : {&LlBatch::dispatch, &LlBatch::combine}) {
    const auto call = [&](LlBatch& batch, xd_ll_phase phase) {
      random_delay(delays);
      (batch.*operation)(group, phase);
    };
    for (std::size_t i = 0; i < kBatches; i += 2) {
      LlBatch &a = batches[i], &b = batches[i + 1];
      if (delays.one_in(3)) {
        call(a, XD_LL_PHASE_BOTH);
        call(b, XD_LL_PHASE_BOTH);
        continue;
      }
      call(a, XD_LL_PHASE_SEND);
      call(b, XD_LL_PHASE_SEND);
      call(a, XD_LL_PHASE_RECEIVE);
      call(b, XD_LL_PHASE_RECEIVE);
    }
  }
}

TEST(LongRun, TenThousandLowLatencyStepsWithRandomDelays) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.pattern = Pattern::holes;
  c.tokens = Tokens::differ;
  c.max_tokens = kMaxTokens;
  c.local_experts = kLocalExperts;
  c.row_units = 2;
  on_every_rank([&](Rank& rank) {
    Random delays(static_cast<std::uint64_t>(rank.rank));
    const LlGroup group = make_group(rank, c);
    for (int number = 0; number < kSteps && !testing::Test::HasFailure(); number += kBatches) {
      ll_steps(rank, c, group.get(), number, delays);
    }
  });
}

TEST(LongRun, TenThousandStepsWithRandomDelays) {
  on_every_rank([](Rank& rank) {
    LongRun run(rank);
    for (int number = 0; number < kSteps; ++number) {
      run.step(number);
      if (rank.rank == 0 && (number + 1) % 2000 == 0) {
        std::printf("%d of %d steps\n", number + 1, kSteps);
        std::fflush(stdout);
      }
    }
  });
}

}  // namespace
}  // namespace xd::test
