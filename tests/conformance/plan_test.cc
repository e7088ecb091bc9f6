// Plans are bytes: they may be copied and moved, stay constant, and are checked before use.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/said.h"
#include "conformance/step.h"
#include "support/gtest_main.h"
#include "support/plan_format.h"
#include "support/random.h"

namespace xd::test {
namespace {

constexpr xd_ep_operation kUsers[] = {XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_COMBINE_BWD,
                                      XD_EP_DISPATCH_BWD};

class Plan : public testing::TestWithParam<xd_ep_layout> {
 protected:
  Plan() : c(plain_case(world().num_ranks())) { c.layout = GetParam(); }
  Case c;
};

TEST_P(Plan, ACopyElsewhereGivesTheSameResultsAndTheOriginalMayGo) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Step step(rank, c, group.get(), 0);
    step.prepare();
    Buffer copy(rank, step.plan().bytes(), Place::symmetric);
    copy.write(step.plan().read());
    Buffer original = step.exchange_plan(std::move(copy));
    original.fill(std::byte{0});
    step.dispatch();
    step.combine();
    step.combine_bwd();
    step.dispatch_bwd();
  });
}

TEST_P(Plan, StaysConstantAfterPrepare) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Step step(rank, c, group.get(), 0);
    step.prepare();
    const std::vector<std::byte> before = step.plan().read();
    step.dispatch();
    step.combine();
    step.combine_bwd();
    step.dispatch_bwd();
    EXPECT_EQ(step.plan().read(), before);
  });
}

TEST_P(Plan, ServesAnotherGroupOfTheSameSizes) {
  on_every_rank([&](Rank& rank) {
    const Group first = make_group(rank.comm, c.config(rank.rank));
    const Group second = make_group(rank.comm, c.config(rank.rank));
    Step made(rank, c, first.get(), 0);
    made.prepare();
    Step used(rank, c, second.get(), 0);
    used.exchange_plan(std::move(made.plan()));
    used.dispatch();
    used.combine();
  });
}

// Bounds are a group's, not a plan's: only what the batch has counts.
TEST_P(Plan, ServesAGroupOfOtherBoundsOnTopkAndAlignment) {
  c.alignments = PerPlan::own;
  on_every_rank([&](Rank& rank) {
    xd_ep_config wide = c.config(rank.rank), narrow = wide;
    ok(xd_ep_recv_bound(&narrow, &narrow.recv_capacity));
    wide.recv_capacity = narrow.recv_capacity;
    wide.max_topk = c.topk + 4;
    wide.alignment = 2 * c.alignment;
    const Group first = make_group(rank.comm, wide), second = make_group(rank.comm, narrow);
    Step made(rank, c, first.get(), 0);
    made.exchange_plan(make_plan(rank, wide));
    made.prepare();
    Step used(rank, c, second.get(), 0);
    used.exchange_plan(std::move(made.plan()));
    used.dispatch();
    used.combine();
    used.combine_bwd();
    used.dispatch_bwd();
  });
}

TEST_P(Plan, OfALargerAlignmentThanTheGroupsIsRefused) {
  on_every_rank([&](Rank& rank) {
    xd_ep_config coarse = c.config(rank.rank), fine = coarse;
    coarse.alignment = 2 * c.alignment;
    ok(xd_ep_recv_bound(&coarse, &coarse.recv_capacity));
    fine.recv_capacity = coarse.recv_capacity;
    const Group first = make_group(rank.comm, coarse), second = make_group(rank.comm, fine);
    Buffer plan = make_plan(rank, coarse);
    Batch batch(rank, c);
    set_plan(batch.prepare_args, plan);
    batch.prepare(first.get());
    batch.use_plan(plan.data(), plan.bytes());
    const Outcome outcome = batch.call(second.get(), XD_EP_DISPATCH_BWD);
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions("alignment = 8, the group's bound is 4")) << outcome.text;
  });
}

