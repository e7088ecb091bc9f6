// Calls that concern one rank alone: any rank may make them at any time, and no rank waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/said.h"
#include "conformance/step.h"
#include "support/gtest_main.h"
#include "support/random.h"

namespace xd::test {
namespace {

struct Routing {
  int num_ranks = 1;
  std::int64_t experts = 1, tokens = 0, topk = 1;
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> expert_ranks = {};  // empty = equally many on every rank, in order

  std::int64_t owner(std::int64_t expert) const {
    return expert_ranks.empty() ? expert / (experts / num_ranks)
                                : expert_ranks[static_cast<std::size_t>(expert)];
  }
};

// Ids of every kind: good, none, repeated, and out of range on both sides.
Routing draw_routing(int num_ranks, Random& random) {
  Routing r;
  r.num_ranks = num_ranks;
  r.experts = num_ranks * (1 + static_cast<std::int64_t>(random.below(40)));
  r.topk = 1 + static_cast<std::int64_t>(random.below(32));
  r.tokens = random.below(8) == 0 ? 0 : static_cast<std::int64_t>(random.below(700));
  for (std::int64_t i = 0; i < r.tokens * r.topk; ++i) {
    const std::uint64_t kind = random.below(16);
    const auto id = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(r.experts)));
    r.ids.push_back(kind == 0 ? -1 : kind == 1 ? r.experts + id : kind == 2 ? -2 - id : id);
  }
  return r;
}

// Any number of experts, anywhere: some ranks may have none.
void settle_anywhere(Routing& r, Random& random) {
  r.experts += static_cast<std::int64_t>(random.below(2));
  for (std::int64_t e = 0; e < r.experts; ++e) {
    r.expert_ranks.push_back(
        static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(r.num_ranks))));
  }
}

struct Layout {
  std::vector<std::int64_t> per_rank, per_expert, in_rank;
  std::int64_t bad_ids = 0;
};

// The definition, by sets.
Layout layout_of(const Routing& r) {
  Layout layout;
  layout.per_rank.resize(static_cast<std::size_t>(r.num_ranks));
  layout.per_expert.resize(static_cast<std::size_t>(r.experts));
  for (std::int64_t t = 0; t < r.tokens; ++t) {
    std::set<std::int64_t> experts, ranks;
    for (std::int64_t k = 0; k < r.topk; ++k) {
      const std::int64_t id = r.ids[static_cast<std::size_t>(t * r.topk + k)];
      if (id < -1 || id >= r.experts) ++layout.bad_ids;
      if (id < 0 || id >= r.experts) continue;
      experts.insert(id);
      ranks.insert(r.owner(id));
    }
    for (const std::int64_t e : experts) ++layout.per_expert[static_cast<std::size_t>(e)];
    for (const std::int64_t d : ranks) ++layout.per_rank[static_cast<std::size_t>(d)];
    for (std::int64_t d = 0; d < r.num_ranks; ++d) layout.in_rank.push_back(ranks.contains(d));
  }
  return layout;
}

class LayoutCall {
 public:
  LayoutCall(const Rank& rank, const Routing& r, bool wide)
      : rank_(rank),
        type_(wide ? kI64 : kI32),
        ids_(rank, type_, {r.tokens, r.topk}),
        per_rank_(rank, type_, {r.num_ranks}),
        per_expert_(rank, type_, {r.experts}),
        in_rank_(rank, wide ? kBool : kU8, {r.tokens, r.num_ranks}),
        bad_ids_(rank, type_, {1}) {
    Image image(r.tokens, r.topk, type_, std::byte{0});
    for (std::int64_t t = 0; t < r.tokens; ++t) {
      image.set_row(t, [&](std::int64_t row, std::int64_t k) {
        return static_cast<std::uint64_t>(r.ids[static_cast<std::size_t>(row * r.topk + k)]);
      });
    }
    ids_.write(image.bytes());
    args.num_experts = static_cast<std::int32_t>(r.experts);
    args.expert_ranks = r.expert_ranks.empty() ? nullptr : r.expert_ranks.data();
    args.topk_idx = ids_.dl();
    args.rows_per_rank = per_rank_.dl();
    args.rows_per_expert = per_expert_.dl();
    args.token_in_rank = in_rank_.dl();
    args.bad_ids = bad_ids_.dl();
  }

  xd_status call() {
    const xd_status status = xd_ep_routing_layout(rank_.comm, &args, rank_.stream());
    rank_.memory->synchronize();
    return status;
  }

  void expect(const Layout& layout) const {
    expect_numbers("rows_per_rank", args.rows_per_rank, per_rank_, layout.per_rank);
    expect_numbers("rows_per_expert", args.rows_per_expert, per_expert_, layout.per_expert);
    expect_numbers("token_in_rank", args.token_in_rank, in_rank_, layout.in_rank);
    expect_numbers("bad_ids", args.bad_ids, bad_ids_, {layout.bad_ids});
  }

