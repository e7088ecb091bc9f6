// Groups whose rows lie without gaps: that they are the rows and sums of ep.h's layouts, and what
// such groups refuse. The grid has all else about them, as it has about slots.
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "conformance/case.h"
#include "conformance/families/mistakes.h"
#include "conformance/has_wires.h"

namespace xd::test {
namespace {

using S = Scene<LowLatency>;

// A batch of 128 columns, so that it may be quantised, with weights at both.
LlCase case_of(xd_ll_receive form, Sent sent, int alignment) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.row_units = 16;
  c.sent = sent;
  c.receive = form;
  c.alignment = alignment;
  c.weights = form == XD_LL_BY_EXPERT ? Weights::both : Weights::at_dispatch;
  return c;
}

xd_ep_config bulk_config(const LlCase& c, std::int64_t capacity) {
  const xd_ll_config ll = c.config(c.owners());  // in order: no list
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_experts = ll.num_experts;
  config.max_topk = ll.max_topk;
  config.max_tokens_per_rank = ll.max_tokens_per_rank;
  config.hidden = ll.hidden;
  config.dtype = ll.dtype;
  config.layout = c.receive == XD_LL_BY_EXPERT ? XD_EP_EXPERT_MAJOR : XD_EP_RANK_MAJOR;
  config.alignment = c.alignment;
  config.recv_capacity = capacity;
  config.wire_formats = ll.wire_formats;
  config.max_scale_bytes = ll.hidden;
  return config;
}

// The same batch by the operations of ep.h, into tensors like those of low latency, and the bytes
// of all compared.
class BulkTwin {
 public:
  BulkTwin(const Rank& rank, const LlCase& c, LlBatch& batch)
      : rank_(rank),
        by_expert_(c.receive == XD_LL_BY_EXPERT),
        batch_(batch),
        config_(bulk_config(c, batch.dispatch_args.recv_tokens->shape[0])),
        group_(make_group(rank.comm, config_)) {
    std::size_t bytes = 0;
    config_.num_ranks = rank.num_ranks;
    ok(xd_ep_plan_size(&config_, &bytes));
    plan_ = Buffer(rank, bytes, Place::ordinary);
  }

  void expect_equal_rows() {
    const xd_ll_dispatch_args& ll = batch_.dispatch_args;
    xd_ep_prepare_args prepare = XD_EP_PREPARE_ARGS_INIT;
    prepare.topk_idx = ll.topk_idx;
    set_plan(prepare, plan_);
    prepare.counts = twin("counts");
    if (by_expert_) prepare.offsets = twin("row_offsets");
    ok(finish(rank_, group_.get(), xd_ep_prepare(group_.get(), &prepare, rank_.stream())));
    xd_ep_dispatch_args dispatch = XD_EP_DISPATCH_ARGS_INIT;
    set_plan(dispatch, plan_);
    dispatch.tokens = ll.tokens;
    dispatch.scales = ll.scales;
    dispatch.topk_weights = ll.topk_weights;
    dispatch.quantise = ll.quantise;
    dispatch.recv_tokens = twin("recv_tokens");
    if (ll.recv_scales != nullptr) dispatch.recv_scales = twin("recv_scales");
    dispatch.recv_weights = twin("recv_weights");
    if (!by_expert_) dispatch.recv_topk_idx = twin("recv_topk_idx");
    ok(finish(rank_, group_.get(), xd_ep_dispatch(group_.get(), &dispatch, rank_.stream())));
    recv_weights_ = dispatch.recv_weights;
    for (auto& [name, tensor] : twins_) {
      EXPECT_EQ(tensor.read_buffer(), batch_.field(XD_LL_DISPATCH, name).tensor->read_buffer())
          << name;
    }
  }

  void expect_equal_sums(bool weighted) {
    xd_ep_combine_args combine = XD_EP_COMBINE_ARGS_INIT;
    set_plan(combine, plan_);
    combine.expert_out = batch_.combine_args.expert_out;
    combine.weights = weighted ? recv_weights_ : nullptr;
    combine.wire = batch_.combine_args.wire;
    Strided& out = *batch_.field(XD_LL_COMBINE, "out").tensor;
    Strided sums(rank_, out.type(), out.shape());
    combine.out = sums.dl();
    ok(finish(rank_, group_.get(), xd_ep_combine(group_.get(), &combine, rank_.stream())));
    EXPECT_EQ(sums.read_buffer(), out.read_buffer());
  }

