// Errors of expert parallelism that cost nothing but the call: bad expert ids, disagreement between
// ranks, and the group's memory of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "conformance/batch.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// Ids that no rank may use, given to the last rank and, one of them, to the one before it.
struct BadIds {
  std::vector<std::int64_t> last_rank;  // replaces that rank's first token
  std::int64_t count;                   // bad ids among them
};

struct Prepared {
  Outcome outcome;
  xd_ep_plan_info plan;
};

// Makes the plan of a batch in which the last rank's first token has these ids.
Prepared prepare_with(Rank& rank, const Case& c, xd_ep_group* group, const BadIds& bad) {
  Batch batch(rank, c);
  std::vector<std::int64_t> ids = batch.routed().choices(rank.rank).ids;
  if (rank.rank == rank.num_ranks - 1) {
    std::copy(bad.last_rank.begin(), bad.last_rank.end(), ids.begin());
  }
  batch.field(XD_EP_PREPARE, "topk_idx").tensor->write(ids);
  const Outcome outcome = batch.call(group, XD_EP_PREPARE);
  const std::vector<std::byte> plan = batch.plan().read();
  xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
  ok(xd_ep_plan_get_info(plan.data(), plan.size(), &info));
  return {outcome, info};
}

TEST(BadIds, AreReportedOnEveryRankAndThePlanIsUsable) {
  Case c = plain_case(world().num_ranks());
  const std::int64_t experts = std::int64_t{c.num_ranks} * c.local_experts;
  const BadIds kinds[] = {
      {{experts, -1, -1}, 1},      {{0, 0, 1}, 1}, {{-2, INT32_MIN, 0}, 2}, {{INT32_MAX, 2, 2}, 2},
      {{experts, experts, -5}, 3}, {{1, 1, 1}, 2},
  };
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const int guilty = rank.num_ranks - 1;
    for (const BadIds& bad : kinds) {
      SCOPED_TRACE("ids " + testing::PrintToString(bad.last_rank));
      const auto [outcome, info] = prepare_with(rank, c, group.get(), bad);
      EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
      EXPECT_TRUE(outcome.mentions(std::to_string(bad.count) + " expert ids")) << outcome.text;
      EXPECT_EQ(info.bad_ids, bad.count);
      EXPECT_EQ(info.bad_id_rank, guilty);
      const xd_ep_status& status = outcome.met;
      EXPECT_EQ(status.status, XD_ERROR_INVALID_ARGUMENT);
      EXPECT_EQ(status.operation, XD_EP_PREPARE);
      EXPECT_EQ(status.rank, guilty);
      EXPECT_EQ(status.bad_ids, bad.count);
    }
  });
}

// Under COLLAPSE repeated ids are no mistake of anybody; others are bad as ever.
TEST(BadIds, DoNotCountDuplicatesWhereTheGroupCollapsesThem) {
  const Case c = plain_case(world().num_ranks());
  const std::int64_t experts = std::int64_t{c.num_ranks} * c.local_experts;
  const BadIds kinds[] = {
      {{0, 0, 1}, 0},
      {{2, 2, 2}, 0},
      {{-1, -1, -1}, 0},
      {{1, -7, 1}, 1},
      {{experts, experts, 0}, 2},
  };
  on_every_rank([&](Rank& rank) {
    xd_ep_config config = c.config(rank.rank);
    config.duplicate_ids = XD_EP_DUPLICATE_IDS_COLLAPSE;
    const Group group = make_group(rank.comm, config);
    for (const BadIds& bad : kinds) {
      SCOPED_TRACE("ids " + testing::PrintToString(bad.last_rank));
      const auto [outcome, info] = prepare_with(rank, c, group.get(), bad);
      EXPECT_EQ(outcome, bad.count > 0 ? XD_ERROR_INVALID_ARGUMENT : XD_SUCCESS);
      EXPECT_FALSE(outcome.mentions("once")) << outcome.text;
      EXPECT_EQ(outcome.group.bad_ids, bad.count);
      EXPECT_EQ(info.bad_ids, bad.count);
    }
  });
}

// The grid's routing is clean; here the same operations run on one that is not.
TEST(BadIds, ActAsNoExpert) {
  Case c = plain_case(world().num_ranks());
  c.bad_ids = true;
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    c.layout = layout;
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(c.description());
      const Group group = make_group(rank.comm, c.config(rank.rank));
      for (int number = 0; number < 4; ++number) Step(rank, c, group.get(), number).run_all();
    });
  }
}

// Rows of four bytes everywhere: nothing but the type tells one float32 from four bytes.
TEST(BulkDisagreement, OnTheTypeOfEquallyLongScalesIsAMismatchOnEveryRank) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const Case c = plain_case(world().num_ranks());
  Case roomy = c;
  roomy.cargo = Cargo::e4m3_with_floats;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, roomy.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const DLDataType type = rank.rank == 0 ? kF32 : kU8;
    const std::int64_t columns = rank.rank == 0 ? 1 : 4;
    Tensor scales(rank, type, {batch.dispatch_args.tokens->shape[0], columns});
    Tensor received(rank, type, {batch.dispatch_args.recv_tokens->shape[0], columns});
    batch.dispatch_args.scales = scales.dl();
    batch.dispatch_args.recv_scales = received.dl();
    EXPECT_EQ(batch.call(group.get(), XD_EP_DISPATCH), XD_ERROR_MISMATCH);
    EXPECT_TRUE(batch.untouched(XD_EP_DISPATCH));
    EXPECT_TRUE(received.untouched());
  });
}

