// Low latency between machines, which XD_NET_TEST=apart makes of declared hosts: what is refused
// there, and when ranks may go. That every byte is right there is shown by the other tests of
// low-latency groups, which run there unchanged.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <string>
#include <thread>

#include "conformance/has_wires.h"
#include "conformance/slots/batch.h"
#include "conformance/slots/echo.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

class LlMachines : public testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("XD_NET_TEST") == nullptr) GTEST_SKIP() << "all ranks are on one machine";
  }
};

TEST_F(LlMachines, GroupsThatMaskAreRefusedOnDevices) {
  if (world().memory().device().device_type == kDLCPU)
    GTEST_SKIP() << "on the CPU they work: see mask_test.cc";
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const std::vector<std::int32_t> owners = c.owners();
    xd_ll_config config = c.config(owners);
    config.on_peer_loss = XD_LL_PEER_LOSS_MASK;
    xd_ll_group* group = nullptr;
    EXPECT_EQ(xd_ll_group_create(rank.comm, &config, &group), XD_ERROR_UNSUPPORTED);
    EXPECT_EQ(group, nullptr);
    const std::string text = xd_last_error();
    EXPECT_NE(text.find("XD_LL_PEER_LOSS_MASK on GPUs is not there yet between machines"),
              std::string::npos)
        << text;
    const LlGroup works = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    batch.dispatch(works.get());
    batch.combine(works.get());
  });
}

// Between two operations a rank may do anything for as long as it likes: here it waits for others
// in a call that does not look at the group's network.
TEST_F(LlMachines, ARankThatHasEndedAnOperationIsNeededNoMore) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    for (int number = 0; number < 20; ++number) {
      LlBatch batch(rank, c, number);
      batch.dispatch(group.get());
      ok(xd_comm_barrier(rank.comm));
      batch.combine(group.get());
      ok(xd_comm_barrier(rank.comm));
    }
  });
}

// A goodbye takes another way than rows, and may overtake them; and peers give credits for the last
// operation to ranks that have gone.
TEST_F(LlMachines, ARankMayGoAtOnceBehindItsLastOperation) {
  const LlCase c = echo_case(world().num_ranks());
  const std::vector<bool> none(static_cast<std::size_t>(c.num_ranks));
  on_every_rank([&](Rank& rank) {
    for (int round = 0; round < 6; ++round) {
      Rank there = rank;
      const Comm comm = rank.another_comm("round" + std::to_string(round), std::size_t{1} << 20);
      there.comm = comm.get();
      const LlGroup group = make_group(there, c, {});
      Echo batch(there, c, round);
      ok(finish(there, group.get(), batch.dispatch(group.get())));
      ok(finish(there, group.get(), batch.combine(group.get(), XD_LL_PHASE_SEND)));
      if (rank.rank == round % rank.num_ranks)
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ok(finish(there, group.get(), batch.combine(group.get(), XD_LL_PHASE_RECEIVE)));
      EXPECT_EQ(batch.wrong(none), "");
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

// The peers' messages come when the rank whose call has failed has gone on already.
TEST_F(LlMachines, ARankMayGoAtOnceBehindAnOperationThatHasFailed) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    for (int round = 0; round < 6; ++round) {
      const int guilty = round % rank.num_ranks;
      const LlGroup group = make_group(rank, c);
      LlBatch batch(rank, c, round);
      batch.dispatch(group.get());
      if (rank.rank == guilty) {
        EXPECT_EQ(xd_ll_join_failed(group.get(), XD_LL_COMBINE, "no", rank.stream()),
                  XD_ERROR_INVALID_ARGUMENT);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        EXPECT_EQ(batch.call(group.get(), XD_LL_COMBINE), XD_ERROR_MISMATCH);
      }
    }
    EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS) << comm_error(rank.comm).text;
  });
}