 private:
  const DLTensor* twin(const char* name) {
    const Strided& of = *batch_.field(XD_LL_DISPATCH, name).tensor;
    return twins_.emplace_back(name, Strided(rank_, of.type(), of.shape())).second.dl();
  }

  const Rank& rank_;
  const bool by_expert_;
  LlBatch& batch_;
  xd_ep_config config_;
  const Group group_;
  Buffer plan_;
  std::deque<std::pair<const char*, Strided>> twins_;
  const DLTensor* recv_weights_ = nullptr;
};

TEST(LlForms, AreTheRowsAndSumsOfPrepareDispatchAndCombine) {
  std::vector<LlCase> cases;
  for (const Sent sent : {Sent::as_they_are, Sent::float_scales, Sent::powers_of_two, Sent::e8m0,
                          Sent::e4m3_and_floats, Sent::e4m3_and_e8m0, Sent::fp4_and_e4m3,
                          Sent::fp4_and_e8m0, Sent::bytes}) {
    cases.push_back(case_of(XD_LL_BY_RANK, sent, 1));
    for (const int alignment : {1, 8}) {
      cases.push_back(case_of(XD_LL_BY_EXPERT, sent, alignment));
    }
  }
  for (const xd_ep_wire wire : kWires) {
    if (!has_wires()) break;
    for (const xd_ll_receive form : {XD_LL_BY_RANK, XD_LL_BY_EXPERT}) {
      cases.push_back(case_of(form, Sent::as_they_are, 1));
      cases.back().wire = wire;
    }
  }
  on_every_rank([&](Rank& rank) {
    for (const LlCase& c : cases) {
      SCOPED_TRACE(c.description());
      const LlGroup group = make_group(rank, c);
      LlBatch batch(rank, c, 0);
      BulkTwin twin(rank, c, batch);
      ok(batch.call(group.get(), XD_LL_DISPATCH));
      twin.expect_equal_rows();
      for (const bool weighted : {false, true}) {
        if (weighted && c.receive == XD_LL_BY_RANK) continue;
        batch.combine_args.topk_weights = weighted ? batch.dispatch_args.topk_weights : nullptr;
        ok(batch.call(group.get(), XD_LL_COMBINE));
        twin.expect_equal_sums(weighted);
        batch.next_combine();
      }
    }
  });
}

// ---- Mistakes -----------------------------------------------------------------------------------

LlCase full_case(xd_ll_receive form) {
  for (const LlCase& c : LowLatency::full_cases()) {
    if (c.receive == form) return c;
  }
  return {};
}

TEST(LlForms, RefuseTensorsOfOtherForms) {
  expect_mistakes<LowLatency>(
      full_case(XD_LL_SLOTS), XD_LL_DISPATCH,
      {{{"row_offsets", "SLOTS"},
        [](S& s) { s.batch.dispatch_args.row_offsets = s.tensor(kI64, {s.c.local_experts + 1}); }},
       {{"recv_weights", "SLOTS"},
        [](S& s) { s.batch.dispatch_args.recv_weights = s.tensor(kF32, {100}); }},
       {{"recv_topk_idx", "SLOTS"},
        [](S& s) {
          s.batch.dispatch_args.recv_topk_idx = s.tensor(kI32, {100, s.c.topk});
        }},
       {{"max_tokens", "SLOTS"}, [](S& s) { s.batch.dispatch_args.max_tokens = s.c.max_tokens; }}});
  expect_mistakes<LowLatency>(
      full_case(XD_LL_BY_EXPERT), XD_LL_DISPATCH,
      {{{"source_ranges", "BY_EXPERT"},
        [](S& s) {
          s.batch.dispatch_args.source_ranges =
              s.tensor(kI64, {s.c.local_experts, s.rank.num_ranks});
        }},
       {{"source_tokens", "BY_EXPERT"},
        [](S& s) {
          s.batch.dispatch_args.source_tokens =
              s.tensor(kI32, {s.c.local_experts, s.c.num_slots()});
        }},
       {{"recv_topk_idx", "BY_EXPERT"}, [](S& s) {
          s.batch.dispatch_args.recv_topk_idx =
              s.tensor(kI32, {s.batch.dispatch_args.recv_tokens->shape[0], s.c.topk});
        }}});
  expect_mistakes<LowLatency>(
      full_case(XD_LL_BY_RANK), XD_LL_COMBINE,
      {{{"topk_weights", "BY_RANK"},
        [](S& s) { s.batch.combine_args.topk_weights = s.batch.dispatch_args.topk_weights; }}});
}

TEST(LlForms, RefuseSizesThatDoNotFit) {
  for (const xd_ll_receive form : {XD_LL_BY_EXPERT, XD_LL_BY_RANK}) {
    expect_mistakes<LowLatency>(
        full_case(form), XD_LL_DISPATCH,
        {{{"max_tokens = -1"}, [](S& s) { s.batch.dispatch_args.max_tokens = -1; }},
         {{"max_tokens = 6", "5"}, [](S& s) { s.batch.dispatch_args.max_tokens = 6; }},
         {{"tokens", "max_tokens = 4"}, [](S& s) { s.batch.dispatch_args.max_tokens = 4; }},
         {{"recv_tokens", "xd_ll_recv_bound"},
          [](S& s) { s.damage(s.batch.dispatch_args.recv_tokens).shape[0] -= 4; }},
         {{"recv_scales", "rows of recv_tokens"},
          [](S& s) { s.damage(s.batch.dispatch_args.recv_scales).shape[0] -= 1; }},
         {{"recv_weights", "rows of recv_tokens"},
          [](S& s) { s.damage(s.batch.dispatch_args.recv_weights).shape[0] -= 1; }},
         {{"row_offsets"},
          [](S& s) { s.damage(s.batch.dispatch_args.row_offsets).shape[0] -= 1; }}});
    expect_mistakes<LowLatency>(full_case(form), XD_LL_COMBINE,
                                {{{"expert_out", "rows"}, [](S& s) {
                                    s.damage(s.batch.combine_args.expert_out).shape[0] -= 1;
                                  }}});
  }
  expect_mistakes<LowLatency>(
      full_case(XD_LL_BY_RANK), XD_LL_DISPATCH,
      {{{"recv_topk_idx", "columns"},
        [](S& s) { s.damage(s.batch.dispatch_args.recv_topk_idx).shape[1] -= 1; }},
       {{"recv_weights", "columns"},
        [](S& s) { s.damage(s.batch.dispatch_args.recv_weights).shape[1] -= 1; }}});
}

TEST(LlForms, RefuseWeightsToReceiveThatNobodySends) {
  LlCase c = full_case(XD_LL_BY_EXPERT);
  c.weights = Weights::none;
  expect_mistakes<LowLatency>(c, XD_LL_DISPATCH,
                              {{{"recv_weights", "topk_weights"}, [](S& s) {
                                  s.batch.dispatch_args.recv_weights =
                                      s.tensor(kF32, {s.batch.dispatch_args.recv_tokens->shape[0]});
                                }}});
}

// The halves of one call must agree, also where only a kernel can see it.
TEST(LlForms, RefuseAReceiveHalfUnlikeItsSendHalf) {
  using Spoil = void (*)(S&);
  const Spoil spoils[] = {
      [](S& s) { s.batch.dispatch_args.max_tokens = s.c.max_tokens - 1; },
      [](S& s) { s.batch.dispatch_args.recv_weights = nullptr; },
      [](S& s) { s.damage(s.batch.dispatch_args.recv_topk_idx).shape[1] -= 1; },
      [](S& s) { s.damage(s.batch.dispatch_args.recv_weights).shape[1] -= 1; },
      [](S& s) { s.batch.dispatch_args.recv_scales = nullptr; },
      [](S& s) { s.damage(s.batch.dispatch_args.recv_scales).shape[1] -= 1; },
  };
  LlCase c = full_case(XD_LL_BY_RANK);
  c.tokens = Tokens::all_zero;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = LowLatency::make(rank, c);
    for (const Spoil spoil : spoils) {
      S scene(rank, group.get(), c);
      const xd_ll_dispatch_args good = scene.batch.dispatch_args;
      ok(scene.batch.call(group.get(), XD_LL_DISPATCH, XD_LL_PHASE_SEND));
      if (is_guilty(rank)) spoil(scene);
      const LlOutcome outcome = scene.batch.call(group.get(), XD_LL_DISPATCH, XD_LL_PHASE_RECEIVE);
      EXPECT_EQ(outcome, is_guilty(rank) ? XD_ERROR_INVALID_ARGUMENT : XD_SUCCESS) << outcome.text;
      if (is_guilty(rank)) {
        EXPECT_TRUE(outcome.mentions("send half") || outcome.mentions("topk_weights") ||
                    outcome.mentions("topk_idx") || outcome.mentions("recv_scales"))
            << outcome.text;
      }
      scene.batch.dispatch_args = good;
    }
    LowLatency::expect_works(rank, c, group.get());
  });
}

