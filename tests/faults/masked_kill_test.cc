// A peer's process dies where losses are masked (XD_COMM_PEER_LOSS_MASK): all others
// know which ranks are lost, and go on until something needs one of them. Deaths in the middle of
// calls and operations are in kill_test.cc.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "conformance/said.h"
#include "faults/processes.h"

namespace xd::test {
namespace {

// A process with a device takes longer to end.
std::chrono::milliseconds limit() {
  return std::chrono::milliseconds(executor() == "cpu" ? 1000 : 3000);
}

RankProgram outliving(int losses) {
  RankProgram program;
  program.program = Program::outlive;
  program.operation = XD_EP_DISPATCH;
  program.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
  program.losses = losses;
  return program;
}

// Expects the course of a rank that outlives the ranks `lost`, of which the last died at `since`.
void expect_goes_on(Processes& ranks, int rank, const std::string& lost, Clock::time_point since) {
  SCOPED_TRACE("rank " + std::to_string(rank));
  const std::string named = lost.size() == 1 ? "rank " + lost + " has been lost"
                                             : "ranks " + lost.substr(0, 1) + ", " +
                                                   lost.substr(2, 1) + " have been lost";
  const Losses noticed = ranks.wait_for_losses(rank);
  EXPECT_EQ(noticed.ranks, lost);
  EXPECT_EQ(noticed.finished_by, XD_SUCCESS);
  EXPECT_LT(noticed.when - since, limit());
  for (int i = 0; i < 2; ++i) {
    for (const char* call : {"xd_comm_barrier", "xd_mem_grow", "xd_ep_group_create"}) {
      const Result result = ranks.wait_for_result(rank);
      EXPECT_EQ(result.status, XD_ERROR_PEER_LOST) << call;
      expect_words(result.text, {std::string(call) + ": " + named});
    }
  }
  const Losses later = ranks.wait_for_losses(rank);
  EXPECT_EQ(later.ranks, lost);
  EXPECT_EQ(later.finished_by, XD_SUCCESS) << "calls that failed have finished the communicator";
  EXPECT_LT(later.when - noticed.when, limit());
}

// An operation on all ranks cannot go on, even if only one of them has called it.
void expect_fails_at_once(Processes& ranks, int rank, const std::string& lost) {
  SCOPED_TRACE("rank " + std::to_string(rank));
  const auto since = Clock::now();
  ranks.wait_until_ready(rank);
  ranks.go(rank);
  const Result result = ranks.wait_for_result(rank);
  EXPECT_EQ(result.status, XD_ERROR_PEER_LOST) << result.text;
  EXPECT_NE(lost.find(std::to_string(result.peer)), std::string::npos) << result.peer;
  EXPECT_LT(result.when - since, limit());
  EXPECT_EQ(ranks.wait_for_after(rank), "clean");
}

// `lost`: as in "0,3".
void expect_outlived(Processes& ranks, const std::vector<int>& survivors, const std::string& lost,
                     Clock::time_point since) {
  for (const int rank : survivors) expect_goes_on(ranks, rank, lost, since);
  for (const int rank : survivors) expect_fails_at_once(ranks, rank, lost);
}

class MaskedKill : public testing::TestWithParam<int> {};

TEST_P(MaskedKill, OfAnIdleRankIsKnownToAllAndFinishesNothing) {
  const int victim = GetParam();
  Processes ranks(outliving(1), {{0}, {1}, {2}});
  ranks.wait_until_all_are_ready();
  const auto since = ranks.kill(victim);
  const std::vector<int> survivors{victim == 0 ? 1 : 0, 2};
  for (const int rank : survivors) ranks.go(rank);
  expect_outlived(ranks, survivors, std::to_string(victim), since);
}

INSTANTIATE_TEST_SUITE_P(Victims, MaskedKill, testing::Values(0, 1));

// The watch thread goes on after the first.
TEST(MaskedKill, OfOneRankAfterAnotherIsKnownToAll) {
  Processes ranks(outliving(2), {{0}, {1}, {2}, {3}});
  ranks.wait_until_all_are_ready();
  ranks.kill(3);
  for (const int rank : {1, 2}) ranks.go(rank);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));  // enough to notice the first
  const auto since = ranks.kill(0);
  expect_outlived(ranks, {1, 2}, "0,3", since);
}

TEST(MaskedKill, OfAProcessWithTwoRanksLosesBoth) {
  Processes ranks(outliving(2), {{0}, {1, 2}, {3}});
  ranks.wait_until_all_are_ready();
  const auto since = ranks.kill(1);
  for (const int rank : {0, 3}) ranks.go(rank);
  expect_outlived(ranks, {0, 3}, "1,2", since);
}

}  // namespace
}  // namespace xd::test