  xd_ep_routing_layout_args args = XD_EP_ROUTING_LAYOUT_ARGS_INIT;

 private:
  // Untouched where it was not given.
  static void expect_numbers(const char* name, const DLTensor* given, const Tensor& tensor,
                             const std::vector<std::int64_t>& values) {
    Image image(1, static_cast<std::int64_t>(values.size()), tensor.type(), kPoison);
    if (given != nullptr) {
      image.set_row(0, [&](std::int64_t, std::int64_t column) {
        return static_cast<std::uint64_t>(values[static_cast<std::size_t>(column)]);
      });
    }
    expect_image(name, tensor, image);
  }

  const Rank& rank_;
  DLDataType type_;
  Tensor ids_, per_rank_, per_expert_, in_rank_, bad_ids_;
};

TEST(RoutingLayout, CountsEachTokenOncePerExpertAndRankAndNoBadIds) {
  on_every_rank([](Rank& rank) {
    // Ranks need not do the same.
    Random random(mix(test_seed(), 0x1A, static_cast<std::uint64_t>(rank.rank)));
    for (int round = 0; round < 40; ++round) {
      SCOPED_TRACE("seed " + std::to_string(test_seed()) + ", round " + std::to_string(round));
      Routing routing = draw_routing(rank.num_ranks, random);
      if (round % 3 == 2) settle_anywhere(routing, random);
      LayoutCall call(rank, routing, round % 2 == 0);
      if (round % 5 == 4) {  // each of the outputs is optional
        const DLTensor** slots[] = {&call.args.rows_per_rank, &call.args.rows_per_expert,
                                    &call.args.token_in_rank, &call.args.bad_ids};
        for (const DLTensor** slot : slots) {
          if (random.below(2) == 0) *slot = nullptr;
        }
      }
      ok(call.call());
      call.expect(layout_of(routing));
    }
  });
}

TEST(RoutingLayout, OfManyTokensIsExact) {
  on_every_rank([](Rank& rank) {
    Random random(mix(test_seed(), 0x1B, static_cast<std::uint64_t>(rank.rank)));
    Routing routing = {.num_ranks = rank.num_ranks,
                       .experts = rank.num_ranks * std::int64_t{32},
                       .tokens = 4099,
                       .topk = 8,
                       .ids = {}};
    for (std::int64_t i = 0; i < routing.tokens * routing.topk; ++i) {
      routing.ids.push_back(
          static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(routing.experts))));
    }
    LayoutCall call(rank, routing, true);
    ok(call.call());
    call.expect(layout_of(routing));
  });
}

// 4096 experts are the most that devices take.
TEST(RoutingLayout, OfManyExpertsAnywhereIsExact) {
  on_every_rank([](Rank& rank) {
    Random random(mix(test_seed(), 0x1D, static_cast<std::uint64_t>(rank.rank)));
    Routing routing = {
        .num_ranks = rank.num_ranks, .experts = 4096, .tokens = 1031, .topk = 6, .ids = {}};
    for (std::int64_t e = 0; e < routing.experts; ++e) {
      routing.expert_ranks.push_back(
          static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(rank.num_ranks))));
    }
    for (std::int64_t i = 0; i < routing.tokens * routing.topk; ++i) {
      routing.ids.push_back(static_cast<std::int64_t>(random.below(4096)));
    }
    LayoutCall call(rank, routing, rank.rank % 2 == 0);
    ok(call.call());
    call.expect(layout_of(routing));
  });
}

TEST(RoutingLayout, IsOneRanksOwnAffair) {
  on_every_rank([](Rank& rank) {
    if (rank.rank != 0) return;  // no peer calls anything
    Random random(test_seed());
    const Routing routing = draw_routing(rank.num_ranks, random);
    LayoutCall call(rank, routing, true);
    ok(call.call());
    call.expect(layout_of(routing));
  });
}

TEST(RoutingLayout, RefusesWhatItCannotCountByName) {
  on_every_rank([](Rank& rank) {
    Routing routing;
    routing.num_ranks = rank.num_ranks;
    routing.experts = std::int64_t{2} * rank.num_ranks;
    routing.tokens = 3;
    routing.topk = 2;
    routing.ids.assign(6, 0);
    LayoutCall call(rank, routing, true);
    const auto refused = [&](const char* named) {
      EXPECT_EQ(call.call(), XD_ERROR_INVALID_ARGUMENT);
      expect_said(named);
    };
    const xd_ep_routing_layout_args good = call.args;
    for (const std::int32_t experts : {0, -1, 70000 * rank.num_ranks}) {
      call.args.num_experts = experts;
      refused("num_experts");
    }
    call.args = good;
    call.args.num_experts = 2 * rank.num_ranks + 1;
    if (rank.num_ranks > 1) refused("num_experts");
    call.args = good;
    std::vector<std::int32_t> homes(static_cast<std::size_t>(routing.experts), 0);
    homes[1] = rank.num_ranks;
    call.args.expert_ranks = homes.data();
    refused("expert_ranks[1]");
    call.args = good;
    Tensor flags(rank, kI32, {3, rank.num_ranks}), few(rank, kU8, {2, rank.num_ranks});
    for (Tensor* bad : {&flags, &few}) {
      call.args.token_in_rank = bad->dl();
      refused("token_in_rank");
    }
    call.args = good;
    call.args.topk_idx = nullptr;
    refused("topk_idx");
    call.args = good;
    call.args.struct_size = 0;
    refused("struct_size");
    call.args = good;
    ok(call.call());
    call.expect(layout_of(routing));
  });
}

