// Ranks whose processes share one limit on memory and together ask for more: all of them get an
// error, and none is killed. The test makes a control group for them; where it cannot, only the
// arithmetic is tested (unit tests of SharedLimits).
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "faults/control_group.h"
#include "faults/processes.h"

namespace xd::test {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kLimit = 100 * kMiB;

struct Shares {
  const char* name;
  std::vector<std::vector<int>> processes;  // their ranks
  std::uint64_t mib;                        // MiB of each rank
  bool fit;
};

class SharedLimit : public testing::TestWithParam<Shares> {
 protected:
  void SetUp() override {
    group_ = ControlGroup::make(kLimit);
    if (!group_) GTEST_SKIP() << "no control group can be made here";
  }

  static int num_ranks() {
    std::size_t count = 0;
    for (const auto& ranks : GetParam().processes) count += ranks.size();
    return static_cast<int>(count);
  }

  // The ranks go into the group, and then into their collective call.
  void run(const RankProgram& program, std::uint64_t bytes_of_all) {
    Processes ranks(program, GetParam().processes);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      ranks.wait_until_ready(rank);
      ASSERT_TRUE(group_->add(ranks.pid(rank)));
    }
    for (int rank = 0; rank < num_ranks(); ++rank) ranks.go(rank);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      const Result result = ranks.wait_for_result(rank);
      if (GetParam().fit) {
        EXPECT_EQ(result.status, XD_SUCCESS) << result.text;
      } else {
        expect_told(result, bytes_of_all);
      }
      EXPECT_EQ(ranks.wait_for_after(rank), "clean");
    }
  }

  static void expect_told(const Result& result, std::uint64_t bytes_of_all) {
    EXPECT_EQ(result.status, XD_ERROR_OUT_OF_MEMORY) << result.text;
    const std::vector<std::string> parts{"together asked " + std::to_string(bytes_of_all),
                                         "control group", " is " + std::to_string(kLimit)};
    for (const std::string& part : parts) {
      EXPECT_NE(result.text.find(part), std::string::npos) << part << " in " << result.text;
    }
  }

  std::unique_ptr<ControlGroup> group_;
};

INSTANTIATE_TEST_SUITE_P(Of, SharedLimit,
                         testing::Values(Shares{"TwoOf70", {{0}, {1}}, 70, false},
                                         Shares{"FourOf40", {{0}, {1}, {2}, {3}}, 40, false},
                                         Shares{"ThreeOf45InTwo", {{0, 1}, {2}}, 45, false},
                                         Shares{"TwoOf30", {{0}, {1}}, 30, true},
                                         Shares{"FourOf20", {{0}, {1}, {2}, {3}}, 20, true}),
                         [](const auto& shares) { return shares.param.name; });

TEST_P(SharedLimit, IsComparedWithTheSumOfHeaps) {
  RankProgram program;
  program.program = Program::create;
  program.bytes = GetParam().mib * kMiB;
  run(program, program.bytes * static_cast<std::uint64_t>(num_ranks()));
}

TEST_P(SharedLimit, IsComparedWithTheSumOfGrowths) {
  RankProgram program;
  program.program = Program::grow;
  program.bytes = GetParam().mib * kMiB;
  run(program, program.bytes * static_cast<std::uint64_t>(num_ranks()));
}

TEST_P(SharedLimit, IsComparedWithTheSumOfGroups) {
  RankProgram program;
  program.program = Program::create_group;
  program.num_ranks = num_ranks();
  // A group's memory grows with its tokens: as many as come to the size wanted.
  const auto bytes = [&program] {
    const xd_ep_config config = case_of(program).config(0);
    xd_ep_memory memory = XD_EP_MEMORY_INIT;
    EXPECT_EQ(xd_ep_group_memory(&config, &memory), XD_SUCCESS) << xd_last_error();
    return memory.symmetric_bytes;
  };
  program.tokens = 1000;
  program.tokens = static_cast<int>(1000 * GetParam().mib * kMiB / bytes());
  run(program, bytes() * static_cast<std::uint64_t>(num_ranks()));
}

}  // namespace
}  // namespace xd::test
