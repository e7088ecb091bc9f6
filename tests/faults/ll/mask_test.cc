// Processes of low-latency groups that mask: they are stopped and
// continued, or die, and the others go on.
#include <crossdock/version.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>
#include <tuple>

#include "faults/ll/program.h"
#include "faults/processes.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

using std::chrono::milliseconds;

// On two GPUs the survivors have one each. Were the victim another rank, they would take turns on
// one GPU for all that they do afterwards.
constexpr int kVictim = 2;
constexpr std::array kSurvivors{0, 1};

RankProgram masked_program(int wait_timeout_ms, bool apart) {
  RankProgram program;
  program.apart = apart;
  program.program = Program::ll_masked;
  // Steps of GPUs take longer, so fewer come before the loss.
  program.calls = kStepsAfterLoss + (executor() == "cpu" ? 2000 : 500);
  program.wait_timeout_ms = wait_timeout_ms;
  program.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
  return program;
}

// When the victim is stopped or killed, in microseconds, and whether each rank is on a machine of
// its own.
class LlMaskedProcess : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  void SetUp() override {
    if (!apart()) return;
    if (executor() != "cpu") GTEST_SKIP() << "groups on devices of several machines do not mask";
    const char* reason = nullptr;
    if (xd_feature_available(XD_FEATURE_NETWORK, &reason) == 0) GTEST_SKIP() << reason;
  }
  static bool apart() { return std::get<bool>(GetParam()); }
  static void wait_for_moment() {
    std::this_thread::sleep_for(std::chrono::microseconds(std::get<int>(GetParam())));
  }
};

// Its memory is there, and nothing is written: only the timeout tells. It goes on in the middle of
// whatever it was doing, and the others do not mind.
TEST_P(LlMaskedProcess, ThatIsStoppedAndContinuedIsLeftOutAndComesBack) {
  Processes ranks(masked_program(kLateMs, apart()), {{0}, {1}, {2}});
  ranks.start();
  ranks.wait_for_progress(kVictim);
  wait_for_moment();
  const auto since = Clock::now();
  ranks.stop(kVictim);
  for (const int survivor : kSurvivors) {
    ranks.wait_for_progress(survivor);
    ranks.expect_loss(survivor, kVictim, since, milliseconds(kLateMs) + kLimit);
  }
  ranks.resume(kVictim);
  const Result itself = ranks.wait_for_result(kVictim);
  EXPECT_EQ(itself.status, XD_ERROR_PEER_LOST) << itself.text;
  ranks.start();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.wait_for_after(rank), "clean");
}

// The communicator outlives it, and the death is known long before a timeout.
TEST_P(LlMaskedProcess, ThatIsKilledIsLeftOutAtOnceByAll) {
  RankProgram program = masked_program(20000, apart());
  program.death.victim = kVictim;
  Processes ranks(program, {{0}, {1}, {2}});
  ranks.start();
  ranks.wait_for_progress(kVictim);
  wait_for_moment();
  const auto since = ranks.kill(kVictim);
  for (const int survivor : kSurvivors) {
    ranks.wait_for_progress(survivor);
    ranks.expect_loss(survivor, kVictim, since, kLimit);
    EXPECT_EQ(ranks.wait_for_after(survivor), "clean");
  }
}

INSTANTIATE_TEST_SUITE_P(Moments, LlMaskedProcess,
                         testing::Combine(testing::Values(0, 700, 3100, 15000),
                                          testing::Values(false)));
INSTANTIATE_TEST_SUITE_P(MomentsBetweenMachines, LlMaskedProcess,
                         testing::Combine(testing::Values(0, 15000), testing::Values(true)));

}  // namespace
}  // namespace xd::test