TEST_P(Plan, FingerprintsAreEqualOnAllRanksAndTellBatchesApart) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    // Every rank leaves its fingerprints where all peers can read them.
    constexpr int kBatches = 4;
    void* mine = nullptr;
    ok(xd_mem_alloc(rank.comm, kBatches * sizeof(std::uint64_t), &mine));
    std::vector<std::uint64_t> own;
    for (int number = 0; number < kBatches; ++number) {
      Step step(rank, c, group.get(), number);
      step.prepare();
      const std::vector<std::byte> plan = step.plan().read();
      xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
      ok(xd_ep_plan_get_info(plan.data(), plan.size(), &info));
      own.push_back(info.fingerprint);
      EXPECT_EQ(info.epoch, static_cast<std::uint64_t>(number) + 1);
    }
    EXPECT_EQ(std::ranges::adjacent_find(own), own.end());
    rank.memory->copy_in(mine, own.data(), own.size() * sizeof(own[0]));
    xd_mem_handle handle{};
    ok(xd_mem_export(rank.comm, mine, &handle));
    ok(xd_comm_barrier(rank.comm));
    for (int peer = 0; peer < rank.num_ranks; ++peer) {
      // The same calls in the same order: the place is the same in every heap.
      const xd_mem_handle there{peer, handle.segment, handle.offset};
      void* seen = nullptr;
      ok(xd_mem_import(rank.comm, &there, &seen));
      std::vector<std::uint64_t> theirs(own.size());
      rank.memory->copy_out(theirs.data(), seen, own.size() * sizeof(own[0]));
      EXPECT_EQ(theirs, own) << "rank " << peer;
    }
    ok(xd_comm_barrier(rank.comm));
    ok(xd_mem_free(rank.comm, mine));
  });
}

// One rank uses a plan that is not good; its peers use good ones.
void expect_plan_refused(const Rank& rank, xd_ep_group* group, Batch& batch, int guilty) {
  batch.poison_outputs();
  for (const xd_ep_operation operation : kUsers) {
    SCOPED_TRACE("operation " + std::to_string(operation));
    const Outcome outcome = batch.call(group, operation);
    EXPECT_EQ(outcome, rank.rank == guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
    const std::string expected = rank.rank == guilty ? "plan" : "rank " + std::to_string(guilty);
    EXPECT_TRUE(outcome.mentions(expected)) << "expected '" << expected << "': " << outcome.text;
    EXPECT_TRUE(batch.untouched(operation));
  }
}

TEST_P(Plan, ThatIsCutShortIsRefused) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const std::vector<std::byte> bytes = batch.plan().read();
    for (const std::size_t length :
         {std::size_t{0}, std::size_t{16}, std::size_t{128}, std::size_t{144}}) {
      SCOPED_TRACE("first " + std::to_string(length) + " bytes");
      Buffer part(rank, length, Place::ordinary);
      part.write(std::span(bytes).first(length));
      if (rank.rank == 0) batch.use_plan(part.data(), length);
      expect_plan_refused(rank, group.get(), batch, 0);
      xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
      EXPECT_EQ(xd_ep_plan_get_info(bytes.data(), length, &info), XD_ERROR_INVALID_ARGUMENT);
    }
    Step(rank, c, group.get(), 1).run_all();
  });
}

TEST_P(Plan, OfAnotherRankIsRefused) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank has no other";
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    Buffer shared(rank, batch.plan().bytes(), Place::symmetric);
    shared.write(batch.plan().read());
    xd_mem_handle handle{};
    ok(xd_mem_export(rank.comm, shared.data(), &handle));
    ok(xd_comm_barrier(rank.comm));
    Buffer foreign(rank, batch.plan().bytes(), Place::ordinary);
    if (rank.rank == 0) {
      const xd_mem_handle there{1, handle.segment, handle.offset};
      void* seen = nullptr;
      ok(xd_mem_import(rank.comm, &there, &seen));
      std::vector<std::byte> bytes(foreign.bytes());
      rank.memory->copy_out(bytes.data(), seen, bytes.size());
      foreign.write(bytes);
      batch.use_plan(foreign.data(), foreign.bytes());
    }
    ok(xd_comm_barrier(rank.comm));
    expect_plan_refused(rank, group.get(), batch, 0);
    Step(rank, c, group.get(), 1).run_all();
  });
}