TEST(LlDisagreement, OnTheTokensOfACallNamesThem) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  LlCase c = full_case(XD_LL_BY_RANK);
  c.tokens = Tokens::all_zero;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    batch.dispatch_args.max_tokens = rank.rank == 0 ? 2 : 3;
    const LlOutcome outcome = batch.call(group.get(), XD_LL_DISPATCH);
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions("max_tokens")) << outcome.text;
    EXPECT_EQ(batch.written(XD_LL_DISPATCH), "");
    LowLatency::expect_works(rank, c, group.get());
  });
}

TEST(LlPlan, OfAGroupOfAnotherFormIsRefused) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    for (const xd_ll_receive form : {XD_LL_BY_EXPERT, XD_LL_BY_RANK}) {
      LlCase other = c;
      other.receive = form;
      const LlGroup slots = make_group(rank, c), rows = make_group(rank, other);
      LlBatch a(rank, c, 0), b(rank, other, 0);
      a.dispatch(slots.get());
      b.dispatch(rows.get());
      a.use_plan(b.plan());
      const LlOutcome outcome = a.call(slots.get(), XD_LL_COMBINE);
      EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
      EXPECT_TRUE(outcome.mentions("layout")) << outcome.text;
      b.combine(rows.get());
    }
  });
}

// The smallest numbers that no routing can exceed.
TEST(LlConfig, SaysHowManyRowsMayCome) {
  LlCase c = plain_ll_case(4);
  c.topk = 8;
  c.local_experts = 3;
  c.max_tokens = 16;
  const auto bound = [&](std::int32_t tokens) {
    const std::vector<std::int32_t> owners = c.owners();
    const xd_ll_config config = c.config(owners);
    std::int64_t rows = 0;
    ok(xd_ll_recv_bound(&config, tokens, &rows));
    return rows;
  };
  c.receive = XD_LL_BY_RANK;
  EXPECT_EQ(bound(0), 4 * 16);
  EXPECT_EQ(bound(5), 4 * 5);
  c.receive = XD_LL_BY_EXPERT;
  EXPECT_EQ(bound(0), 4 * 16 * 3);
  c.alignment = 32;
  EXPECT_EQ(bound(0), 3 * 64);
  EXPECT_EQ(bound(9), 3 * 64);  // 36 rows in each zone
  std::int64_t rows = 0;
  const std::vector<std::int32_t> owners = c.owners();
  xd_ll_config config = c.config(owners);
  EXPECT_EQ(xd_ll_recv_bound(&config, 17, &rows), XD_ERROR_INVALID_ARGUMENT);
  expect_said("max_tokens = 17");
  config.receive = XD_LL_SLOTS;
  config.alignment = 0;
  EXPECT_EQ(xd_ll_recv_bound(&config, 0, &rows), XD_ERROR_INVALID_ARGUMENT);
  expect_said("receive");
}

}  // namespace
}  // namespace xd::test