// Both ways have a float32 per 128 columns: nothing but the way itself tells them apart.
TEST(BulkDisagreement, OnTheWayToQuantiseIsAMismatchThatNamesBoth) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  Case c = plain_case(world().num_ranks());
  c.row_units = 16;  // 128 columns of bf16
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const std::int64_t rows = batch.dispatch_args.recv_tokens->shape[0];
    Tensor tokens(rank, kE4m3, {rows, 128});
    Tensor scales(rank, kF32, {rows, 1});
    batch.dispatch_args.recv_tokens = tokens.dl();
    batch.dispatch_args.recv_scales = scales.dl();
    batch.dispatch_args.quantise =
        rank.rank == 0 ? XD_EP_QUANTISE_FP8_BLOCK128 : XD_EP_QUANTISE_FP8_BLOCK128_POW2;
    const Outcome outcome = batch.call(group.get(), XD_EP_DISPATCH);
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    const bool first = rank.rank == 0;
    EXPECT_TRUE(outcome.mentions(first ? "quantise FP8_BLOCK128_POW2, here FP8_BLOCK128"
                                       : "quantise FP8_BLOCK128, here FP8_BLOCK128_POW2"))
        << outcome.text;
    EXPECT_TRUE(tokens.untouched() && scales.untouched());
  });
}

TEST(BulkDisagreement, OnTheAlignmentIsAMismatchThatNamesTheValues) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const Case c = plain_case(world().num_ranks());  // it has alignment 4
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    if (rank.rank == 0) batch.prepare_args.alignment = 2;
    const Outcome outcome = batch.call(group.get(), XD_EP_PREPARE);
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions(rank.rank == 0 ? "rank 1: alignment 4, here 2"
                                                : "rank 0: alignment 2, here 4"))
        << outcome.text;
    EXPECT_TRUE(batch.untouched(XD_EP_PREPARE));
    // Saying what the group has is the same as saying nothing.
    batch.prepare_args.alignment = rank.rank == 0 ? 4 : 0;
    batch.prepare(group.get());
    Step(rank, c, group.get(), 1).run_all();
  });
}

// Ids of a batch whose last rank names an expert that does not exist.
void spoil_ids(const Rank& rank, Batch& batch) {
  std::vector<std::int64_t> ids = batch.routed().choices(rank.rank).ids;
  if (rank.rank == rank.num_ranks - 1) ids[0] = -7;
  batch.field(XD_EP_PREPARE, "topk_idx").tensor->write(ids);
}

// Bad ids are found by the operation: it returns them where it has run by then, and where it runs
// later they are in the group's status, which keeps the first error. Numbers are counted on both.
TEST(GroupStatus, HasEveryErrorOnceAndTheFirstUntilItIsRead) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    spoil_ids(rank, batch);
    const xd_status expected = rank.asynchronous() ? XD_SUCCESS : XD_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(batch.enqueue(group.get(), XD_EP_PREPARE), expected);
      EXPECT_EQ(last_ep_error().status, expected);
    }
    rank.memory->synchronize();
    xd_ep_status status = group_status(group.get());
    EXPECT_EQ(status.status, rank.asynchronous() ? XD_ERROR_INVALID_ARGUMENT : XD_SUCCESS);
    if (rank.asynchronous()) {
      EXPECT_EQ(status.operation, XD_EP_PREPARE);
      EXPECT_EQ(status.epoch, 1u);
      EXPECT_EQ(status.rank, rank.num_ranks - 1);
    }
    EXPECT_EQ(status.bad_ids, 3);
    status = group_status(group.get());
    EXPECT_EQ(status.status, XD_SUCCESS);
    EXPECT_EQ(status.bad_ids, 0);
    EXPECT_STREQ(status.text, "");
  });
}

// The word that a host may watch.
class Watched {
 public:
  explicit Watched(xd_ep_group* group) { ok(xd_ep_group_watch(group, &word_)); }
  std::uint64_t count() const { return __atomic_load_n(word_, __ATOMIC_ACQUIRE); }

 private:
  const volatile std::uint64_t* word_ = nullptr;
};

TEST(Watch, CountsErrorsThatTheOperationFinds) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const Watched watched(group.get());
    Batch batch(rank, c);
    spoil_ids(rank, batch);
    static_cast<void>(batch.enqueue(group.get(), XD_EP_PREPARE));
    rank.memory->synchronize();
    EXPECT_EQ(watched.count(), 1u);
    // Bytes that are no plan on one rank: an error of every rank.
    batch.plan().fill(std::byte{0});
    for (std::uint64_t n = 2; n < 5; ++n) {
      static_cast<void>(batch.enqueue(group.get(), XD_EP_DISPATCH));
      rank.memory->synchronize();
      EXPECT_EQ(watched.count(), n);
    }
    static_cast<void>(group_status(group.get()));  // on devices, which keep errors until then
    Step(rank, c, group.get(), 1).run_all();
    EXPECT_EQ(watched.count(), 4u);
  });
}

// A thread that sees a count finds in the group's status the error that it stands for.
TEST(Watch, IsSeenByAnotherThreadWhichThenFindsTheError) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const Watched watched(group.get());
    std::uint64_t seen = 0;
    xd_ep_status status = XD_EP_STATUS_INIT;
    std::thread host([&] {
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (seen == 0 && std::chrono::steady_clock::now() < give_up) seen = watched.count();
      status = group_status(group.get());
    });
    Batch batch(rank, c);
    spoil_ids(rank, batch);
    static_cast<void>(batch.enqueue(group.get(), XD_EP_PREPARE));
    host.join();
    EXPECT_EQ(seen, 1u);
    EXPECT_EQ(status.bad_ids, 1);
    EXPECT_EQ(status.status, rank.asynchronous() ? XD_ERROR_INVALID_ARGUMENT : XD_SUCCESS);
    rank.memory->synchronize();
  });
}

}  // namespace
}  // namespace xd::test
