// Views from the caller's side: the view that all ranks get, ranks that leave, bad arguments. Ranks
// that die, are late or come back are in tests/faults.
#include <crossdock/view.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "conformance/said.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

xd_comm_agree_args args_of(std::int64_t step) {
  xd_comm_agree_args args = XD_COMM_AGREE_ARGS_INIT;
  args.step = step;
  args.timeout_ms = Rank::kTimeoutMs;
  return args;
}

Comm masking(const Rank& rank, const std::string& name) {
  return rank.another_comm(name, 0, Rank::kTimeoutMs, XD_COMM_PEER_LOSS_MASK);
}

void expect_members(const xd_view& view, int num_ranks, int without = -1) {
  EXPECT_EQ(view.num_members, num_ranks - (without >= 0 ? 1 : 0));
  for (int r = 0; r < XD_VIEW_WORDS * 64; ++r) {
    const bool is_member = (view.members[r / 64] >> (r % 64) & 1) != 0;
    EXPECT_EQ(is_member, r < num_ranks && r != without) << "rank " << r;
  }
}

TEST(View, OfCreationHasAllRanks) {
  on_every_rank([](Rank& rank) {
    xd_view view = XD_VIEW_INIT;
    ok(xd_comm_get_view(rank.comm, &view));
    EXPECT_EQ(view.number, 0U);
    EXPECT_EQ(view.all_ok, 1);
    expect_members(view, rank.num_ranks);
  });
}

TEST(View, IsTheSameOnAllRanksWithTheirStepsAndWhetherAllAreOk) {
  on_every_rank([](Rank& rank) {
    const Comm comm = masking(rank, "agreeing");
    for (int i = 1; i <= 50; ++i) {
      const int dissenter = i % (rank.num_ranks + 1);  // none where it is no rank
      xd_comm_agree_args args = args_of(1000 * i + 7 * rank.rank);
      args.ok = rank.rank != dissenter;
      xd_view view = XD_VIEW_INIT, known = XD_VIEW_INIT;
      ok(xd_comm_agree(comm.get(), &args, &view));
      EXPECT_EQ(view.number, static_cast<std::uint64_t>(i));
      EXPECT_EQ(view.all_ok, dissenter == rank.num_ranks);
      EXPECT_EQ(view.first_step, 1000 * i);
      EXPECT_EQ(view.last_step, 1000 * i + 7 * (rank.num_ranks - 1));
      expect_members(view, rank.num_ranks);
      ok(xd_comm_get_view(comm.get(), &known));
      EXPECT_EQ(known.number, view.number);
    }
  });
}

TEST(View, IsWithoutARankThatLeavesOrIsNamedByAnother) {
  on_every_rank([](Rank& rank) {
    if (rank.num_ranks < 2) return;
    const Comm comm = masking(rank, "leaving");
    const int last = rank.num_ranks - 1;
    const std::uint64_t set[XD_VIEW_WORDS] = {std::uint64_t{1} << last};
    for (const bool leaves : {true, false}) {
      xd_comm_agree_args args = args_of(rank.rank);
      args.leave = leaves && rank.rank == last ? 1 : 0;
      if (!leaves && rank.rank == 0) args.leave_out = set;
      xd_view view = XD_VIEW_INIT;
      const xd_status status = xd_comm_agree(comm.get(), &args, &view);
      if (leaves || rank.rank != last) {
        ok(status);
        expect_members(view, rank.num_ranks, last);
        EXPECT_EQ(view.gone[0], set[0]);
        // A rank that leaves may hear of a later view of the others.
        EXPECT_TRUE(rank.rank == last || view.last_step == last - 1) << view.last_step;
      } else {
        EXPECT_EQ(status, XD_ERROR_PEER_LOST);
        expect_words(xd_last_error(), {"the others have gone on without rank"});
      }
      EXPECT_EQ(comm_error(comm.get()).status, XD_SUCCESS);
      // A guest that the others wait for by a second call, as one is taken in that has voted.
      for (bool is_in = false; !is_in;) {
        args = args_of(0);
        args.timeout_ms = 1000;
        view = XD_VIEW_INIT;
        static_cast<void>(xd_comm_agree(comm.get(), &args, &view));
        is_in = view.num_members == rank.num_ranks;
      }
      expect_members(view, rank.num_ranks);
    }
  });
}

TEST(View, ASecondThreadOfARankIsRefused) {
  on_every_rank([](Rank& rank) {
    const Comm comm = masking(rank, "busy");
    if (rank.rank == 0) {
      std::atomic<int> busy = 0;
      const auto agree = [&] {
        const xd_comm_agree_args args = args_of(0);
        const xd_status status = xd_comm_agree(comm.get(), &args, nullptr);
        if (status == XD_ERROR_BUSY) {
          ++busy;
        } else {
          EXPECT_EQ(status, XD_SUCCESS) << xd_last_error();
        }
      };
      std::thread first(agree), second(agree);
      while (rank.num_ranks > 1 && busy == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      ok(xd_comm_barrier(rank.comm));
      first.join();
      second.join();
    } else {
      ok(xd_comm_barrier(rank.comm));
      const xd_comm_agree_args args = args_of(0);
      ok(xd_comm_agree(comm.get(), &args, nullptr));
    }
  });
}

TEST(View, RefusesBadArguments) {
  on_every_rank([](Rank& rank) {
    const auto expect = [](xd_comm* comm, const xd_comm_agree_args& args, const char* words) {
      EXPECT_EQ(xd_comm_agree(comm, &args, nullptr), XD_ERROR_INVALID_ARGUMENT) << words;
      expect_words(xd_last_error(), {"xd_comm_agree: ", words});
    };
    expect(rank.comm, args_of(0), "on_peer_loss = FATAL, expected MASK");
    const Comm comm = masking(rank, "arguments");
    xd_comm_agree_args args = args_of(0);
    args.ok = 2;
    expect(comm.get(), args, "args.ok = 2, expected 0 or 1");
    args = args_of(0);
    args.leave = -1;
    expect(comm.get(), args, "args.leave = -1, expected 0 or 1");
    args = args_of(0);
    args.timeout_ms = -1;
    expect(comm.get(), args, "args.timeout_ms = -1, expected at least 0");
    std::uint64_t set[XD_VIEW_WORDS] = {std::uint64_t{1} << rank.rank};
    args = args_of(0);
    args.leave_out = set;
    expect(comm.get(), args, "args.leave_out has this rank itself");
    set[0] = 0;
    set[XD_VIEW_WORDS - 1] = 2;
    expect(comm.get(), args, "args.leave_out has rank 961, expected ranks 0 to ");
    EXPECT_EQ(xd_comm_agree(nullptr, &args, nullptr), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_comm_agree(comm.get(), nullptr, nullptr), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_comm_get_view(comm.get(), nullptr), XD_ERROR_INVALID_ARGUMENT);
    // None of them has voted.
    args = args_of(5);
    xd_view view = XD_VIEW_INIT;
    ok(xd_comm_agree(comm.get(), &args, &view));
    EXPECT_EQ(view.number, 1U);
    EXPECT_EQ(view.first_step, 5);
  });
}

}  // namespace
}  // namespace xd::test
