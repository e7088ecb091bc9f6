// Ranks that agree on views while others end, stand still or never come: all that live go on with
// the same views. The orders of the accesses by which they decide are in near_decision_test.cc and
// far_decision_test.cc.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "conformance/said.h"
#include "faults/processes.h"
#include "faults/view_program.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

RankProgram agreeing(int losses, bool apart) {
  RankProgram program;
  program.program = Program::agree;
  program.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
  program.losses = losses;
  program.wait_timeout_ms = 20000;
  program.apart = apart;
  return program;
}

void expect_ends_with(const std::string& history, const std::string& members) {
  EXPECT_TRUE(history.ends_with(":" + members)) << history;
}

// ---- Ranks that are killed in the middle ----

struct Moment {
  int microseconds;
  bool apart;
};

class KillInAgree : public testing::TestWithParam<Moment> {};

TEST_P(KillInAgree, LeavesSurvivorsWithTheSameViews) {
  const auto [microseconds, apart] = GetParam();
  Processes ranks(agreeing(2, apart), {{0}, {1}, {2}, {3}, {4}});
  ranks.start();
  for (int rank = 0; rank < 5; ++rank) ranks.wait_for_progress(rank);
  for (const int victim : {0, 3}) {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    ranks.kill(victim);
  }
  const std::string history = ranks.wait_for_after(1);
  expect_ends_with(history, "1,2,4");
  for (const int survivor : {2, 4}) EXPECT_EQ(ranks.wait_for_after(survivor), history);
}

std::vector<Moment> moments(bool apart) {
  std::vector<Moment> all;
  for (const int microseconds : {0, 300, 700, 1500, 3100}) all.push_back({microseconds, apart});
  return all;
}
const auto kNameOfMoment = [](const auto& info) {
  return "after" + std::to_string(info.param.microseconds) + "us";
};
INSTANTIATE_TEST_SUITE_P(OnOneMachine, KillInAgree, testing::ValuesIn(moments(false)),
                         kNameOfMoment);
INSTANTIATE_TEST_SUITE_P(BetweenMachines, KillInAgree, testing::ValuesIn(moments(true)),
                         kNameOfMoment);

TEST(KillsInAgree, OfAProcessWithTwoRanksLeavesBothOut) {
  Processes ranks(agreeing(2, false), {{0, 1}, {2, 3}});
  ranks.start();
  for (const int rank : {2, 3}) ranks.wait_for_progress(rank);
  ranks.kill(0);
  const std::string history = ranks.wait_for_after(2);
  expect_ends_with(history, "2,3");
  EXPECT_EQ(ranks.wait_for_after(3), history);
}

// On one machine a single rank decides, whichever it is.
TEST(KillsInAgree, LeaveTheLastRankAlone) {
  Processes ranks(agreeing(2, false), {{0}, {1}, {2}});
  ranks.start();
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for_progress(rank);
  for (const int victim : {0, 1}) ranks.kill(victim);
  expect_ends_with(ranks.wait_for_after(2), "2");
}

// ---- Ranks that are late ----

class LateInAgree : public testing::TestWithParam<bool> {};

void expect_left_out_and_taken_in(Processes& ranks, int late) {
  const Result result = ranks.wait_for_result(late);
  EXPECT_EQ(result.status, XD_ERROR_PEER_LOST);
  const std::string itself = "the others have gone on without rank " + std::to_string(late);
  expect_words(result.text, {"xd_comm_agree: ", itself, "view "});
  for (int rank = 0; rank < 3; ++rank) ranks.wait_until_ready(rank);
  for (int rank = 0; rank < 3; ++rank) ranks.go(rank);
  for (int rank = 0; rank < 3; ++rank) expect_ends_with(ranks.wait_for_after(rank), "0,1,2");
}

RankProgram impatient(bool apart) {
  RankProgram program = agreeing(1, apart);
  program.wait_timeout_ms = kLateMs;
  program.calls = 2;
  return program;
}

TEST_P(LateInAgree, ARankThatDoesNotComeIsLeftOutAndComesBack) {
  Processes ranks(impatient(GetParam()), {{0}, {1}, {2}});
  ranks.wait_until_all_are_ready();
  ranks.go(0);
  ranks.go(2);
  for (const int rank : {0, 2}) ranks.wait_for_progress(rank);  // they have decided without it
  ranks.go(1);
  expect_left_out_and_taken_in(ranks, 1);
}

TEST_P(LateInAgree, ARankThatStandsStillIsLeftOutAndComesBack) {
  Processes ranks(impatient(GetParam()), {{0}, {1}, {2}});
  ranks.start();
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for_progress(rank);
  ranks.stop(0);
  for (const int rank : {1, 2}) ranks.wait_until_ready(rank);  // for the second part
  ranks.resume(0);
  const Result result = ranks.wait_for_result(0);
  EXPECT_EQ(result.status, XD_ERROR_PEER_LOST) << result.text;
  ranks.wait_until_ready(0);
  for (int rank = 0; rank < 3; ++rank) ranks.go(rank);
  for (int rank = 0; rank < 3; ++rank) expect_ends_with(ranks.wait_for_after(rank), "0,1,2");
}

// Its connections take what the others say to it for hundreds of views, and it is not lost.
TEST(LongLateInAgree, ARankThatStandsStillForManyViewsBetweenMachinesComesBack) {
  RankProgram program = impatient(true);
  program.views = 400;
  program.silence_ms = 1000;
  Processes ranks(program, {{0}, {1}, {2}});
  ranks.start();
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for_progress(rank);
  ranks.stop(0);
  for (const int rank : {1, 2}) ranks.wait_until_ready(rank);
  std::this_thread::sleep_for(std::chrono::milliseconds(6000));  // a full connection would end
  ranks.resume(0);
  const Result result = ranks.wait_for_result(0);
  EXPECT_EQ(result.status, XD_ERROR_PEER_LOST) << result.text;
  ranks.wait_until_ready(0);
  for (int rank = 0; rank < 3; ++rank) ranks.go(rank);
  for (int rank = 0; rank < 3; ++rank) expect_ends_with(ranks.wait_for_after(rank), "0,1,2");
}

const auto kNameOfMedium = [](const auto& info) {
  return info.param ? "BetweenMachines" : "OnOneMachine";
};
INSTANTIATE_TEST_SUITE_P(Media, LateInAgree, testing::Bool(), kNameOfMedium);

// ---- Between machines, a minority ----

TEST(Minority, EndsWithItsLossAndHalfWithTheLowestRankGoesOn) {
  for (const int victim : {0, 1}) {
    SCOPED_TRACE("rank " + std::to_string(victim) + " dies");
    RankProgram program = agreeing(1, true);
    program.wait_timeout_ms = kLateMs;
    Processes ranks(program, {{0}, {1}});
    ranks.start();
    for (int rank = 0; rank < 2; ++rank) ranks.wait_for_progress(rank);
    ranks.kill(victim);
    if (victim == 1) {
      expect_ends_with(ranks.wait_for_after(0), "0");
    } else {
      const Result result = ranks.wait_for_result(1);
      EXPECT_EQ(result.status, XD_ERROR_PEER_LOST);
      expect_words(result.text, {"rank 1", "has reached too few members of view "});
    }
  }
}

}  // namespace
}  // namespace xd::test