TEST_P(Plan, OfAGroupWithOtherSizesIsRefused) {
  Case other = c;
  other.local_experts = 5;
  Case roomier = c;
  roomier.capacity = Capacity::larger;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    for (const Case* made : {&other, &roomier}) {
      const Group elsewhere = make_group(rank.comm, made->config(rank.rank));
      Step foreign(rank, *made, elsewhere.get(), 0);
      foreign.prepare();
      Batch batch(rank, c);
      batch.prepare(group.get());
      if (rank.rank == 0) batch.use_plan(foreign.plan().data(), foreign.plan().bytes());
      expect_plan_refused(rank, group.get(), batch, 0);
    }
    Step(rank, c, group.get(), 1).run_all();
  });
}

TEST_P(Plan, OfAGroupWithOtherExpertRanksIsRefused) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank holds all experts in any case";
  Case other = c;
  other.settle(Homes::interleaved);  // as many on every rank: nothing else differs
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const Group elsewhere = make_group(rank.comm, other.config(rank.rank));
    Step foreign(rank, other, elsewhere.get(), 0);
    foreign.prepare();
    Batch batch(rank, c);
    batch.prepare(group.get());
    if (rank.rank == 0) batch.use_plan(foreign.plan().data(), foreign.plan().bytes());
    expect_plan_refused(rank, group.get(), batch, 0);
    const Outcome outcome = batch.call(group.get(), XD_EP_COMBINE);
    EXPECT_TRUE(outcome.mentions(rank.rank == 0 ? "other expert_ranks" : "rank 0")) << outcome.text;
    Step(rank, c, group.get(), 1).run_all();
  });
}

TEST_P(Plan, OfAnotherBatchThanThePeersIsAMismatch) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch first(rank, c, 0);
    first.prepare(group.get());
    Batch second(rank, c, 1);
    second.prepare(group.get());
    Batch& batch = rank.rank == 0 ? second : first;
    for (const xd_ep_operation operation : kUsers) {
      EXPECT_EQ(batch.call(group.get(), operation), XD_ERROR_MISMATCH);
      EXPECT_TRUE(batch.untouched(operation));
    }
    Step(rank, c, group.get(), 2).run_all();
  });
}

// Rows of two plans of the same routing stand in the same places, so nothing but the fingerprint
// tells that ranks have come apart.
TEST_P(Plan, OfAnEqualBatchPreparedElsewhereIsAMismatch) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const Group twin = make_group(rank.comm, c.config(rank.rank));
    Batch first(rank, c);
    first.prepare(group.get());
    Batch later(rank, c);
    later.prepare(group.get());
    Batch of_twin(rank, c);
    of_twin.prepare(twin.get());  // at the epoch of `first`
    for (Batch* other : {&later, &of_twin}) {
      SCOPED_TRACE(other == &later ? "prepared again" : "prepared by another group");
      Batch& batch = rank.rank == 0 ? *other : first;
      for (const xd_ep_operation operation : kUsers) {
        EXPECT_EQ(batch.call(group.get(), operation), XD_ERROR_MISMATCH);
        EXPECT_TRUE(batch.untouched(operation));
      }
    }
    Step(rank, c, group.get(), 1).run_all();
  });
}