// A failure may reach peers that are still in the operation before, long before they send their own
// part, which is large; the failed rank then does nothing that would take it in.
TEST_F(LlMachines, ARankWhoseCallHasFailedEarlyIsNeededNoMore) {
  LlCase c = echo_case(world().num_ranks());
  c.max_tokens = 512;
  c.row_units = 1024;  // messages of up to 8 MiB
  on_every_rank([&](Rank& rank) {
    for (const bool bad_receive : {false, true}) {
      const LlGroup group = make_group(rank, c, {});
      Echo batch(rank, c, 0);
      if (rank.rank == 0) {
        ok(finish(rank, group.get(), batch.dispatch(group.get(), XD_LL_PHASE_SEND)));
        EXPECT_EQ(xd_ll_combine(group.get(), nullptr, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
        ok(finish(rank, group.get(), batch.dispatch(group.get(), XD_LL_PHASE_RECEIVE)));
      } else {
        ok(finish(rank, group.get(), batch.dispatch(group.get())));
        ok(finish(rank, group.get(), batch.combine(group.get(), XD_LL_PHASE_SEND)));
        if (bad_receive) {  // it does not look at what has come
          xd_ll_combine_args args = XD_LL_COMBINE_ARGS_INIT;
          args.phase = XD_LL_PHASE_RECEIVE;
          EXPECT_EQ(xd_ll_combine(group.get(), &args, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
        } else {
          EXPECT_EQ(finish(rank, group.get(), batch.combine(group.get(), XD_LL_PHASE_RECEIVE)),
                    XD_ERROR_MISMATCH);
        }
      }
      ok(xd_comm_barrier(rank.comm));
      ok(finish(rank, group.get(), batch.dispatch(group.get())));
      ok(finish(rank, group.get(), batch.combine(group.get())));
      EXPECT_EQ(batch.wrong(std::vector<bool>(static_cast<std::size_t>(c.num_ranks))), "");
    }
  });
}

// None of them may cross: peers have no room for more than the plan says, and wait for no less.
TEST_F(LlMachines, WeightsOfAnotherShapeThanThePlansAreAMistakeOfOneOperation) {
  LlCase c = echo_case(world().num_ranks());
  c.tokens = Tokens::full;
  const std::int64_t tokens = c.max_tokens;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c, {});
    int number = 0;
    for (const std::int64_t rows : {tokens - 1, tokens + 1, 100 * tokens, tokens}) {
      Echo batch(rank, c, number++);
      const std::int64_t columns = rows == tokens ? c.topk - 1 : c.topk;
      Tensor weights(rank, kF32, {rows, columns});
      weights.write(std::vector<float>(static_cast<std::size_t>(rows * columns), 1.0f));
      batch.weigh_in_combine();
      if (rank.rank == 0) batch.weigh_in_combine(weights.dl());
      ok(finish(rank, group.get(), batch.dispatch(group.get())));
      EXPECT_EQ(finish(rank, group.get(), batch.combine(group.get())),
                rank.rank == 0 ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH)
          << rows << " rows, " << columns << " columns";
      batch.weigh_in_combine();
      ok(finish(rank, group.get(), batch.dispatch(group.get())));
      ok(finish(rank, group.get(), batch.combine(group.get())));
      EXPECT_EQ(batch.wrong(std::vector<bool>(static_cast<std::size_t>(c.num_ranks))), "");
    }
    EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS) << comm_error(rank.comm).text;
  });
}

// Connections that are closed while megabytes arrive have ended processes.
TEST_F(LlMachines, GroupsMayGoAfterATimeoutWithALongMessageUnderWay) {
  LlCase c = echo_case(world().num_ranks());
  c.max_tokens = 512;
  c.row_units = 1024;  // messages of up to 8 MiB
  constexpr int kTimeoutMs = 1000;
  on_every_rank([&](Rank& rank) {
    Rank there = rank;
    const Comm comm = rank.another_comm("timeout", std::size_t{1} << 20);
    there.comm = comm.get();
    // Of operations alone: on a busy machine it may take longer to make the group.
    LlGroup group = make_group(there, c, {XD_LL_PEER_LOSS_FATAL, kTimeoutMs});
    Echo batch(there, c, 0);
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank == 0) {
      ok(batch.dispatch(group.get(), XD_LL_PHASE_SEND));
    } else {
      // Whose message is whole has no reason to wait.
      const xd_status status = finish(there, group.get(), batch.dispatch(group.get())).status;
      EXPECT_TRUE(status == XD_ERROR_TIMEOUT || status == XD_SUCCESS) << xd_last_error();
    }
    ok(xd_comm_barrier(rank.comm));
    group.reset();
    ok(xd_comm_barrier(rank.comm));
  });
}

// A rank sends each token's sum straight to its source: codes in the place of a row of bfloat16.
TEST_F(LlMachines, SumsUnderAWireHaveHalfTheBytes) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  LlCase c = plain_ll_case(world().num_ranks());
  c.row_units = 512;  // 4096 columns, beside which headers are few
  c.tokens = Tokens::full;
  c.wire = XD_EP_WIRE_FP8_BLOCK128;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    batch.dispatch(group.get());
    const auto bytes_under = [&](xd_ep_wire wire) {
      ok(xd_comm_barrier(rank.comm));
      xd_stats before = XD_STATS_INIT, after = XD_STATS_INIT;
      ok(xd_ll_group_stats(group.get(), &before, nullptr));
      batch.combine_args.wire = wire;
      ok(batch.call(group.get(), XD_LL_COMBINE));
      ok(xd_ll_group_stats(group.get(), &after, nullptr));
      return static_cast<double>(after.net_bytes - before.net_bytes);
    };
    const double same = bytes_under(XD_EP_WIRE_SAME), coded = bytes_under(c.wire);
    ASSERT_GT(same, 8192);
    EXPECT_LT(coded, 0.56 * same);
    EXPECT_GT(coded, 0.45 * same);
  });
}

}  // namespace
}  // namespace xd::test
