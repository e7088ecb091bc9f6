// Tables of logical experts: how ranks agree about them, and what becomes of a bad one. Every
// element under good ones is compared in the grids.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/families/mistakes.h"
#include "conformance/one_mistake.h"
#include "conformance/step.h"
#include "conformance/tables.h"

namespace xd::test {
namespace {

// The operation by family, and the batch that expect_works() runs.
Outcome set(const Rank& rank, xd_ep_group* group, const xd_ep_placement* placement) {
  return finish(rank, group, xd_ep_group_set_placement(group, placement, rank.stream()));
}
LlOutcome set(const Rank& rank, xd_ll_group* group, const xd_ep_placement* placement) {
  return finish(rank, group, xd_ll_group_set_placement(group, placement, rank.stream()));
}
template <class F>
constexpr int kWorks = 1;
template <>
constexpr int kWorks<LowLatency> = 7;
template <class F>
constexpr auto kSetPlacement = XD_EP_SET_PLACEMENT;
template <>
constexpr auto kSetPlacement<LowLatency> = XD_LL_SET_PLACEMENT;

// One for each rank and expert.
std::size_t lists_of(const Table& table) {
  return static_cast<std::size_t>(table.num_ranks) * static_cast<std::size_t>(table.logical);
}

template <class F>
class SetPlacement : public testing::Test {
 protected:
  void SetUp() override { c.tables = Tables::replicas; }
  // Sets the good table, lets `mistake` be made on all ranks, and runs a batch under the good one.
  template <class Mistake>
  void expect_harmless(const Mistake& mistake) {
    on_every_rank([&](Rank& rank) {
      const auto group = F::make(rank, c);
      const Given good(c.table(kWorks<F>));
      ok(set(rank, group.get(), good.get()));
      mistake(rank, group.get(), good);
      F::expect_works(rank, c, group.get());
    });
  }
  typename F::Case c = F::plain();
};
using WithIds = testing::Types<Bulk, LowLatency>;
TYPED_TEST_SUITE(SetPlacement, WithIds, FamilyName);

TYPED_TEST(SetPlacement, UntilTheFirstCallExpertsAreInOrder) {
  using F = TypeParam;
  this->c.tables = Tables::in_order;
  on_every_rank([&](Rank& rank) {
    const auto group = F::make(rank, this->c);
    F::expect_works(rank, this->c, group.get());
  });
}

TYPED_TEST(SetPlacement, TablesThatDifferNameTheirRanksAndChangeNothing) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  this->expect_harmless([&](const Rank& rank, auto* group, const Given&) {
    Table other = this->c.table(kWorks<TypeParam>);
    std::swap(other.expert_of_slot.front(), other.expert_of_slot.back());
    if (is_guilty(rank)) other.expert_of_slot.front() = -1;
    const Given given(other);
    const auto outcome = set(rank, group, given.get());
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    const int named =
        is_guilty(rank) ? (guilty_rank(rank) + 1) % rank.num_ranks : guilty_rank(rank);
    expect_words(outcome.text, {"rank " + std::to_string(named) + ": another placement"});
  });
}

// Lists are a part of the table.
TYPED_TEST(SetPlacement, ListsThatDifferAreAMismatch) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  this->expect_harmless([&](const Rank& rank, auto* group, const Given& good) {
    Table other = this->c.table(kWorks<TypeParam>);
    other.lists.resize(lists_of(other));
    const Given given(other);
    EXPECT_EQ(set(rank, group, is_guilty(rank) ? given.get() : good.get()), XD_ERROR_MISMATCH);
  });
}

// A damage to a good table, and words of the error's text.
struct Damaged {
  std::vector<std::int32_t> expert_of_slot, first, slots;
  xd_ep_placement placement = XD_EP_PLACEMENT_INIT;
};
struct BadTable {
  const char* words;
  void (*damage)(Damaged&);
};
const BadTable kBadTables[] = {
    {"placement.expert_of_slot[1] = 9999, expected a logical expert, 0 to ",
     [](Damaged& d) { d.expert_of_slot[1] = 9999; }},
    {"placement.expert_of_slot[0] = -2, expected", [](Damaged& d) { d.expert_of_slot[0] = -2; }},
    {"placement.expert_of_slot = NULL", [](Damaged& d) { d.placement.expert_of_slot = nullptr; }},
    {"placement.choice_first and choice_slots: one is NULL",
     [](Damaged& d) { d.placement.choice_slots = nullptr; }},
    {"placement.choice_first[0] = 1, expected 0", [](Damaged& d) { d.first[0] = 1; }},
    {"placement.choice_first[2] = -1, expected at least", [](Damaged& d) { d.first[2] = -1; }},
    {"placement.choice_slots[0] = 70000, expected a slot", [](Damaged& d) { d.slots[0] = 70000; }},
    {"placement.choice_slots[0] = -1, expected a slot", [](Damaged& d) { d.slots[0] = -1; }},
    {", expected one of expert 0", [](Damaged& d) { d.expert_of_slot[0] = 1; }},
    {"placement.struct_size = 3", [](Damaged& d) { d.placement.struct_size = 3; }},
};

