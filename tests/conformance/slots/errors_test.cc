// Errors of low-latency operations that cost nothing but the operation: disagreement between ranks,
// plans that do not fit, and calls that a group does not take.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/case.h"
#include "conformance/families/mistakes.h"
#include "conformance/has_wires.h"

namespace xd::test {
namespace {

constexpr xd_ll_phase kSend = XD_LL_PHASE_SEND, kReceive = XD_LL_PHASE_RECEIVE;

// A batch of 128 columns, so that it may be quantised.
LlCase wide_case() {
  LlCase c = plain_ll_case(world().num_ranks());
  c.row_units = 16;
  return c;
}

// Scales of equal size: nothing but the way itself tells them apart.
TEST(LlDisagreement, OnTheWayToQuantiseNamesBoth) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const LlCase c = wide_case();
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlCase mine = c;
    mine.sent = rank.rank == 0 ? Sent::float_scales : Sent::powers_of_two;
    LlBatch batch(rank, mine, 0);
    const LlOutcome outcome = batch.call(group.get(), XD_LL_DISPATCH);
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions("quantise")) << outcome.text;
    EXPECT_TRUE(outcome.mentions("FP8_BLOCK128_POW2")) << outcome.text;
    EXPECT_EQ(batch.written(XD_LL_DISPATCH), "");
    LowLatency::expect_works(rank, c, group.get());
  });
}

// Partial sums of equal length: nothing but the wire tells them apart. A receive half names that of
// its send half.
TEST(LlDisagreement, OnTheWireNamesBoth) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  LlCase c = wide_case();
  c.wire = XD_EP_WIRE_FP8_BLOCK128;
  on_every_rank([&](Rank& rank) {
    const std::vector<std::int32_t> owners = c.owners();
    xd_ll_config config = c.config(owners);
    config.wire_formats |= XD_EP_WIRE_BIT(XD_EP_WIRE_FP8_BLOCK128_POW2);
    const LlGroup group = make_group(rank.comm, config);
    LlBatch batch(rank, c, 0);
    batch.dispatch(group.get());
    if (rank.rank == 0) batch.combine_args.wire = XD_EP_WIRE_FP8_BLOCK128_POW2;
    if (rank.num_ranks > 1) {
      const LlOutcome outcome = batch.call(group.get(), XD_LL_COMBINE);
      EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
      EXPECT_TRUE(outcome.mentions(rank.rank == 0 ? "wire FP8_BLOCK128, here FP8_BLOCK128_POW2"
                                                  : "wire FP8_BLOCK128_POW2, here FP8_BLOCK128"))
          << outcome.text;
    }
    batch.combine_args.wire = c.wire;
    ok(batch.call(group.get(), XD_LL_COMBINE, kSend));
    batch.combine_args.wire = XD_EP_WIRE_SAME;
    const LlOutcome outcome = batch.call(group.get(), XD_LL_COMBINE, kReceive);
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(
        outcome.mentions("wire = XD_EP_WIRE_SAME, expected XD_EP_WIRE_FP8_BLOCK128, as in "
                         "the send half"))
        << outcome.text;
    batch.combine_args.wire = c.wire;
    batch.combine(group.get());
  });
}

// A kernel that polls codes beside their scales would look for them at places that are none.
TEST(LlWire, OfAReceiveHalfNeedsWholeBlocksOfColumns) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  LlCase c = wide_case();
  c.wire = XD_EP_WIRE_FP8_BLOCK128;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    batch.dispatch(group.get());
    ok(batch.call(group.get(), XD_LL_COMBINE, kSend));
    const DLTensor* const sound = batch.combine_args.out;
    Tensor narrow(rank, sound->dtype, {sound->shape[0], sound->shape[1] - 8});
    batch.combine_args.out = narrow.dl();
    const LlOutcome outcome = batch.call(group.get(), XD_LL_COMBINE, kReceive);
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions("expected a multiple of 128")) << outcome.text;
    batch.combine_args.out = sound;
    batch.combine(group.get());
  });
}