// A communicator that has failed has lost its peers, which these calls do not need.
TEST(LocalCalls, WorkAfterAFatalError) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Comm comm = rank.another_comm("aborted", std::size_t{1} << 20);
    Rank there = rank;
    there.comm = comm.get();
    const Group group = make_group(comm.get(), c.config(rank.rank));
    Batch batch(there, c);
    batch.prepare(group.get());
    Random random(mix(test_seed(), 0x1C, static_cast<std::uint64_t>(rank.rank)));
    const Routing routing = draw_routing(rank.num_ranks, random);
    LayoutCall layout(there, routing, true);
    const auto rows = static_cast<std::int64_t>(batch.routed().received(rank.rank).rows.size());
    Tensor row_experts(rank, kI32, {rows + 1});
    ok(xd_comm_barrier(rank.comm));  // all have prepared
    ok(xd_comm_abort(comm.get()));
    ASSERT_EQ(comm_error(comm.get()).status, XD_ERROR_ABORTED);
    EXPECT_EQ(batch.enqueue(group.get(), XD_EP_DISPATCH), XD_ERROR_ABORTED) << "no local call";

    ok(layout.call());
    layout.expect(layout_of(routing));
    xd_ep_plan_row_experts_args args = XD_EP_PLAN_ROW_EXPERTS_ARGS_INIT;
    set_plan(args, batch.plan());
    args.row_experts = row_experts.dl();
    ok(xd_ep_plan_row_experts(group.get(), &args, rank.stream()));
    rank.memory->synchronize();
    std::vector<std::int32_t> expected(static_cast<std::size_t>(rows) + 1, -1);
    const std::vector<std::int64_t>& offsets = batch.routed().received(rank.rank).offsets;
    for (std::int32_t e = 0; e < c.local_experts; ++e) {
      const auto at = static_cast<std::size_t>(e);
      std::fill(expected.begin() + offsets[at], expected.begin() + offsets[at + 1], e);
    }
    EXPECT_EQ(row_experts.read_as<std::int32_t>(), expected);
    ok(xd_comm_barrier(rank.comm));
  });
}

// row_experts is checked in every case of the grid; here is what is no plan of the group.
TEST(RowExperts, OfBytesThatAreNoPlanOfTheGroupAreNotGiven) {
  Case c = plain_case(world().num_ranks());
  Case other = c;
  other.local_experts = 5;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const Group elsewhere = make_group(rank.comm, other.config(rank.rank));
    Batch foreign(rank, other);
    foreign.prepare(elsewhere.get());
    Batch batch(rank, c);  // never prepared
    for (Buffer* plan : {&foreign.plan(), &batch.plan()}) {
      Tensor row_experts(rank, kI32, {50});
      xd_ep_plan_row_experts_args args = XD_EP_PLAN_ROW_EXPERTS_ARGS_INIT;
      set_plan(args, *plan);
      args.row_experts = row_experts.dl();
      const xd_status status = xd_ep_plan_row_experts(group.get(), &args, rank.stream());
      if (rank.asynchronous()) {
        ok(status);
        rank.memory->synchronize();
        EXPECT_EQ(row_experts.read_as<std::int32_t>(), std::vector<std::int32_t>(50, -1));
      } else {
        EXPECT_EQ(status, XD_ERROR_INVALID_ARGUMENT);
        expect_said("plan");
        EXPECT_TRUE(row_experts.untouched());
      }
    }
    xd_ep_status status = XD_EP_STATUS_INIT;
    ok(xd_ep_group_status(group.get(), &status));
    EXPECT_EQ(status.status, XD_SUCCESS) << status.text;
  });
}

// Between the operations of a group, on any rank alone: the turns of the others do not mind.
TEST(RowExperts, TakeNoTurn) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Step step(rank, c, group.get(), 0);
    step.prepare();
    for (int i = 0; i < rank.rank; ++i) {
      Tensor row_experts(rank, kI64, {8});
      xd_ep_plan_row_experts_args args = XD_EP_PLAN_ROW_EXPERTS_ARGS_INIT;
      set_plan(args, step.plan());
      args.row_experts = row_experts.dl();
      ok(xd_ep_plan_row_experts(group.get(), &args, rank.stream()));
      rank.memory->synchronize();
    }
    step.dispatch();
    step.combine();
  });
}

}  // namespace
}  // namespace xd::test
