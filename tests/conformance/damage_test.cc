// Chunks that are damaged on their way between machines: any outcome is an outcome, but none is a
// write outside a tensor, and what cannot be is an error that names the rank that it came from. Run
// it also under AddressSanitizer. XD_NET_TEST says how many are damaged.
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "conformance/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr xd_ep_operation kSteps[] = {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE,
                                      XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD};

// A number of chunks that was damaged is waited for in vain. Communicators on devices take longer
// to make.
int timeout_ms(const Rank& rank) { return rank.asynchronous() ? 4000 : 500; }

// Both layouts, ranks that have room for all rows and that drop some, rows without and with scales.
Case case_of(int run, int num_ranks) {
  Case c = plain_case(num_ranks);
  c.layout = run % 2 == 0 ? XD_EP_EXPERT_MAJOR : XD_EP_RANK_MAJOR;
  if (run / 2 % 2 == 1) c.capacity = Capacity::dropping;
  if (run / 4 % 2 == 1) c.cargo = Cargo::e4m3_with_floats;
  return c;
}

// Goes through steps until one of them fails for good.
Outcome outcome_of_steps(const Rank& rank, const Case& c) {
  const Group group = make_group(rank.comm, c.config(rank.rank));
  Batch batch(rank, c, 0, Place::ordinary);
  Outcome last{};
  for (int round = 0; round < 20; ++round) {
    for (const xd_ep_operation operation : kSteps) {
      const Outcome outcome = batch.call(group.get(), operation);
      EXPECT_TRUE(batch.guards_intact()) << outcome.text;
      if (outcome.status == XD_SUCCESS) continue;
      last = outcome;
      xd_error_info info XD_ERROR_INFO_INIT;
      if (xd_comm_error(rank.comm, &info) == XD_SUCCESS && info.status != XD_SUCCESS) return last;
      break;  // an operation error: the next prepare makes another plan
    }
  }
  return last;
}

TEST(Damage, IsAnErrorThatNamesItsSenderAndNeverAWriteElsewhere) {
  std::atomic<int> named{0};
  on_every_rank([&](Rank& rank) {
    for (int run = 0; run < 12; ++run) {
      Rank other = rank;
      const Comm comm = rank.another_comm("run" + std::to_string(run), 1 << 20, timeout_ms(rank));
      other.comm = comm.get();
      const Outcome outcome = outcome_of_steps(other, case_of(run, rank.num_ranks));
      if (outcome.status != XD_ERROR_INTERNAL) continue;
      const xd_error_info info = comm_error(comm.get());
      EXPECT_NE(info.peer, info.rank) << outcome.text;
      EXPECT_TRUE(outcome.mentions("rank " + std::to_string(info.peer))) << outcome.text;
      ++named;
    }
  });
  EXPECT_GT(named, 0) << "nothing was damaged so that it was noticed";
}

}  // namespace
}  // namespace xd::test
