// Bad arguments of low-latency calls beside those that all families refuse alike; and sizes that a
// config says.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "conformance/families/mistakes.h"

namespace xd::test {
namespace {

using S = Scene<LowLatency>;

LlCase full_case() { return LowLatency::full_cases().front(); }

// Of tensors [L,S,H] and [L,S,C]: rows in parts, rows that share a place, rows between multiples of
// 16 bytes.
std::vector<std::vector<std::int64_t>> wrong_strides(const LlBatch::Field& field) {
  const std::string name = field.name;
  if (name != "recv_tokens" && name != "recv_scales" && name != "expert_out") return {};
  const std::int64_t s = (*field.slot)->shape[1], h = (*field.slot)->shape[2];
  std::vector<std::vector<std::int64_t>> wrong;
  if (field.output) wrong = {{0, h, 1}, {s * h, 0, 1}, {h, h, 1}};
  if (name != "recv_scales") {
    wrong.push_back({2 * s * h, 2 * h, 2});
    wrong.push_back({s * (h + 1), h + 1, 1});
  }
  if (name == "recv_tokens") wrong.push_back({s * h, h - 16, 1});
  return wrong;
}

TEST(LlArguments, WithStridesThatGiveNoRowAPlaceOfItsOwnAreRefused) {
  const LlCase c = full_case();
  on_every_rank([&](Rank& rank) {
    const LlGroup group = LowLatency::make(rank, c);
    S scene(rank, group.get(), c);
    for (const LlBatch::Field& field : scene.batch.fields()) {
      for (const std::vector<std::int64_t>& strides : wrong_strides(field)) {
        SCOPED_TRACE(testing::PrintToString(strides));
        scene.expect_refused(field.operation, {field.name}, [&](S& s) {
          s.damage(*field.slot).give_strides({strides[0], strides[1], strides[2]});
        });
      }
    }
    LowLatency::expect_works(rank, c, group.get());
  });
}

TEST(LlArguments, BesideTensorsAreRefused) {
  expect_mistakes<LowLatency>(
      full_case(), XD_LL_DISPATCH,
      {{{"struct_size"}, [](S& s) { s.batch.dispatch_args.struct_size = 0; }},
       {{"plan"}, [](S& s) { s.batch.dispatch_args.plan = nullptr; }},
       {{"plan_bytes"}, [](S& s) { s.batch.dispatch_args.plan_bytes -= 16; }},
       {{"plan"},
        [](S& s) {
          void*& plan = s.batch.dispatch_args.plan;
          plan = static_cast<std::byte*>(plan) + 4;
        }},
       {{"quantise"}, [](S& s) { force(s.batch.dispatch_args.quantise, 4); }},
       {{"quantise"}, [](S& s) { force(s.batch.dispatch_args.quantise, 5); }},
       {{"quantise"}, [](S& s) { force(s.batch.dispatch_args.quantise, -1); }},
       {{"recv_tokens"}, [](S& s) { force(s.batch.dispatch_args.quantise, 0); }}});
  expect_mistakes<LowLatency>(
      full_case(), XD_LL_COMBINE,
      {{{"struct_size"}, [](S& s) { s.batch.combine_args.struct_size = 0; }},
       {{"plan"}, [](S& s) { s.batch.combine_args.plan = nullptr; }},
       {{"plan"}, [](S& s) { s.batch.combine_args.plan_bytes = 0; }},
       {{"plan"}, [](S& s) { s.batch.combine_args.plan_bytes = 64; }},
       {{"wire = 5", "0 to 4"}, [](S& s) { force(s.batch.combine_args.wire, 5); }},
       {{"XD_EP_WIRE_FLOAT32", "config.wire_formats = 0"},
        [](S& s) { s.batch.combine_args.wire = XD_EP_WIRE_FLOAT32; }},
       {{"plan"}, [](S& s) {
          const void*& plan = s.batch.combine_args.plan;
          plan = static_cast<const std::byte*>(plan) + 4;
        }}});
}

// Which half is meant is not known, so it is the whole operation, of which the peers hear.
TEST(LlArguments, APhaseThatIsNoneFailsAsAWholeCallAndNamesTheRankToPeers) {
  const LlCase c = LowLatency::plain();
  on_every_rank([&](Rank& rank) {
    const LlGroup group = LowLatency::make(rank, c);
    LlBatch batch(rank, c, 0);
    for (const int phase : {-1, 3}) {
      for (const xd_ll_operation kind : LowLatency::kOperations) {
        LowLatency::make_plan(batch, group.get());
        batch.reset_tensors(kind);
        xd_ll_dispatch_args dispatch = batch.dispatch_args;
        xd_ll_combine_args combine = batch.combine_args;
        if (is_guilty(rank)) {  // in the struct: C++ code may not pass this on as an enum
          force(dispatch.phase, phase);
          force(combine.phase, phase);
        }
        const LlOutcome outcome =
            finish(rank, group.get(),
                   kind == XD_LL_DISPATCH ? xd_ll_dispatch(group.get(), &dispatch, rank.stream())
                                          : xd_ll_combine(group.get(), &combine, rank.stream()));
        EXPECT_EQ(outcome.met.rank, guilty_rank(rank)) << outcome.text;
        expect_blamed(rank, outcome, {guilty_rank(rank), {"phase"}});
        EXPECT_EQ(batch.written(kind), "");
      }
    }
    batch.reset_tensors(XD_LL_DISPATCH);
    batch.dispatch(group.get());
    batch.combine(group.get());
  });
}

// Sizes of a batch beyond those of the group.
TEST(LlArguments, BatchesThatTheGroupCannotHoldAreRefused) {
  struct Larger {
    Words words;
    void (*grow)(LlCase&);
  };
  const Larger kinds[] = {
      {{}, [](LlCase& l) { l.max_tokens += 1; }},
      {{"topk_idx"}, [](LlCase& l) { l.topk += 1; }},
      {{"tokens"}, [](LlCase& l) { l.row_units += 1; }},
  };
  const LlCase c = LowLatency::plain();
  on_every_rank([&](Rank& rank) {
    const LlGroup group = LowLatency::make(rank, c);
    for (const Larger& kind : kinds) {
      LlCase own = c;
      if (is_guilty(rank)) kind.grow(own);
      S(rank, group.get(), own).expect_refused(XD_LL_DISPATCH, kind.words, [](S&) {});
    }
    LowLatency::expect_works(rank, c, group.get());
  });
}

// ---- Sizes --------------------------------------------------------------------------------------

TEST(LlConfig, OfMoreRanksThanThereMayBeIsRefused) {
  LlCase c = plain_ll_case(XD_LL_MAX_RANKS);
  std::size_t bytes = 0;
  xd_ll_config config = c.config(c.owners());
  EXPECT_EQ(xd_ll_plan_size(&config, &bytes), XD_SUCCESS) << xd_last_error();
  c.num_ranks = XD_LL_MAX_RANKS + 1;
  config = c.config(c.owners());
  EXPECT_EQ(xd_ll_plan_size(&config, &bytes), XD_ERROR_INVALID_ARGUMENT);
  expect_said("num_ranks");
}

// Without a list E / W each, in order.
TEST(LlConfig, TellsTheExpertsOfEachRank) {
  LlCase c = plain_ll_case(4);
  std::int32_t found = -1;
  xd_ll_config config = c.config(c.owners());
  for (int rank = 0; rank < 4; ++rank) {
    ok(xd_ll_local_experts(&config, rank, &found));
    EXPECT_EQ(found, c.local_experts);
  }
  EXPECT_EQ(xd_ll_local_experts(&config, 4, &found), XD_ERROR_INVALID_ARGUMENT);
  expect_said("rank = 4");
  const std::vector<std::int32_t> owners(static_cast<std::size_t>(config.num_experts), 2);
  config.expert_ranks = owners.data();
  ok(xd_ll_local_experts(&config, 1, &found));
  EXPECT_EQ(found, 0);
  ok(xd_ll_local_experts(&config, 2, &found));
  EXPECT_EQ(found, config.num_experts);
}

// As the header says: about W*T*(8*K + 16) bytes, and memory that grows with what is in flight.
TEST(LlConfig, SaysHowMuchMemoryItTakes) {
  LlCase c = plain_ll_case(4);
  c.local_experts = 64;
  c.topk = 8;
  c.max_tokens = 128;
  c.row_units = 896;
  xd_ll_config config = c.config(c.owners());
  std::size_t plan_bytes = 0;
  ok(xd_ll_plan_size(&config, &plan_bytes));
  EXPECT_LE(plan_bytes, 4u * 128 * (8 * 8 + 16) * 5 / 4 + 8192);
  std::size_t last = 0;
  for (const int in_flight : {2, 3, 4}) {
    config.in_flight = in_flight;
    xd_ll_memory memory = XD_LL_MEMORY_INIT;
    ok(xd_ll_group_memory(&config, &memory));
    EXPECT_GT(memory.symmetric_bytes, last);
    last = memory.symmetric_bytes;
    EXPECT_LE(memory.symmetric_bytes + memory.private_bytes,
              static_cast<std::size_t>(in_flight) * 20'000'000u);
  }
}

}  // namespace
}  // namespace xd::test
