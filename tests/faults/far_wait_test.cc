// Waits of groups whose ranks are on several machines.
#include <crossdock/ep.h>
#include <gtest/gtest.h>

#include <chrono>
#include <latch>

#include "conformance/batch.h"
#include "faults/gate.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr int kTimeoutMs = 600;
constexpr std::chrono::seconds kGenerous{20};

// The last rank, alone on its machine, stops while it moves rows. Its gateway waits for its chunks,
// and the others of that machine wait for the gateway, maybe longer: it is not late because of
// itself, and nobody says so.
TEST(FarWait, ForAGatewayThatWaitsForAnotherMachineNamesTheRankThere) {
  if (!world().threads()) GTEST_SKIP() << "the gate is for threads of one process";
  Gate gate(1 << 20);
  std::latch timed_out(world().num_ranks() - 1);
  on_every_rank([&](Rank& rank) {
    const Case c = plain_case(rank.num_ranks);
    const Comm comm = rank.another_comm("waits", std::size_t{1} << 20, kTimeoutMs);
    Rank there = rank;
    there.comm = comm.get();
    const Group group = make_group(comm.get(), c.config(rank.rank));
    Batch batch(there, c);
    batch.prepare(group.get());
    ok(xd_comm_barrier(rank.comm));  // the clocks of the next waits start together
    const int last = rank.num_ranks - 1;
    DLTensor held = *batch.dispatch_args.tokens;
    if (rank.rank == last) {
      held.data = gate.data();
      held.byte_offset = 0;
      batch.dispatch_args.tokens = &held;
      gate.close();
    }
    const Outcome outcome = batch.call(group.get(), XD_EP_DISPATCH);
    EXPECT_EQ(outcome, XD_ERROR_TIMEOUT);
    const xd_error_info info = comm_error(comm.get());
    EXPECT_EQ(info.peer, last) << info.text;
    if (rank.rank == last) return;
    EXPECT_TRUE(gate.wait_for_thread(kGenerous));
    timed_out.arrive_and_wait();
    gate.open();
  });
}

}  // namespace
}  // namespace xd::test
