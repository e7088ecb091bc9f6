// Errors of low-latency operations that cost nothing but the operation: disagreement between ranks,
// plans that do not fit, and calls that a group does not take.
#include <gtest/gtest.h>

#include <string>

#include "conformance/families/mistakes.h"

namespace xd::test {
namespace {

constexpr xd_ep_operation kKinds[] = {XD_EP_LL_DISPATCH, XD_EP_LL_COMBINE};
constexpr xd_ep_phase kSend = XD_EP_PHASE_SEND, kReceive = XD_EP_PHASE_RECEIVE;

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
    const Group group = make_group(rank, c);
    LlCase mine = c;
    mine.sent = rank.rank == 0 ? Sent::float_scales : Sent::powers_of_two;
    LlBatch batch(rank, mine, 0);
    const Outcome outcome = batch.call(group.get(), XD_EP_LL_DISPATCH);
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions("quantise")) << outcome.text;
    EXPECT_TRUE(outcome.mentions("FP8_BLOCK128_POW2")) << outcome.text;
    EXPECT_EQ(batch.written(XD_EP_LL_DISPATCH), "");
    LowLatency::expect_works(rank, c, group.get());
  });
}

// One rank's scales are bytes and another's are packed: both have chosen E8M0, and rows agree.
TEST(LlDisagreement, OnTheFormOfTheScalesIsNone) {
  LlCase c = wide_case();
  c.row_units = 64;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank, c);
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
    const Group group = make_group(rank, c), another = make_group(rank, c);
    LlBatch a(rank, c, 0), b(rank, c, 0), there(rank, c, 0);
    a.dispatch(group.get());
    b.dispatch(group.get());        // an equal batch
    there.dispatch(another.get());  // one in a group of equal config, with the same number
    for (LlBatch* const wrong : {&b, &there}) {
      for (const bool halves : {false, true}) {
        a.use_plan(rank.rank == rank.num_ranks - 1 ? wrong->plan() : a.plan());
        if (halves) ok(a.call(group.get(), XD_EP_LL_COMBINE, kSend));
        const Outcome outcome =
            a.call(group.get(), XD_EP_LL_COMBINE, halves ? kReceive : XD_EP_PHASE_BOTH);
        EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
        EXPECT_TRUE(outcome.mentions("plan")) << outcome.text;
        EXPECT_EQ(a.written(XD_EP_LL_COMBINE), "");
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
    const Group group = make_group(rank, c);
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
      const Outcome outcome = batch.call(group.get(), XD_EP_LL_COMBINE);
      EXPECT_EQ(outcome, guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
      EXPECT_TRUE(outcome.mentions(guilty ? "plan" : "rank " + std::to_string(rank.num_ranks - 1)))
          << outcome.text;
      EXPECT_EQ(batch.written(XD_EP_LL_COMBINE), "");
      if (guilty) batch.plan().write(good);
      batch.combine(group.get());
      batch.next_combine();
    }
    // And a plan of slots is none of theirs.
    prepared.use_plan(batch.plan().data(), batch.plan().bytes());
    EXPECT_EQ(prepared.call(other.get(), XD_EP_COMBINE), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(prepared.untouched(XD_EP_COMBINE));
  });
}

// They concern nobody else and take no turn: ranks may make them as often as they like.
TEST(LlRefused, AreTheOperationsOfTheOtherLayoutsInEitherGroup) {
  const LlCase c = plain_ll_case(world().num_ranks());
  const Case high_throughput = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group slots = make_group(rank, c);
    const Group rows = make_group(rank.comm, high_throughput.config(rank.rank));
    Batch batch(rank, high_throughput);
    LlBatch ll(rank, c, 0);
    batch.prepare(rows.get());
    batch.poison_outputs();
    ll.dispatch(slots.get());
    ll.reset_tensors(XD_EP_LL_DISPATCH);
    for (int i = 0; i < rank.rank; ++i) {
      for (const xd_ep_operation operation :
           {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD}) {
        SCOPED_TRACE("operation " + std::to_string(operation));
        const Outcome outcome = batch.call(slots.get(), operation);
        EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
        EXPECT_TRUE(outcome.mentions("EXPERT_SLOTS")) << outcome.text;
        EXPECT_TRUE(batch.untouched(operation));
        EXPECT_EQ(xd_ep_join_failed(slots.get(), operation, "no", rank.stream()),
                  XD_ERROR_INVALID_ARGUMENT);
      }
      for (const xd_ep_operation kind : kKinds) {
        for (const xd_ep_phase phase : {XD_EP_PHASE_BOTH, kSend, kReceive}) {
          const Outcome outcome = ll.call(rows.get(), kind, phase);
          EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
          EXPECT_TRUE(outcome.mentions("EXPERT_SLOTS")) << outcome.text;
          EXPECT_EQ(ll.written(kind), "");
        }
      }
    }
    rank.memory->synchronize();
    static_cast<void>(group_status(slots.get()));
    static_cast<void>(group_status(rows.get()));
    ll.dispatch(slots.get());
    ll.combine(slots.get());
    batch.prepare(rows.get());
    ok(batch.call(rows.get(), XD_EP_DISPATCH));
  });
}

TEST(LlRefused, AreMasksWhereTheGroupKnowsNone) {
  const LlCase c = plain_ll_case(world().num_ranks());
  const Case high_throughput = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group fatal = make_group(rank, c);
    const Group rows = make_group(rank.comm, high_throughput.config(rank.rank));
    Tensor mask(rank, kI32, {rank.num_ranks});
    const int other = (rank.rank + 1) % rank.num_ranks;
    for (xd_ep_group* const group : {fatal.get(), rows.get()}) {
      EXPECT_EQ(xd_ep_ll_mask_set(group, other, 1, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
      EXPECT_EQ(xd_ep_ll_mask_get(group, mask.dl(), rank.stream()), XD_ERROR_INVALID_ARGUMENT);
      EXPECT_EQ(xd_ep_ll_reset(group, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
    }
    rank.memory->synchronize();
    EXPECT_TRUE(mask.untouched());
    LowLatency::expect_works(rank, c, fatal.get());
  });
}

// xd_ep_config.on_error: an operation's error finishes the communicator.
TEST(LlOnErrorFatal, FinishesTheCommunicator) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Comm comm = rank.another_comm("finished", std::size_t{1} << 20);
    Rank there = rank;
    there.comm = comm.get();
    const std::vector<std::int32_t> owners = c.owners();
    xd_ep_config config = c.config(owners);
    config.on_error = XD_EP_ON_ERROR_FATAL;
    const Group group = make_group(comm.get(), config);
    LlBatch batch(there, c, 0);
    if (rank.rank == 0) batch.dispatch_args.tokens = nullptr;
    const xd_status expected = rank.rank == 0 ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH;
    EXPECT_EQ(batch.call(group.get(), XD_EP_LL_DISPATCH), expected);
    EXPECT_EQ(comm_error(comm.get()).status, expected) << comm_error(comm.get()).text;
    EXPECT_EQ(batch.call(group.get(), XD_EP_LL_COMBINE), expected);
    ok(xd_comm_barrier(rank.comm));
  });
}

}  // namespace
}  // namespace xd::test
