// Ranks of groups that outlive losses are killed at any moment: the same operation ends with the
// loss on all that are left, and what they compute behind it is right, element for element. The
// stores between which a rank may end are in turn_loss_test.cc, and the steps of each operation in
// death_test.cc.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "faults/processes.h"
#include "faults/resume_program.h"

namespace xd::test {
namespace {

RankProgram resuming(int losses) {
  RankProgram program;
  program.program = Program::resume;
  program.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
  program.resumes = true;
  program.losses = losses;
  program.timeout_ms = 60000;
  return program;
}

class Outliving : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (executor() != "cpu") GTEST_SKIP() << "groups on CUDA devices outlive no losses so far";
  }
};

// One after another, the second one wherever the others are in going on.
TEST_P(Outliving, TwoRanksThatDieGroupsGoOnInStep) {
  Processes ranks(resuming(2), {{0}, {1}, {2}, {3}});
  ranks.start();
  for (int rank = 0; rank < 4; ++rank) ranks.wait_for_progress(rank);
  for (const int victim : {GetParam() % 4, (GetParam() + 1) % 4}) {
    std::this_thread::sleep_for(std::chrono::microseconds(GetParam()));
    ranks.kill(victim);
  }
  std::string first;
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == GetParam() % 4 || rank == (GetParam() + 1) % 4) continue;
    const std::string history = ranks.wait_for_after(rank);
    EXPECT_NE(history.find(':'), std::string::npos) << history;
    if (first.empty()) first = history;
    EXPECT_EQ(history, first);
  }
}

INSTANTIATE_TEST_SUITE_P(Moments, Outliving, testing::Values(0, 301, 902, 1703, 4100, 9301));

TEST_F(Outliving, AProcessWithTwoRanksLosesBoth) {
  Processes ranks(resuming(2), {{0}, {1, 2}, {3}});
  ranks.start();
  for (int rank = 0; rank < 4; ++rank) ranks.wait_for_progress(rank);
  ranks.kill(1);
  const std::string history = ranks.wait_for_after(0);
  EXPECT_NE(history.find(':'), std::string::npos) << history;
  EXPECT_EQ(ranks.wait_for_after(3), history);
}

}  // namespace
}  // namespace xd::test
