// Rows that a caller has quantised already, and their scales: what dispatch refuses, and what ranks
// may disagree about. That they arrive bit for bit the grid shows, and that they are those of ep.h
// slots/forms_test.cc does.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "conformance/families/mistakes.h"

namespace xd::test {
namespace {

using S = Scene<LowLatency>;

// A group of rows of 512 bytes.
LlCase case_of(Sent sent) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.row_units = 32;
  c.sent = sent;
  return c;
}

TEST(LlGiven, ScalesThatDoNotFitTheirRowsAreRefused) {
  expect_mistakes<LowLatency>(
      case_of(Sent::e4m3_and_floats), XD_LL_DISPATCH,
      {{{"scales", "rows of tokens"},
        [](S& s) { s.damage(s.batch.dispatch_args.scales).shape[0] += 1; }},
       {{"scales", "columns", "expected 1 to"},
        [](S& s) { s.damage(s.batch.dispatch_args.scales).shape[1] = 0; }},
       {{"scales: has 16384 columns", "expected 1 to 16383"},
        [](S& s) {
          const std::int64_t tokens = s.batch.tokens();
          s.batch.dispatch_args.scales = s.tensor(kU8, {tokens, XD_LL_MAX_SCALES + 1});
        }},
       {{"scales: a row has 260 bytes beside 256", "512"},
        [](S& s) {
          const std::int64_t tokens = s.batch.tokens();
          s.batch.dispatch_args.scales = s.tensor(kF32, {tokens, 65});
        }},
       {{"scales", "quantise = XD_EP_QUANTISE_FP8_BLOCK128"},
        [](S& s) { s.batch.dispatch_args.quantise = XD_EP_QUANTISE_FP8_BLOCK128; }},
       {{"recv_scales = NULL", "scales are given"},
        [](S& s) { s.batch.dispatch_args.recv_scales = nullptr; }},
       {{"recv_scales: given", "scales are not"},
        [](S& s) { s.batch.dispatch_args.scales = nullptr; }},
       {{"recv_scales", "columns of scales"},
        [](S& s) { s.damage(s.batch.dispatch_args.recv_scales).shape[2] -= 1; }},
       {{"recv_scales: is uint8, expected float32"},
        [](S& s) {
          const DLTensor* const good = s.batch.dispatch_args.recv_scales;
          s.batch.dispatch_args.recv_scales = s.like(good, kU8);
        }},
       {{"recv_tokens: is uint8, expected float8_e4m3fn"}, [](S& s) {
          const DLTensor* const good = s.batch.dispatch_args.recv_tokens;
          s.batch.dispatch_args.recv_tokens = s.like(good, kU8);
        }}});
  // Rows of FP4 have 512 numbers here.
  expect_mistakes<LowLatency>(
      case_of(Sent::fp4_and_e4m3), XD_LL_DISPATCH,
      {{{"scales: has 31 columns", "expected one for 16 or for 32 numbers"},
        [](S& s) { s.damage(s.batch.dispatch_args.scales).shape[1] = 31; }},
       {{"tokens: a row has 248 bytes, expected a positive multiple of 16"},
        [](S& s) { s.damage(s.batch.dispatch_args.tokens).shape[1] = 248; }}});
}

// Rows that are wider than the quantised ones that they are received as.
TEST(LlGiven, RowsThatOnlyQuantisingMakesNameIt) {
  expect_mistakes<LowLatency>(
      case_of(Sent::as_they_are), XD_LL_DISPATCH,
      {{{"quantise = XD_EP_QUANTISE_NONE", "tokens are bfloat16"}, [](S& s) {
          const DLTensor* const good = s.batch.dispatch_args.recv_tokens;
          s.batch.dispatch_args.recv_tokens = s.like(good, kE4m3);
        }}});
}

TEST(LlGiven, AReceiveHalfNeedsTheTypeOfTheScalesThatWereSent) {
  const LlCase c = case_of(Sent::e4m3_and_e8m0);
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    S scene(rank, group.get(), c);
    const xd_ll_dispatch_args good = scene.batch.dispatch_args;
    ok(scene.batch.call(group.get(), XD_LL_DISPATCH, XD_LL_PHASE_SEND));
    if (is_guilty(rank)) {
      scene.batch.dispatch_args.recv_scales = scene.like(good.recv_scales, kE4m3);
    }
    const LlOutcome outcome = scene.batch.call(group.get(), XD_LL_DISPATCH, XD_LL_PHASE_RECEIVE);
    EXPECT_EQ(outcome, is_guilty(rank) ? XD_ERROR_INVALID_ARGUMENT : XD_SUCCESS) << outcome.text;
    EXPECT_TRUE(!is_guilty(rank) || outcome.mentions("recv_scales: is float8_e4m3fn") ||
                outcome.mentions("scales beside them"))  // found by a kernel
        << outcome.text;
    scene.batch.dispatch_args = good;
    LowLatency::expect_works(rank, c, group.get());
  });
}

