// Every operation in every combination of circumstances, element for element.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/case.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

class Grid : public testing::TestWithParam<Case> {};

TEST_P(Grid, EveryElementOfEveryOutputIsRight) {
  const Case& c = GetParam();
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + c.description());
    const Group group = make_group(rank.comm, c.config(rank.rank));
    for (int number = 0; number < Case::kSteps; ++number) {
      SCOPED_TRACE("batch " + std::to_string(number));
      Step step(rank, c, group.get(), number);
      step.set_table();
      step.run_all();
    }
  });
}

// A rank's own staging has no meaning for what its peers keep. Odd ranks keep none.
TEST(Staging, MayDifferBetweenRanks) {
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    Case c = plain_case(world().num_ranks());
    c.layout = layout;
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + c.description());
      Case mine = c;
      mine.placing = rank.rank % 2 == 0 ? Placing::ordinary : Placing::unstaged;
      const Group group = make_group(rank.comm, mine.config(rank.rank));
      for (int number = 0; number < Case::kSteps; ++number) {
        Step(rank, mine, group.get(), number).run_all();
      }
    });
  }
}

// Outputs this large are written around the caches, with stores that need a fence of their own. Two
// ranks show it, and each layout and place once; more would only take longer.
std::vector<Case> large_cases() {
  if (world().num_ranks() != 2) return {};
  Case c;
  c.seed = test_seed();
  c.num_ranks = world().num_ranks();
  c.dtype = {kDLBfloat, 16, 1};
  c.index_type = c.output_type = {kDLInt, 32, 1};
  c.max_tokens = 1100;  // tokens of 4 KiB, over 4 MiB in all; three of them in a chunk
  c.row_units = 256;
  c.weights = true;
  c.topk = 2;
  c.local_experts = 2;
  c.capacity = Capacity::exact;
  std::vector<Case> cases;
  c.layout = XD_EP_EXPERT_MAJOR;
  c.placing = Placing::ordinary;
  cases.push_back(c);
  c.layout = XD_EP_RANK_MAJOR;
  c.placing = Placing::symmetric;
  cases.push_back(c);
  return cases;
}

std::vector<Case> cases_of_this_launch() {
  if (world().reports()) {
    std::printf("XD_TEST_SEED=%llu\n", static_cast<unsigned long long>(test_seed()));
  }
  return all_cases(world().num_ranks());
}

std::vector<Case> cases_of_tables() {
  std::vector<Case> cases = cases_with_tables(all_cases(world().num_ranks()));
  const std::vector<Case> in_parts = cases_with_tables(cases_in_parts(world().num_ranks()));
  cases.insert(cases.end(), in_parts.begin(), in_parts.end());
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, Grid, testing::ValuesIn(cases_of_this_launch()),
                         [](const testing::TestParamInfo<Case>& instance) {
                           return std::to_string(instance.index);
                         });

INSTANTIATE_TEST_SUITE_P(Tables, Grid, testing::ValuesIn(cases_of_tables()),
                         [](const testing::TestParamInfo<Case>& instance) {
                           return std::to_string(instance.index);
                         });

INSTANTIATE_TEST_SUITE_P(Large, Grid, testing::ValuesIn(large_cases()),
                         [](const testing::TestParamInfo<Case>& instance) {
                           return std::to_string(instance.index);
                         });

}  // namespace
}  // namespace xd::test
