// Every operation in every combination of circumstances, element for element.
#include <gtest/gtest.h>

#include <cstdio>
#include <ostream>
#include <string>
#include <vector>

#include "conformance/case.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {

// For GoogleTest's messages.
void PrintTo(const Case& c, std::ostream* out) { *out << c.description(); }

namespace {

class Grid : public testing::TestWithParam<Case> {};

TEST_P(Grid, EveryElementOfEveryOutputIsRight) {
  const Case& c = GetParam();
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + c.description());
    const Group group = make_group(rank.comm, c.config(rank.rank));
    for (int number = 0; number < Case::kSteps; ++number) {
      SCOPED_TRACE("batch " + std::to_string(number));
      Step(rank, c, group.get(), number).run_all();
    }
  });
}

std::vector<Case> cases_of_this_launch() {
  if (world().reports()) {
    std::printf("XD_TEST_SEED=%llu\n", static_cast<unsigned long long>(test_seed()));
  }
  return all_cases(world().num_ranks());
}

INSTANTIATE_TEST_SUITE_P(Cases, Grid, testing::ValuesIn(cases_of_this_launch()),
                         [](const testing::TestParamInfo<Case>& instance) {
                           return std::to_string(instance.index);
                         });

}  // namespace
}  // namespace xd::test
