// Programs of rank processes that do low-latency steps.
#pragma once

#include <functional>
#include <string>

#include "faults/ll/step.h"
#include "faults/rank_program.h"
#include "support/outcome.h"

namespace xd::test {

// Steps, whole and in halves, until one fails.
LlOutcome run_ll_steps(const LlSeat& seat);

// How a rank talks with the test.
struct Talk {
  std::function<void(const std::string&)> say;
  std::function<void()> wait_for_go;
};

// Program::calls steps of a group that masks lost ranks, all of them checked; at least
// kStepsAfterLoss come after the first loss, of which a line "result" tells. Then, unless a process
// has died, the rank waits for a line, and all ranks are unmasked, reset the group, and do some
// more steps. Returns "clean" or what was wrong.
std::string run_ll_masked(const RankProgram& program, const Rank& rank, const Talk& talk);

inline constexpr int kStepsBeforeLoss = 50;  // of which a line "progress" tells
inline constexpr int kStepsAfterLoss = 1000;

}  // namespace xd::test