// A plan with any wrong bit in its header is refused, so a plan's size and sums can be trusted once
// it has been opened.
TEST_P(Plan, WithADamagedHeaderByteIsRefused) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const std::vector<std::byte> good = batch.plan().read();
    for (std::size_t i = 0; i < kPlanHeaderBytes; ++i) {
      SCOPED_TRACE("byte " + std::to_string(i));
      std::vector<std::byte> bad = good;
      bad[i] ^= std::byte{1} << (mix(c.seed, i) % 8);
      xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
      EXPECT_EQ(xd_ep_plan_get_info(bad.data(), bad.size(), &info), XD_ERROR_INVALID_ARGUMENT);
      if (rank.rank == 0) batch.plan().write(bad);
      EXPECT_EQ(batch.call(group.get(), kUsers[i % std::size(kUsers)]),
                rank.rank == 0 ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
    }
    Step(rank, c, group.get(), 1).run_all();
  });
}

// A header of another version may be read by nothing but its version.
TEST_P(Plan, OfAnotherVersionIsRefusedByItsVersion) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    std::vector<std::byte> plan = batch.plan().read();
    for (const std::uint32_t version : {kPlanVersion - 1, kPlanVersion + 1}) {
      std::memcpy(plan.data() + kPlanVersionAt, &version, sizeof(version));
      xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
      EXPECT_EQ(xd_ep_plan_get_info(plan.data(), plan.size(), &info), XD_ERROR_INVALID_ARGUMENT);
      const std::string text = "plan: has format version " + std::to_string(version) +
                               ", expected " + std::to_string(kPlanVersion);
      expect_said(text);
      if (rank.rank == 0) batch.plan().write(plan);
      EXPECT_EQ(batch.call(group.get(), kUsers[0]),
                rank.rank == 0 ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
    }
    Step(rank, c, group.get(), 1).run_all();
  });
}

// Damage past the header may give wrong values; it never reaches outside the tensors, and never
// harms the group.
TEST_P(Plan, WithADamagedBodyStaysInsideTheTensors) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "damaged plans of two ranks may name one row: a race by construction";
#endif
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const std::vector<std::byte> good = batch.plan().read();
    Random random(mix(c.seed, 0xDA, static_cast<std::uint64_t>(rank.rank)));
    for (int round = 0; round < 64; ++round) {
      std::vector<std::byte> bad = good;
      const std::uint64_t hits = 1 + random.below(round % 2 == 0 ? 4 : bad.size());
      for (std::uint64_t hit = 0; hit < hits; ++hit) {
        bad[kPlanHeaderBytes + random.below(bad.size() - kPlanHeaderBytes)] =
            static_cast<std::byte>(random.next());
      }
      batch.plan().write(bad);
      for (const xd_ep_operation operation : kUsers) {
        const Outcome outcome = batch.call(group.get(), operation);
        EXPECT_TRUE(outcome == XD_SUCCESS || outcome == XD_ERROR_INVALID_ARGUMENT ||
                    outcome == XD_ERROR_MISMATCH)
            << testing::PrintToString(outcome);
      }
      EXPECT_TRUE(batch.guards_intact()) << "round " << round;
    }
    Step(rank, c, group.get(), 1).run_all();
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, Plan, testing::Values(XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR));

TEST(PlanSize, IsWithinItsBound) {
  for (const int ranks : {1, 2, 8, 64}) {
    for (const int local_experts : {1, 2, 32}) {
      for (const int topk : {1, 8, 32}) {
        for (const int tokens : {1, 100, 4096}) {
          xd_ep_config config = XD_EP_CONFIG_INIT;
          config.num_ranks = ranks;
          config.num_experts = ranks * local_experts;
          config.max_topk = topk;
          config.max_tokens_per_rank = tokens;
          config.hidden = 8;
          std::size_t bytes = 0;
          std::int64_t rows = 0;
          ok(xd_ep_plan_size(&config, &bytes));
          ok(xd_ep_recv_bound(&config, &rows));
          const std::int64_t routing = std::int64_t{4} * tokens * topk + 12 * rows;
          const std::int64_t small = 1024 + std::int64_t{16} * ranks * (config.num_experts + ranks);
          EXPECT_LE(static_cast<std::int64_t>(bytes), routing + small)
              << "W=" << ranks << " L=" << local_experts << " K=" << topk << " T=" << tokens;
        }
      }
    }
  }
}

}  // namespace
}  // namespace xd::test