// One rank's scales are bytes and another's are packed: both have chosen E8M0, and rows agree.
TEST(LlDisagreement, OnTheFormOfTheScalesIsNone) {
  LlCase c = wide_case();
  c.row_units = 64;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlCase mine = c;
    mine.sent = rank.rank % 2 == 0 ? Sent::packed : Sent::e8m0;
    LlBatch batch(rank, mine, 0);
    batch.dispatch(group.get());
    batch.combine(group.get());
  });
}

TEST(LlPlan, OfAnotherBatchOnOneRankIsAMismatchOnAll) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank's plan is everybody's";
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c), another = make_group(rank, c);
    LlBatch a(rank, c, 0), b(rank, c, 0), there(rank, c, 0);
    a.dispatch(group.get());
    b.dispatch(group.get());        // an equal batch
    there.dispatch(another.get());  // one in a group of equal config, with the same number
    for (LlBatch* const wrong : {&b, &there}) {
      for (const bool halves : {false, true}) {
        a.use_plan(rank.rank == rank.num_ranks - 1 ? wrong->plan() : a.plan());
        if (halves) ok(a.call(group.get(), XD_LL_COMBINE, kSend));
        const LlOutcome outcome =
            a.call(group.get(), XD_LL_COMBINE, halves ? kReceive : XD_LL_PHASE_BOTH);
        EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
        EXPECT_TRUE(outcome.mentions("plan")) << outcome.text;
        EXPECT_EQ(a.written(XD_LL_COMBINE), "");
      }
    }
    a.use_plan(a.plan());
    a.combine(group.get());
    b.combine(group.get());
    there.combine(another.get());
  });
}

TEST(LlPlan, ThatIsNoneIsRefusedHereAndAMismatchForTheOthers) {
  const LlCase c = plain_ll_case(world().num_ranks());
  const Case high_throughput = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    const Group other = make_group(rank.comm, high_throughput.config(rank.rank));
    Batch prepared(rank, high_throughput);
    prepared.prepare(other.get());
    LlBatch batch(rank, c, 0);
    batch.dispatch(group.get());
    const std::vector<std::byte> good = batch.plan().read();
    std::vector<std::byte> zeros(good.size()), damaged = good, foreign = prepared.plan().read();
    damaged[24] ^= std::byte{0x40};
    foreign.resize(good.size());
    for (const std::vector<std::byte>* bytes : {&zeros, &damaged, &foreign}) {
      const bool guilty = rank.rank == rank.num_ranks - 1;
      if (guilty) batch.plan().write(*bytes);
      const LlOutcome outcome = batch.call(group.get(), XD_LL_COMBINE);
      EXPECT_EQ(outcome, guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
      EXPECT_TRUE(outcome.mentions(guilty ? "plan" : "rank " + std::to_string(rank.num_ranks - 1)))
          << outcome.text;
      EXPECT_EQ(batch.written(XD_LL_COMBINE), "");
      if (guilty) batch.plan().write(good);
      batch.combine(group.get());
      batch.next_combine();
    }
    // And a plan of dispatch is none of prepare's.
    prepared.use_plan(batch.plan().data(), batch.plan().bytes());
    const Outcome outcome = prepared.call(other.get(), XD_EP_COMBINE);
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions("xd_ll_dispatch")) << outcome.text;
    EXPECT_TRUE(prepared.untouched(XD_EP_COMBINE));
    // Nor are they to those who ask what they hold.
    const std::vector<std::byte> made = batch.plan().read(), theirs = prepared.plan().read();
    xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
    xd_ll_plan_info ll_info = XD_LL_PLAN_INFO_INIT;
    EXPECT_EQ(xd_ep_plan_get_info(made.data(), made.size(), &info), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_ll_plan_get_info(theirs.data(), theirs.size(), &ll_info),
              XD_ERROR_INVALID_ARGUMENT);
  });
}

// A reset has no peers to tell, and other numbers are no operation of the group. Such a call takes
// no turn: ranks may make it as often as they like.
TEST(LlJoinFailed, IsOfDispatchAndCombineAlone) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    for (int i = 0; i < rank.rank; ++i) {
      for (const int number : {int{XD_LL_RESET}, int{XD_EP_COMBINE}, 99}) {
        const auto operation = static_cast<xd_ll_operation>(number);
        EXPECT_EQ(xd_ll_join_failed(group.get(), operation, "no", rank.stream()),
                  XD_ERROR_INVALID_ARGUMENT);
        EXPECT_NE(std::string(xd_last_error()).find("XD_LL_COMBINE"), std::string::npos);
      }
    }
    LowLatency::expect_works(rank, c, group.get());
  });
}

