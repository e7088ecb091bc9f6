// Errors that cost nothing but the call: bad expert ids, disagreement between ranks, and the
// group's memory of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "conformance/batch.h"
#include "conformance/one_mistake.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

bool said(const std::string& text) {
  return std::string(xd_last_error()).find(text) != std::string::npos;
}

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

// The way in which rank 0 differs from all others.
struct Disagreement {
  const char* name;
  xd_ep_operation operation;
  std::function<void(Batch&, const Rank&)> apply;
};

// Replaces a tensor argument by one of other shape or type that is good in itself.
void replace(Batch& batch, const Rank& rank, xd_ep_operation operation, const char* name,
             std::deque<Tensor>& keep, DLDataType type, std::int64_t columns) {
  Batch::Field& field = batch.field(operation, name);
  keep.emplace_back(rank, type, std::vector{field.tensor->shape()[0], columns});
  *field.slot = keep.back().dl();
}

TEST(Disagreement, IsAMismatchOnEveryRankAtOnce) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    std::deque<Tensor> keep;
    const Disagreement kinds[] = {
        {"hidden", XD_EP_DISPATCH,
         [&](Batch& b, const Rank& r) {
           replace(b, r, XD_EP_DISPATCH, "tokens", keep, kBf16, 16);
           replace(b, r, XD_EP_DISPATCH, "recv_tokens", keep, kBf16, 16);
         }},
        {"dtype", XD_EP_COMBINE,
         [&](Batch& b, const Rank& r) {
           replace(b, r, XD_EP_COMBINE, "expert_out", keep, kF16, 32);
           replace(b, r, XD_EP_COMBINE, "out", keep, kF16, 32);
         }},
        {"weights of dispatch", XD_EP_DISPATCH,
         [](Batch& b, const Rank&) {
           b.dispatch_args.topk_weights = b.dispatch_args.recv_weights = nullptr;
         }},
        {"scales", XD_EP_DISPATCH,
         [&](Batch& b, const Rank& r) {
           const std::int64_t tokens = b.dispatch_args.tokens->shape[0];
           const std::int64_t rows = b.dispatch_args.recv_tokens->shape[0];
           keep.emplace_back(r, kF32, std::vector<std::int64_t>{tokens, 1});
           b.dispatch_args.scales = keep.back().dl();
           keep.emplace_back(r, kF32, std::vector<std::int64_t>{rows, 1});
           b.dispatch_args.recv_scales = keep.back().dl();
         }},
        {"weights of combine_bwd", XD_EP_COMBINE_BWD,
         [](Batch& b, const Rank&) {
           b.combine_bwd_args.weights = b.combine_bwd_args.expert_out =
               b.combine_bwd_args.grad_weights = nullptr;
         }},
        {"weights of dispatch_bwd", XD_EP_DISPATCH_BWD,
         [](Batch& b, const Rank&) {
           b.dispatch_bwd_args.grad_recv_weights = b.dispatch_bwd_args.grad_topk_weights = nullptr;
         }},
    };
    // dispatch carries scales in one of the cases: the group must allow them.
    Case roomy = c;
    roomy.cargo = Cargo::e4m3_with_floats;
    const Group group = make_group(rank.comm, roomy.config(rank.rank));
    for (const Disagreement& kind : kinds) {
      SCOPED_TRACE(kind.name);
      Batch batch(rank, c);
      batch.prepare(group.get());
      if (rank.rank == 0) kind.apply(batch, rank);
      const auto start = std::chrono::steady_clock::now();
      const Outcome outcome = batch.call(group.get(), kind.operation);
      EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
      EXPECT_TRUE(outcome.mentions("rank")) << outcome.text;
      EXPECT_TRUE(batch.untouched(kind.operation));
    }
    Step(rank, c, group.get(), 1).run_all();
  });
}

// Rows of four bytes everywhere: nothing but the type tells one float32 from four bytes.
TEST(Disagreement, OnTheTypeOfEquallyLongScalesIsAMismatchOnEveryRank) {
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
TEST(Disagreement, OnTheWayToQuantiseIsAMismatchThatNamesBoth) {
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

TEST(Disagreement, OnTheOperationIsAMismatchOnEveryRank) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  constexpr xd_ep_operation kAll[] = {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE,
                                      XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD};
  Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    for (const xd_ep_operation mine : kAll) {
      for (const xd_ep_operation theirs : kAll) {
        if (mine == theirs) continue;
        SCOPED_TRACE("operation " + std::to_string(mine) + " against " + std::to_string(theirs));
        Batch batch(rank, c);
        batch.prepare(group.get());
        batch.poison_outputs();
        const xd_ep_operation operation = rank.rank == 0 ? mine : theirs;
        EXPECT_EQ(batch.call(group.get(), operation), XD_ERROR_MISMATCH);
        EXPECT_TRUE(batch.untouched(operation));
      }
    }
    Step(rank, c, group.get(), 1).run_all();
  });
}

