// Waits of groups whose ranks are on several machines.
#include <crossdock/ep.h>
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <string>
#include <thread>

#include "conformance/batch.h"
#include "faults/gate.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr int kTimeoutMs = 1500;  // a rank that a busy machine holds up is not late
constexpr std::chrono::seconds kGenerous{20};

// The last rank, alone on its machine, stops while it moves rows. Its relay waits for its chunks,
// and the others of that machine wait for the relay, maybe longer: it is not late because of
// itself, and nobody says so.
TEST(RemoteWait, ForAGatewayThatWaitsForAnotherMachineNamesTheRankThere) {
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

// The last rank, on a machine of its own, waits for rank 0 in one group, and rank 0 for rank 1 in
// another; rank 1 does not come.
TEST(RemoteWait, ForARankThatWaitsItselfNamesTheOneForWhichAllWait) {
  if (!world().threads()) GTEST_SKIP() << "ranks meet in one process";
  std::latch timed_out(world().num_ranks() - 1);
  on_every_rank([&](Rank& rank) {
    const Case c = plain_case(rank.num_ranks);
    const Comm comm = rank.another_comm("chain", std::size_t{1} << 20, 2 * kTimeoutMs);
    Rank there = rank;
    there.comm = comm.get();
    const Group groups[] = {make_group(comm.get(), c.config(rank.rank)),
                            make_group(comm.get(), c.config(rank.rank))};
    Batch batch(there, c);
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank == 1) return timed_out.wait();
    const bool is_last = rank.rank == rank.num_ranks - 1;
    if (!is_last) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    EXPECT_EQ(batch.call(groups[is_last ? 0 : 1].get(), XD_EP_PREPARE), XD_ERROR_TIMEOUT);
    const xd_error_info info = comm_error(comm.get());
    EXPECT_EQ(info.peer, 1) << info.text;
    timed_out.count_down();
  });
}

// The same two waits between machines, each for the other: an operation and a host call.
TEST(RemoteWait, ForRanksInAnotherCallIsAMismatchOfBothAtOnce) {
  on_every_rank([&](Rank& rank) {
    const Case c = plain_case(rank.num_ranks);
    const Comm comm = rank.another_comm("step", std::size_t{1} << 20);
    Rank there = rank;
    there.comm = comm.get();
    const Group group = make_group(comm.get(), c.config(rank.rank));
    Batch batch(there, c);
    ok(xd_comm_barrier(rank.comm));
    const auto since = std::chrono::steady_clock::now();
    if (rank.rank == 0) {
      const Outcome outcome = batch.call(group.get(), XD_EP_PREPARE);
      EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
      EXPECT_TRUE(outcome.mentions("xd_comm_barrier")) << outcome.text;
    } else {
      EXPECT_EQ(xd_comm_barrier(comm.get()), XD_ERROR_MISMATCH);
      EXPECT_NE(std::string(xd_last_error()).find("xd_ep_prepare"), std::string::npos);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - since, kGenerous);
    EXPECT_EQ(comm_error(comm.get()).status, XD_SUCCESS);
    batch.prepare(group.get());
    ok(xd_comm_barrier(comm.get()));
  });
}

}  // namespace
}  // namespace xd::test