// Rank 0 has other scales than all others, and the words in which each hears of it.
TEST(LlGiven, ScalesThatRanksDisagreeAboutAreNamed) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  struct Disagreement {
    DLDataType type;
    std::int64_t columns;  // 0 = none
    const char *at_rank_0, *elsewhere;
  };
  const Disagreement kinds[] = {
      {kF32, 0, "with scales, here without", "without scales, here with them"},
      {kF32, 3, "columns of scales 2, here 3", "columns of scales 3, here 2"},
      {kU8, 2, "bytes of a scale 4, here 1", "bytes of a scale 1, here 4"},
  };
  const LlCase c = case_of(Sent::e4m3_and_floats);  // 2 columns
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    for (const Disagreement& kind : kinds) {
      S scene(rank, group.get(), c);
      xd_ll_dispatch_args& args = scene.batch.dispatch_args;
      if (rank.rank == 0) {
        const bool given = kind.columns > 0;
        const DLTensor& rows = *args.recv_tokens;
        args.scales =
            given ? scene.tensor(kind.type, {scene.batch.tokens(), kind.columns}) : nullptr;
        args.recv_scales =
            given ? scene.tensor(kind.type, {rows.shape[0], rows.shape[1], kind.columns}) : nullptr;
      }
      const LlOutcome outcome = scene.batch.call(group.get(), XD_LL_DISPATCH);
      expect_disagreement(rank, outcome);
      EXPECT_TRUE(outcome.mentions(rank.rank == 0 ? kind.at_rank_0 : kind.elsewhere))
          << outcome.text;
      EXPECT_EQ(scene.batch.written(XD_LL_DISPATCH), "");
    }
    LowLatency::expect_works(rank, c, group.get());
  });
}

// Types of scales of one size may differ between ranks, as in ep.h: bytes are moved.
TEST(LlGiven, ScalesOfAnyTypeOfOneByteAgree) {
  on_every_rank([&](Rank& rank) {
    LlCase c = case_of(Sent::e4m3_and_e8m0);
    const LlGroup group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    DamagedTensor given(*batch.dispatch_args.scales), received(*batch.dispatch_args.recv_scales);
    given.tensor.dtype = received.tensor.dtype = rank.rank % 2 == 0 ? kU8 : kE4m3;
    batch.dispatch_args.scales = &given.tensor;
    batch.dispatch_args.recv_scales = &received.tensor;
    batch.expect_dispatched(batch.call(group.get(), XD_LL_DISPATCH));
  });
}

// Bytes of all ones are more than a row, where words of ones cannot travel.
TEST(LlGiven, RowsThatFillTheGroupsRowArriveOrHaveNoRoomInWords) {
  LlCase c = case_of(Sent::bytes);
  c.row_units = 896;
  c.full_rows = true;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    const LlOutcome outcome = batch.call(group.get(), XD_LL_DISPATCH);
    if (!rank.asynchronous()) return batch.expect_dispatched(outcome);
    EXPECT_EQ(outcome, XD_ERROR_UNSUPPORTED);
    EXPECT_TRUE(outcome.mentions("the room of this group's rows")) << outcome.text;
    EXPECT_EQ(batch.written(XD_LL_DISPATCH), "");
  });
}

}  // namespace
}  // namespace xd::test
