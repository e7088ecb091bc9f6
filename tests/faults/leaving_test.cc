// Ranks that leave in good order are never reported as lost, even if others leave at the same
// moment.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "conformance/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

using std::chrono::milliseconds;

// Keeps one core of the machine busy: goodbyes overtake one another where threads have to wait.
class Load {
 public:
  Load() {
    if (!world().reports()) return;  // one process of the launch is enough
    thread_ = std::thread([this] {
      while (!over_.load()) {
      }
    });
  }
  ~Load() {
    over_ = true;
    if (thread_.joinable()) thread_.join();
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};

// Processes that look for one another on a busy machine take a while.
int rounds() {
  if (std::getenv("XD_TEST_FULL") != nullptr) return 150;
  return world().threads() ? 60 : 25;
}

TEST(Leaving, OfAllOthersAtOnceIsNoLossToTheOneThatStays) {
  const Load load;
  on_every_rank([](Rank& rank) {
    for (int round = 0; round < rounds(); ++round) {
      Comm comm = rank.another_comm("leaving" + std::to_string(round), 0);
      ok(xd_comm_barrier(comm.get()));
      if (rank.rank != 0) comm.reset();
      ok(xd_comm_barrier(rank.comm));  // all others have left, and have said all that they say
      if (rank.rank != 0) continue;
      std::this_thread::sleep_for(milliseconds(2));
      const xd_error_info info = comm_error(comm.get());
      EXPECT_EQ(info.status, XD_SUCCESS)
          << "round " << round << ", raised by rank " << info.rank << ": " << info.text;
    }
  });
}

// The last rank learns which rank has left when it needs one.
TEST(Leaving, IsNamedAsSuchWhereTheRankIsNeeded) {
  on_every_rank([](Rank& rank) {
    if (rank.num_ranks == 1) return;
    for (int round = 0; round < 10; ++round) {
      Comm comm = rank.another_comm("needed" + std::to_string(round), 0);
      ok(xd_comm_barrier(comm.get()));
      if (rank.rank != 0) comm.reset();
      ok(xd_comm_barrier(rank.comm));
      if (rank.rank != 0) continue;
      EXPECT_EQ(xd_comm_barrier(comm.get()), XD_ERROR_PEER_LOST);
      const std::string text = xd_last_error();
      EXPECT_NE(text.find("has left"), std::string::npos) << text;
      const xd_error_info info = comm_error(comm.get());
      EXPECT_EQ(info.status, XD_ERROR_PEER_LOST);
      EXPECT_NE(std::string(info.text).find("has left"), std::string::npos) << info.text;
    }
  });
}

// Half of the ranks leave while the others use the communicator: those end with 'has left', never
// with a loss.
TEST(Leaving, WhileOthersWaitIsNoLoss) {
  const Load load;
  on_every_rank([](Rank& rank) {
    for (int round = 0; round < rounds() / 4; ++round) {
      Comm comm = rank.another_comm("waiting" + std::to_string(round), 0);
      ok(xd_comm_barrier(comm.get()));
      if (rank.rank % 2 == 0) {
        const xd_status status = xd_comm_barrier(comm.get());
        const std::string text = xd_last_error();
        EXPECT_EQ(status, rank.num_ranks == 1 ? XD_SUCCESS : XD_ERROR_PEER_LOST) << text;
        EXPECT_TRUE(status == XD_SUCCESS || text.find("has left") != std::string::npos) << text;
      }
      comm.reset();
      ok(xd_comm_barrier(rank.comm));
    }
  });
}

// Each rank leaves when its own part of the last operation has ended. Others may be in it yet.
TEST(Leaving, AfterTheLastOperationIsNoLossToThoseWhoAreStillInIt) {
  const Load load;
  on_every_rank([](Rank& rank) {
    const Case c = plain_case(rank.num_ranks);
    for (int round = 0; round < rounds() / 2; ++round) {
      Comm comm = rank.another_comm("done" + std::to_string(round), std::size_t{1} << 20);
      Rank other = rank;
      other.comm = comm.get();
      Group group = make_group(comm.get(), c.config(rank.rank));
      Batch batch(other, c, 0, Place::ordinary);
      for (const xd_ep_operation operation : {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE}) {
        const Outcome outcome = batch.call(group.get(), operation);
        EXPECT_EQ(outcome, XD_SUCCESS) << "round " << round << ": " << outcome.text;
      }
      group.reset();
      comm.reset();
      ok(xd_comm_barrier(rank.comm));
    }
  });
}

// Makes its call, or says that it has made a mistake.
Outcome make_or_fail(const Rank& rank, xd_ep_group* group, Batch& batch, xd_ep_operation operation,
                     bool fails) {
  if (!fails) return batch.call(group, operation);
  return finish(rank, group, xd_ep_join_failed(group, operation, "on purpose", rank.stream()));
}

// Nothing moves in such an operation, and each rank says goodbye as soon as it knows that. The
// others know it as well, or are about to: it depends on what all have said before.
TEST(Leaving, AfterASetbackIsNoLossToThoseWhoAreStillInTheOperation) {
  const Load load;
  on_every_rank([](Rank& rank) {
    const Case c = plain_case(rank.num_ranks);
    for (int round = 0; round < rounds() / 2; ++round) {
      Comm comm = rank.another_comm("setback" + std::to_string(round), std::size_t{1} << 20);
      Rank other = rank;
      other.comm = comm.get();
      const Group group = make_group(comm.get(), c.config(rank.rank));
      Batch batch(other, c, 0, Place::ordinary);
      batch.prepare(group.get());
      const xd_ep_operation last = round % 2 == 0 ? XD_EP_DISPATCH : XD_EP_PREPARE;
      const bool fails = round / 2 % rank.num_ranks == rank.rank;
      const Outcome outcome = make_or_fail(other, group.get(), batch, last, fails);
      EXPECT_EQ(outcome.status, fails ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH)
          << "round " << round << ": " << outcome.text;
      comm.reset();  // the goodbye; the group goes later
      ok(xd_comm_barrier(rank.comm));
    }
  });
}

}  // namespace
}  // namespace xd::test