// Their numbers, errors and turns are apart.
TEST(LlGroups, WorkBesideTheOthersOfACommunicator) {
  const LlCase c = plain_ll_case(world().num_ranks());
  const Case high_throughput = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const LlGroup slots = make_group(rank, c);
    const Group rows = make_group(rank.comm, high_throughput.config(rank.rank));
    LlBatch ll(rank, c, 0);
    Batch batch(rank, high_throughput);
    batch.prepare(rows.get());
    ok(ll.call(slots.get(), XD_LL_DISPATCH, kSend));
    ok(batch.call(rows.get(), XD_EP_DISPATCH));
    ok(ll.call(slots.get(), XD_LL_DISPATCH, kReceive));
    ok(batch.call(rows.get(), XD_EP_COMBINE));
    static_cast<void>(xd_ep_join_failed(rows.get(), XD_EP_COMBINE, "no", rank.stream()));
    EXPECT_EQ(last_ll_error().status, XD_SUCCESS);
    rank.memory->synchronize();
    EXPECT_EQ(group_status(slots.get()).status, XD_SUCCESS);
    static_cast<void>(group_status(rows.get()));
    ll.combine(slots.get());
  });
}

// A rank that makes a group of the other kind is told so, as of any other call.
TEST(LlGroups, AreNotMadeTogetherWithTheOthers) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank makes one kind";
  const LlCase c = plain_ll_case(world().num_ranks());
  const Case high_throughput = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Comm comm = rank.another_comm("of both", std::size_t{1} << 20);
    const std::vector<std::int32_t> owners = c.owners();
    const xd_ll_config slots = c.config(owners);
    const xd_ep_config rows = high_throughput.config(rank.rank);
    xd_ll_group* ll = nullptr;
    xd_ep_group* ep = nullptr;
    EXPECT_EQ(rank.rank == 0 ? xd_ll_group_create(comm.get(), &slots, &ll)
                             : xd_ep_group_create(comm.get(), &rows, &ep),
              XD_ERROR_MISMATCH);
    const std::string text = xd_last_error();
    EXPECT_NE(text.find("xd_ll_group_create"), std::string::npos) << text;
    EXPECT_EQ(ll, nullptr);
    EXPECT_EQ(ep, nullptr);
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(LlRefused, AreMasksWhereTheGroupKnowsNone) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const LlGroup fatal = make_group(rank, c);
    Tensor mask(rank, kI32, {rank.num_ranks});
    const int other = (rank.rank + 1) % rank.num_ranks;
    EXPECT_EQ(xd_ll_mask_set(fatal.get(), other, 1, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_ll_mask_get(fatal.get(), mask.dl(), rank.stream()), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_ll_reset(fatal.get(), rank.stream()), XD_ERROR_INVALID_ARGUMENT);
    rank.memory->synchronize();
    EXPECT_TRUE(mask.untouched());
    LowLatency::expect_works(rank, c, fatal.get());
  });
}

// xd_ll_config.on_error: an operation's error finishes the communicator.
TEST(LlOnErrorFatal, FinishesTheCommunicator) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Comm comm = rank.another_comm("finished", std::size_t{1} << 20);
    Rank there = rank;
    there.comm = comm.get();
    const std::vector<std::int32_t> owners = c.owners();
    xd_ll_config config = c.config(owners);
    config.on_error = XD_EP_ON_ERROR_FATAL;
    const LlGroup group = make_group(comm.get(), config);
    LlBatch batch(there, c, 0);
    if (rank.rank == 0) batch.dispatch_args.tokens = nullptr;
    const xd_status expected = rank.rank == 0 ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH;
    EXPECT_EQ(batch.call(group.get(), XD_LL_DISPATCH), expected);
    EXPECT_EQ(comm_error(comm.get()).status, expected) << comm_error(comm.get()).text;
    EXPECT_EQ(batch.call(group.get(), XD_LL_COMBINE), expected);
    ok(xd_comm_barrier(rank.comm));
  });
}

}  // namespace
}  // namespace xd::test
