#include "faults/ll/program.h"

#include <crossdock/fault.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <vector>

namespace xd::test {
namespace {

constexpr xd_ll_phase kSend = XD_LL_PHASE_SEND, kReceive = XD_LL_PHASE_RECEIVE;

bool any(const std::vector<bool>& flags) {
  return std::ranges::any_of(flags, [](bool flag) { return flag; });
}

// The steps of one rank of a group that masks.
class MaskedRun : private LlSeat {
 public:
  MaskedRun(const RankProgram& program, const Rank& of_rank, const Talk& talk)
      : LlSeat(of_rank, echo_case(program.num_ranks),
               {XD_LL_PEER_LOSS_MASK, program.wait_timeout_ms}),
        talk_(talk),
        lost_(nobody(program.num_ranks)) {
    ok(xd_ll_group_fault_word(group.get(), &fault_word_));
  }

  // Empty, or what was wrong.
  std::string steps(int first, int count) {
    for (int number = first; number < first + count; ++number) {
      if (number == kStepsBeforeLoss) talk_.say("progress");
      const bool known = any(lost_);
      const std::string wrong = step(number);
      if (!wrong.empty()) return wrong;
      if (!known && any(lost_)) met_at_ = number;
    }
    return {};
  }
  // The first step that met a loss; -1 = none did.
  int met_at() const { return met_at_; }

  void come_back() {
    unmask(lost_);
    lost_ = nobody(rank.num_ranks);
  }

 private:
  std::string step(int number) {
    Echo batch(rank, c, number);
    bool unsure = false;
    for (const xd_ll_operation kind : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
      const bool halves = number % 3 == 0;
      const std::uint64_t faults = count_of_faults();
      LlOutcome outcome = call(batch, kind, halves ? kSend : XD_LL_PHASE_BOTH);
      unsure = note(outcome) || unsure;
      if (halves && accepted(outcome)) {
        outcome = call(batch, kind, kReceive);
        unsure = note(outcome) || unsure;
      }
      if (!accepted(outcome)) return "batch " + std::to_string(number) + ": " + outcome.text;
      if ((count_of_faults() != faults) != (outcome == XD_ERROR_PEER_LOST)) {
        return "batch " + std::to_string(number) + ": the fault word has gone from " +
               std::to_string(faults) + " to " + std::to_string(count_of_faults());
      }
    }
    if (!unsure && batch.rows_by_source() != batch.expected_rows(lost_)) {
      return "batch " + std::to_string(number) + " has rows " +
             testing::PrintToString(batch.rows_by_source()) + " of the ranks, expected " +
             testing::PrintToString(batch.expected_rows(lost_));
    }
    return batch.wrong(lost_, unsure);
  }

  static bool accepted(const LlOutcome& outcome) {
    return outcome == XD_SUCCESS || outcome == XD_ERROR_PEER_LOST;
  }

  // As kernels of this rank would find it behind the operation.
  std::uint64_t count_of_faults() const {
    std::uint64_t count = 0;
    rank.memory->copy_out(&count, fault_word_, sizeof(count));
    return count;
  }

  // True if the operation has met a loss. The first is reported.
  bool note(const LlOutcome& outcome) {
    if (outcome != XD_ERROR_PEER_LOST) return false;
    if (!any(lost_)) {
      std::ostringstream line;
      line << "result " << outcome.status << " " << outcome.met.rank << " 0 0 " << outcome.text;
      talk_.say(line.str());
    }
    for (std::size_t r = 0; r < lost_.size(); ++r) {
      if ((outcome.met.masked[r / 64] >> r % 64 & 1) != 0) lost_[r] = true;
    }
    return true;
  }

  const Talk& talk_;
  std::vector<bool> lost_;
  const std::uint64_t* fault_word_ = nullptr;
  int met_at_ = -1;
};

}  // namespace

LlOutcome run_ll_steps(const LlSeat& seat) {
  for (int number = 0;; number += 2) {
    Echo a = seat.batch(number), b = seat.batch(number + 1);
    for (const xd_ll_operation kind : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
      for (const xd_ll_phase phase : {kSend, kReceive}) {
        for (Echo* batch : {&a, &b}) {
          const LlOutcome outcome = seat.call(*batch, kind, phase);
          if (outcome != XD_SUCCESS) return outcome;
        }
      }
      const LlOutcome outcome = seat.call(a, kind);
      if (outcome != XD_SUCCESS) return outcome;
    }
  }
}

std::string run_ll_masked(const RankProgram& program, const Rank& rank, const Talk& talk) {
  MaskedRun run(program, rank, talk);
  talk.wait_for_go();
  std::string wrong = run.steps(0, program.calls);
  if (!wrong.empty()) return wrong;
  if (run.met_at() < 0 || run.met_at() + kStepsAfterLoss > program.calls) {
    return "met the loss at batch " + std::to_string(run.met_at()) + " of " +
           std::to_string(program.calls);
  }
  if (program.death.victim >= 0) return "clean";
  talk.wait_for_go();
  run.come_back();
  wrong = run.steps(program.calls, 100);
  return wrong.empty() ? "clean" : wrong;
}

}  // namespace xd::test