TYPED_TEST(SetPlacement, ABadTableIsNamedOnItsRankAndChangesNothing) {
  this->expect_harmless([&](const Rank& rank, auto* group, const Given& good) {
    for (const BadTable& bad : kBadTables) {
      SCOPED_TRACE(bad.words);
      Damaged d;
      const Table table = this->c.table(kWorks<TypeParam>);
      d.expert_of_slot = table.expert_of_slot;
      d.expert_of_slot[0] = 0;
      // Of rank 0's choices of expert 0; all other lists are empty.
      d.first.assign(lists_of(table) + 1, 1);
      d.first[0] = 0;
      d.slots = {0};
      d.placement.expert_of_slot = d.expert_of_slot.data();
      d.placement.choice_first = d.first.data();
      d.placement.choice_slots = d.slots.data();
      bad.damage(d);
      const auto outcome = set(rank, group, is_guilty(rank) ? &d.placement : good.get());
      EXPECT_EQ(outcome, is_guilty(rank) ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
      expect_words(outcome.text, {is_guilty(rank) ? std::string(bad.words)
                                                  : "rank " + std::to_string(guilty_rank(rank)) +
                                                        ": its call failed with"});
    }
    const auto outcome = set(rank, group, is_guilty(rank) ? nullptr : good.get());
    EXPECT_EQ(outcome, is_guilty(rank) ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
  });
}

TYPED_TEST(SetPlacement, ARankMayJoinWithAFailure) {
  using F = TypeParam;
  this->expect_harmless([&](const Rank& rank, auto* group, const Given& good) {
    if (!is_guilty(rank)) {
      EXPECT_EQ(set(rank, group, good.get()), XD_ERROR_MISMATCH);
      return;
    }
    const auto outcome =
        finish(rank, group, F::join_failed(group, kSetPlacement<F>, "no table", rank.stream()));
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions("no table"));
  });
}

TYPED_TEST(SetPlacement, BesideAnotherOperationIsAMismatchThatNamesBoth) {
  using F = TypeParam;
  if (world().num_ranks() == 1) GTEST_SKIP() << "there are no others";
  this->expect_harmless([&](const Rank& rank, auto* group, const Given& good) {
    if (is_guilty(rank)) {
      const auto outcome = set(rank, group, good.get());
      EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
      EXPECT_TRUE(outcome.mentions("here group_set_placement") ||
                  outcome.mentions("here ll_group_set_placement"));
      return;
    }
    typename F::Batch batch(rank, this->c, 0);
    const auto outcome = finish(rank, group, F::enqueue(batch, group, F::kFirst));
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions("group_set_placement, here "));
  });
}

TYPED_TEST(SetPlacement, GroupsWithoutLogicalExpertsHaveNoTables) {
  using F = TypeParam;
  const Given table(this->c.table(kWorks<F>));
  this->c.tables = Tables::none;
  on_every_rank([&](Rank& rank) {
    const auto group = F::make(rank, this->c);
    const auto outcome = set(rank, group.get(), table.get());
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions("group: was made with num_logical_experts = 0"));
    F::expect_works(rank, this->c, group.get());
  });
}

// ---- One family alone ---------------------------------------------------------------------------

TEST(SetPlacementOfBulk, PlansMadeBeforeStayGood) {
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    Case c = plain_case(world().num_ranks());
    c.layout = layout;
    c.tables = Tables::with_lists;
    on_every_rank([&](Rank& rank) {
      const Group group = make_group(rank.comm, c.config(rank.rank));
      Step before(rank, c, group.get(), 0), after(rank, c, group.get(), 1);
      before.set_table();
      before.prepare();
      before.dispatch();
      after.set_table();
      before.combine();
      after.prepare();
      before.combine_bwd();
      after.dispatch();
      before.dispatch_bwd();
      after.combine();
    });
  }
}

// Also of experts without a slot.
TEST(SetPlacementOfBulk, BadAndRepeatedIdsAreThoseOfLogicalExperts) {
  for (const bool collapse : {false, true}) {
    Case c = plain_case(world().num_ranks());
    c.tables = Tables::with_gaps;
    c.bad_ids = true;
    c.duplicates = collapse;
    on_every_rank([&](Rank& rank) {
      const Group group = make_group(rank.comm, c.config(rank.rank));
      for (int number = 0; number < Case::kSteps; ++number) {
        Step step(rank, c, group.get(), number);
        step.set_table();
        step.run_all();
      }
    });
  }
}

TEST(SetPlacementOfLowLatency, PlansMadeBeforeStayGood) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.tables = Tables::with_lists;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlBatch before(rank, c, 0), after(rank, c, 2);
    const Given first(c.table(0)), second(c.table(2));
    ok(set(rank, group.get(), first.get()));
    before.dispatch(group.get());
    before.combine(group.get(), XD_LL_PHASE_SEND);
    ok(set(rank, group.get(), second.get()));
    before.combine(group.get(), XD_LL_PHASE_RECEIVE);
    after.dispatch(group.get());
    before.next_combine();
    before.combine(group.get());
    after.combine(group.get());
  });
}

TEST(SetPlacementOfLowLatency, IsBusyWhileDispatchesAreBetweenTheirHalves) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.tables = Tables::permuted;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    const Given table(c.table(0)), other(c.table(2));
    ok(set(rank, group.get(), table.get()));
    batch.dispatch(group.get(), XD_LL_PHASE_SEND);
    const LlOutcome outcome = set(rank, group.get(), other.get());
    EXPECT_EQ(outcome, XD_ERROR_BUSY);
    EXPECT_TRUE(outcome.mentions("1 dispatches are between their halves"));
    batch.dispatch(group.get(), XD_LL_PHASE_RECEIVE);
    batch.combine(group.get());
  });
}

}  // namespace
}  // namespace xd::test