TEST(Disagreement, OnTheNumberOfChoicesIsAMismatchOnEveryRank) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    Tensor narrow(rank, kI64, {1, 1});
    narrow.write(std::vector<std::int64_t>{0});
    if (rank.rank == 0) batch.prepare_args.topk_idx = narrow.dl();
    EXPECT_EQ(batch.call(group.get(), XD_EP_PREPARE), XD_ERROR_MISMATCH);
    EXPECT_TRUE(batch.untouched(XD_EP_PREPARE));
    Step(rank, c, group.get(), 1).run_all();
  });
}

TEST(Disagreement, OnTheAlignmentIsAMismatchThatNamesTheValues) {
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

struct ConfigField {
  const char* name;
  std::function<void(xd_ep_config&)> change;
};

TEST(Disagreement, OverAPlaceForTheGroupIsToldAtOnce) {
  on_every_rank([](Rank& rank) {
    const xd_ep_config config = plain_case(rank.num_ranks).config(rank.rank);
    expect_mistake<xd_ep_group*>(
        rank, "group = NULL", nullptr,
        [&](xd_ep_group**) { return xd_ep_group_create(rank.comm, &config, nullptr); },
        [&](xd_ep_group** made) { return xd_ep_group_create(rank.comm, &config, made); });
    EXPECT_NE(make_group(rank.comm, config), nullptr);
  });
}

TEST(Disagreement, OnAGroupsConfigNamesTheField) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const Case c = plain_case(world().num_ranks());
  const std::vector<std::int32_t> all_on_rank_0(static_cast<std::size_t>(c.num_experts()), 0);
  const ConfigField fields[] = {
      {"num_experts", [](xd_ep_config& config) { config.num_experts *= 2; }},
      {"max_topk", [](xd_ep_config& config) { config.max_topk += 1; }},
      {"max_tokens_per_rank", [](xd_ep_config& config) { config.max_tokens_per_rank += 1; }},
      {"hidden", [](xd_ep_config& config) { config.hidden += 8; }},
      {"max_scale_bytes", [](xd_ep_config& config) { config.max_scale_bytes += 4; }},
      {"layout", [](xd_ep_config& config) { config.layout = XD_EP_RANK_MAJOR; }},
      {"alignment", [](xd_ep_config& config) { config.alignment = 8; }},
      {"overflow", [](xd_ep_config& config) { config.overflow = XD_EP_OVERFLOW_DROP; }},
      {"on_error", [](xd_ep_config& config) { config.on_error = XD_EP_ON_ERROR_FATAL; }},
      {"duplicate_ids",
       [](xd_ep_config& config) { config.duplicate_ids = XD_EP_DUPLICATE_IDS_COLLAPSE; }},
      {"net_buffer_bytes", [](xd_ep_config& config) { config.net_buffer_bytes = 1 << 20; }},
      {"expert_ranks", [&](xd_ep_config& config) { config.expert_ranks = all_on_rank_0.data(); }},
  };
  on_every_rank([&](Rank& rank) {
    for (const ConfigField& field : fields) {
      SCOPED_TRACE(field.name);
      xd_ep_config config = c.config(rank.rank);
      if (rank.rank == 0) field.change(config);
      xd_ep_group* group = nullptr;
      EXPECT_EQ(xd_ep_group_create(rank.comm, &config, &group), XD_ERROR_MISMATCH)
          << xd_last_error();
      EXPECT_TRUE(said(field.name)) << xd_last_error();
      EXPECT_EQ(group, nullptr);
    }
    // A config that is bad by itself.
    xd_ep_config config = c.config(rank.rank);
    if (rank.rank == 0) config.num_experts += 1;
    const bool guilty = rank.rank == 0 && rank.num_ranks > 1;
    xd_ep_group* group = nullptr;
    EXPECT_EQ(xd_ep_group_create(rank.comm, &config, &group),
              guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH)
        << xd_last_error();
    EXPECT_TRUE(said(guilty ? "num_experts" : "rank 0")) << xd_last_error();
    // Fields that may differ do no harm, and the communicator works after all of this.
    config = c.config(rank.rank);
    config.zero_tail = rank.rank % 2;
    config.num_sms = rank.rank;
    config.staging = rank.rank % 2 == 0 ? XD_EP_STAGING_AUTO : XD_EP_STAGING_NONE;
    config.recv_capacity = 400 + 5 * std::int64_t{rank.rank};
    const Group good = make_group(rank.comm, config);
    EXPECT_NE(good, nullptr);
  });
}

