#include "faults/resume_program.h"

#include <crossdock/view.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "conformance/batch.h"
#include "conformance/step.h"

namespace xd::test {
namespace {

constexpr int kBatchesAfterLoss = 4;

xd_view agree(const Rank& rank, int step) {
  xd_comm_agree_args args = XD_COMM_AGREE_ARGS_INIT;
  args.timeout_ms = Rank::kTimeoutMs;
  args.step = step;
  xd_view view = XD_VIEW_INIT;
  ok(xd_comm_agree(rank.comm, &args, &view));
  if (view.first_step != view.last_step) {
    throw std::runtime_error("steps differ: " + std::to_string(view.first_step) + " to " +
                             std::to_string(view.last_step));
  }
  return view;
}

// False where a member has been lost meanwhile.
bool enter(const Rank& rank, const std::vector<Resumed>& groups) {
  for (const Resumed& resumed : groups) {
    const xd_status status = xd_ep_group_enter_view(resumed.group.get(), rank.stream());
    if (status == XD_ERROR_PEER_LOST) return false;
    ok(status);
  }
  return true;
}

}  // namespace

int resume(const Rank& rank, std::vector<Resumed>& groups, int step) {
  testing::GTEST_FLAG(throw_on_failure) = true;
  xd_view view = agree(rank, step);
  while (!enter(rank, groups)) view = agree(rank, step);
  for (Resumed& resumed : groups) {
    resumed.c.gone = ~view.members[0] & ((std::uint64_t{1} << rank.num_ranks) - 1);
  }
  return rank.num_ranks - view.num_members;
}

void run_batches(const Rank& rank, const std::vector<Resumed>& groups, int first, int count) {
  for (int number = first; number < first + count; ++number) {
    for (const Resumed& resumed : groups) {
      Step(rank, resumed.c, resumed.group.get(), number).run_all();
    }
  }
}

std::string run_resuming(const RankProgram& program, Rank& rank, const Talk& talk) {
  testing::GTEST_FLAG(throw_on_failure) = true;
  std::vector<Resumed> groups;
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    Case c = case_of(program);
    c.layout = layout;
    c.placing = layout == XD_EP_EXPERT_MAJOR ? Placing::mixed : Placing::symmetric;
    c.capacity = layout == XD_EP_EXPERT_MAJOR ? Capacity::bound : Capacity::dropping;
    groups.push_back({c, make_group(rank.comm, c.config(rank.rank))});
  }
  talk.wait_for_go();
  std::string history;
  int left = kBatchesAfterLoss;  // batches behind the last loss
  bool has_just_entered = false;
  for (int number = 0, losses = 0; left > 0; ++number) {
    if (number == kBatchesBeforeLoss) talk.say("progress");
    std::size_t group = 0;
    try {
      for (; group < groups.size(); ++group) {
        Step(rank, groups[group].c, groups[group].group.get(), number).run_all();
        has_just_entered = false;
      }
      if (losses == program.losses) --left;
    } catch (const CallFailed& error) {
      if (error.status() != XD_ERROR_PEER_LOST) throw;
      xd_ep_status met XD_EP_STATUS_INIT;
      ok(xd_ep_last_error(&met));
      if (has_just_entered && met.operation == XD_EP_PREPARE) {
        --number;  // others may have met this loss on their way to the view
      } else {
        history += " " + std::to_string(number) + ":" + std::to_string(group) + ":" +
                   std::to_string(met.operation);
      }
      losses = resume(rank, groups, number);
      has_just_entered = true;
    }
  }
  return history;
}

}  // namespace xd::test
