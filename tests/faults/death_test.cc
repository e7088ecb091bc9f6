// A peer's process dies in a given step of an operation, by its own hand: an argument lies in
// memory that nobody may touch, and of all steps the one under test touches it first. The others'
// results prove that it died there:
//
//   before entering   their calls fail, their outputs are untouched: none has passed the entry
//   moving            their calls fail, and all have moved rows, as their outputs in symmetric
//                     memory show: the victim has entered and not left. Prepare moves no rows, see
//                     Part::body
//   after leaving     their calls succeed: they have seen the victim leave. The next ones fail
//
// They sleep in the entry when the victim comes, so that those who are woken by its entering see it
// before they hear of its death. Death in the exchange of counts is left to the timed tests:
// between what a rank sends there and what it awaits it touches no argument.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <ostream>
#include <string>
#include <thread>

#include "conformance/said.h"
#include "faults/processes.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

constexpr int kVictim = 1;
constexpr int kSurvivors[] = {0, 2};

enum class Step { before_entering, moving, after_leaving };

struct Spot {
  const char* name;
  xd_ep_operation operation;
  Step step;
  const char* argument;
  Part part;
};

void PrintTo(const Spot& spot, std::ostream* out) { *out << spot.name; }

class Death : public testing::TestWithParam<Spot> {
 protected:
  RankProgram program() const {
    RankProgram result;
    result.operation = GetParam().operation;
    result.death = {.victim = kVictim, .part = GetParam().part};
    result.fatal_argument = GetParam().argument;
    if (GetParam().step == Step::after_leaving) result.calls = 2;
    return result;
  }

  // Releases all, the victim last, or first where it has to wait for the others; returns a time
  // before its death.
  Clock::time_point release(Processes& ranks) const {
    if (GetParam().part == Part::body) {
      ranks.go(kVictim);
      std::this_thread::sleep_for(kMoment);
      EXPECT_TRUE(ranks.lives(kVictim)) << "touched the plan's body before its peers had entered";
      const auto since = Clock::now();
      for (const int survivor : kSurvivors) ranks.go(survivor);
      return since;
    }
    for (const int survivor : kSurvivors) ranks.go(survivor);
    std::this_thread::sleep_for(kMoment);
    const auto last = Clock::now();
    ranks.go(kVictim);
    return last;
  }

  // Both survivors: the death is at its step, and the loss of `finished_by` says these words; -1 =
  // nothing is finished.
  void expect_losses(Processes& ranks, int finished_by, Clock::time_point since,
                     const std::string& words) const {
    const bool succeeds_once = GetParam().step == Step::after_leaving;
    const bool moves_rows = GetParam().operation != XD_EP_PREPARE;
    for (const int survivor : kSurvivors) {
      SCOPED_TRACE("rank " + std::to_string(survivor));
      if (succeeds_once) {
        const Result first = ranks.wait_for_result(survivor);
        ASSERT_EQ(first.status, XD_SUCCESS) << first.text;
      }
      const Result result = ranks.expect_loss(survivor, finished_by, since, kLimit);
      if (!succeeds_once) {
        EXPECT_EQ(result.outputs_written, GetParam().step == Step::moving && moves_rows);
      }
      expect_words(result.text, {words});
    }
  }
};

TEST_P(Death, IsToldToAllWhoGoOnWithoutIt) {
  if (executor() != "cpu") GTEST_SKIP() << "needs arguments that are protected pages of the host";
  Processes ranks(program(), {{0}, {kVictim}, {2}});
  ranks.wait_until_all_are_ready();
  const auto since = release(ranks);
  const int ended = ranks.wait_for_death(kVictim);
  EXPECT_TRUE(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGSEGV) << ended;
  expect_losses(ranks, kVictim, since, "rank " + std::to_string(kVictim));
  // They have made a communicator of their own.
  for (const int survivor : kSurvivors) EXPECT_EQ(ranks.wait_for_after(survivor), "clean");
}

// The same where the group outlives it: nothing is finished, and the next batches are right without
// the victim.
TEST_P(Death, IsOutlivedByGroupsThatResume) {
  if (executor() != "cpu") GTEST_SKIP() << "groups on CUDA devices outlive no losses so far";
  RankProgram resuming = program();
  resuming.resumes = true;
  resuming.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
  Processes ranks(resuming, {{0}, {kVictim}, {2}});
  ranks.wait_until_all_are_ready();
  const auto since = release(ranks);
  ranks.wait_for_death(kVictim);
  expect_losses(ranks, -1, since, "rank " + std::to_string(kVictim) + " has been lost");
  for (const int survivor : kSurvivors) EXPECT_EQ(ranks.wait_for_after(survivor), "clean");
}

INSTANTIATE_TEST_SUITE_P(
    Steps, Death,
    testing::Values(
        // Reads ids and clears the plan's header, then enters.
        Spot{"prepare_before_entering_writing_the_plan", XD_EP_PREPARE, Step::before_entering,
             "plan", Part::all},
        Spot{"prepare_before_entering_reading_ids", XD_EP_PREPARE, Step::before_entering,
             "topk_idx", Part::end},
        // Numbers its rows when all counts are there.
        Spot{"prepare_moving", XD_EP_PREPARE, Step::moving, "plan", Part::body},
        // The last of its outputs, after the plan.
        Spot{"prepare_after_leaving", XD_EP_PREPARE, Step::after_leaving, "rank_rows", Part::all},

        // Stages nothing; like all but prepare, it opens the plan first.
        Spot{"dispatch_before_entering", XD_EP_DISPATCH, Step::before_entering, "plan", Part::all},
        // Its last token, when the others' rows are under way.
        Spot{"dispatch_moving", XD_EP_DISPATCH, Step::moving, "tokens", Part::end},
        // Outside symmetric memory: copied from staging when all have left.
        Spot{"dispatch_after_leaving", XD_EP_DISPATCH, Step::after_leaving, "recv_tokens",
             Part::all},

        // Outside symmetric memory: added up into staging.
        Spot{"combine_before_entering", XD_EP_COMBINE, Step::before_entering, "expert_out",
             Part::all},
        Spot{"combine_moving", XD_EP_COMBINE, Step::moving, "out", Part::end},

        Spot{"dispatch_bwd_before_entering", XD_EP_DISPATCH_BWD, Step::before_entering,
             "grad_recv_tokens", Part::all},
        Spot{"dispatch_bwd_moving", XD_EP_DISPATCH_BWD, Step::moving, "grad_tokens", Part::end},

        // Staged for the others to read, as grad_expert_out is not.
        Spot{"combine_bwd_before_entering", XD_EP_COMBINE_BWD, Step::before_entering, "expert_out",
             Part::all},
        Spot{"combine_bwd_moving", XD_EP_COMBINE_BWD, Step::moving, "grad_out", Part::end},
        // Staged itself: weighted and copied from there when all have left.
        Spot{"combine_bwd_after_leaving", XD_EP_COMBINE_BWD, Step::after_leaving, "grad_expert_out",
             Part::all}),
    [](const testing::TestParamInfo<Spot>& instance) { return instance.param.name; });

}  // namespace
}  // namespace xd::test