xd_ep_status last_error() {
  xd_ep_status status = XD_EP_STATUS_INIT;
  ok(xd_ep_last_error(&status));
  return status;
}

// Ids of a batch whose last rank names an expert that does not exist.
void spoil_ids(const Rank& rank, Batch& batch) {
  std::vector<std::int64_t> ids = batch.routed().choices(rank.rank).ids;
  if (rank.rank == rank.num_ranks - 1) ids[0] = -7;
  batch.field(XD_EP_PREPARE, "topk_idx").tensor->write(ids);
}

TEST(GroupStatus, IsEmptyAtFirst) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const xd_ep_status status = group_status(group.get());
    EXPECT_EQ(status.status, XD_SUCCESS);
    EXPECT_EQ(status.rank, -1);
    EXPECT_STREQ(status.text, "");
  });
}

// An error that a call has returned, on any executor, is told with its numbers by xd_ep_last_error,
// and not a second time by the group.
TEST(GroupStatus, DoesNotRepeatWhatACallHasReturned) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Step(rank, c, group.get(), 0).run_all();  // epochs 1 to 5
    ASSERT_EQ(xd_ep_join_failed(group.get(), XD_EP_COMBINE, "first", rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
    const xd_ep_status returned = last_error();
    EXPECT_EQ(returned.status, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(returned.operation, XD_EP_COMBINE);
    EXPECT_EQ(returned.epoch, 6u);
    EXPECT_EQ(returned.rank, rank.rank);
    EXPECT_STREQ(returned.text, "first");
    rank.memory->synchronize();
    EXPECT_EQ(group_status(group.get()).status, XD_SUCCESS);
    Batch batch(rank, c, 1);
    ASSERT_EQ(batch.enqueue(group.get(), XD_EP_PREPARE), XD_SUCCESS) << xd_last_error();
    EXPECT_EQ(last_error().status, XD_SUCCESS);  // the last operation met none
    rank.memory->synchronize();
    EXPECT_EQ(group_status(group.get()).status, XD_SUCCESS);
  });
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
      EXPECT_EQ(last_error().status, expected);
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

TEST(Watch, CountsEveryOperationThatEndsWithANonFatalError) {
  Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const Watched watched(group.get());
    EXPECT_EQ(watched.count(), 0u);
    Step(rank, c, group.get(), 0).run_all();
    EXPECT_EQ(watched.count(), 0u);
    Batch batch(rank, c);
    spoil_ids(rank, batch);
    const auto call = [&](auto&& enqueue) {
      static_cast<void>(enqueue());
      rank.memory->synchronize();
    };
    call([&] { return batch.enqueue(group.get(), XD_EP_PREPARE); });
    EXPECT_EQ(watched.count(), 1u);
    call([&] { return xd_ep_join_failed(group.get(), XD_EP_COMBINE, "mine", rank.stream()); });
    EXPECT_EQ(watched.count(), 2u);
    // Bytes that are no plan on one rank: an error of every rank.
    batch.plan().fill(std::byte{0});
    for (std::uint64_t n = 3; n < 6; ++n) {
      call([&] { return batch.enqueue(group.get(), XD_EP_DISPATCH); });
      EXPECT_EQ(watched.count(), n);
    }
    static_cast<void>(group_status(group.get()));
    EXPECT_EQ(watched.count(), 5u);  // reading the status takes nothing back
    Step(rank, c, group.get(), 1).run_all();
    EXPECT_EQ(watched.count(), 5u);
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

TEST(GroupStatus, JoinFailedCutsLongTexts) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const std::string text(1000, 'q');
    EXPECT_EQ(xd_ep_join_failed(group.get(), XD_EP_PREPARE, text.c_str(), rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(std::ranges::count(std::string(xd_last_error()), 'q'), 255) << xd_last_error();
    EXPECT_EQ(last_error().text, std::string(255, 'q'));
    EXPECT_EQ(xd_ep_join_failed(group.get(), XD_EP_PREPARE, nullptr, rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
    EXPECT_STREQ(last_error().text, "");
    Step(rank, c, group.get(), 0).run_all();
  });
}

}  // namespace
}  // namespace xd::test
