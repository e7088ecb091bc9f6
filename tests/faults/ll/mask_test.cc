// Processes of low-latency groups that mask: they are stopped and
// continued, or die, and the others go on.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>

#include "faults/ll/program.h"
#include "faults/processes.h"

namespace xd::test {
namespace {

using std::chrono::milliseconds;

// On two GPUs the survivors have one each. Were the victim another rank, they would take turns on
// one GPU for all that they do afterwards.
constexpr int kVictim = 2;
constexpr std::array kSurvivors{0, 1};
constexpr auto kSlack = milliseconds(1000);  // of a machine that does other things as well

RankProgram masked_program(int wait_timeout_ms) {
  RankProgram program;
  program.program = Program::ll_masked;
  // Steps of GPUs take longer, so fewer come before the loss.
  program.calls = kStepsAfterLoss + (executor() == "cpu" ? 2000 : 500);
  program.wait_timeout_ms = wait_timeout_ms;
  program.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
  return program;
}

class LlMaskedProcess : public testing::TestWithParam<int> {};

// Its memory is there, and nothing is written: only the timeout tells. It goes on in the middle of
// whatever it was doing, and the others do not mind.
TEST_P(LlMaskedProcess, ThatIsStoppedAndContinuedIsLeftOutAndComesBack) {
  constexpr milliseconds kTimeout(500);
  Processes ranks(masked_program(static_cast<int>(kTimeout.count())), {{0}, {1}, {2}});
  ranks.start();
  ranks.wait_for_progress(kVictim);
  std::this_thread::sleep_for(std::chrono::microseconds(GetParam()));
  const auto since = Clock::now();
  ranks.stop(kVictim);
  for (const int survivor : kSurvivors) {
    ranks.wait_for_progress(survivor);
    ranks.expect_loss(survivor, kVictim, since, kTimeout + kSlack);
  }
  ranks.resume(kVictim);
  const Result itself = ranks.wait_for_result(kVictim);
  EXPECT_EQ(itself.status, XD_ERROR_PEER_LOST) << itself.text;
  ranks.start();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.wait_for_after(rank), "clean");
}

// The communicator outlives it, and the death is known long before a timeout.
TEST_P(LlMaskedProcess, ThatIsKilledIsLeftOutAtOnceByAll) {
  RankProgram program = masked_program(20000);
  program.death.victim = kVictim;
  Processes ranks(program, {{0}, {1}, {2}});
  ranks.start();
  ranks.wait_for_progress(kVictim);
  std::this_thread::sleep_for(std::chrono::microseconds(GetParam()));
  const auto since = ranks.kill(kVictim);
  for (const int survivor : kSurvivors) {
    ranks.wait_for_progress(survivor);
    ranks.expect_loss(survivor, kVictim, since, kSlack);
    EXPECT_EQ(ranks.wait_for_after(survivor), "clean");
  }
}

INSTANTIATE_TEST_SUITE_P(Moments, LlMaskedProcess, testing::Values(0, 700, 3100, 15000));

}  // namespace
}  // namespace xd::test
