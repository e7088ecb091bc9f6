// Ranks that leave in good order are never reported as lost, even if others leave at the same
// moment.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include "conformance/batch.h"
#include "conformance/said.h"
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

// Processes that look for one another on a busy machine take a while, and so do connections between
// machines.
int rounds() {
  if (std::getenv("XD_TEST_FULL") != nullptr) return 150;
  return world().threads() && std::getenv("XD_NET_TEST") == nullptr ? 50 : 20;
}

// In each round all ranks have another communicator, and meet in the one that they share when they
// have done `body` and left.
void in_rounds(int count, const std::function<void(const Rank&, Comm&, int)>& body) {
  static int names = 0;
  const std::string name = "leaving" + std::to_string(names++) + "-";
  on_every_rank([&](Rank& rank) {
    for (int round = 0; round < count; ++round) {
      Comm comm = rank.another_comm(name + std::to_string(round), std::size_t{1} << 20);
      ok(xd_comm_barrier(comm.get()));
      body(rank, comm, round);
      comm.reset();
      ok(xd_comm_barrier(rank.comm));
    }
  });
}

// All ranks but rank 0 leave, and have said all that they say. True on rank 0.
bool all_others_leave(const Rank& rank, Comm& comm) {
  if (rank.rank != 0) comm.reset();
  ok(xd_comm_barrier(rank.comm));
  return rank.rank == 0;
}

// The rank as a member of that communicator.
Rank member(const Rank& rank, const Comm& comm) {
  Rank other = rank;
  other.comm = comm.get();
  return other;
}

TEST(Leaving, OfAllOthersAtOnceIsNoLossToTheOneThatStays) {
  const Load load;
  in_rounds(rounds(), [](const Rank& rank, Comm& comm, int round) {
    if (!all_others_leave(rank, comm)) return;
    std::this_thread::sleep_for(milliseconds(2));
    const xd_error_info info = comm_error(comm.get());
    EXPECT_EQ(info.status, XD_SUCCESS)
        << "round " << round << ", raised by rank " << info.rank << ": " << info.text;
  });
}

// The last rank learns which rank has left when it needs one.
TEST(Leaving, IsNamedAsSuchWhereTheRankIsNeeded) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank needs no other";
  in_rounds(10, [](const Rank& rank, Comm& comm, int) {
    if (!all_others_leave(rank, comm)) return;
    EXPECT_EQ(xd_comm_barrier(comm.get()), XD_ERROR_PEER_LOST);
    const std::string text = xd_last_error();
    expect_words(text, {"has left"});
    const xd_error_info info = comm_error(comm.get());
    EXPECT_EQ(info.status, XD_ERROR_PEER_LOST);
    expect_words(info.text, {"has left"});
  });
}

// Half of the ranks leave while the others use the communicator: those end with 'has left', never
// with a loss.
TEST(Leaving, WhileOthersWaitIsNoLoss) {
  const Load load;
  in_rounds(rounds() / 4, [](const Rank& rank, Comm& comm, int) {
    if (rank.rank % 2 != 0) return;
    const xd_status status = xd_comm_barrier(comm.get());
    const std::string text = xd_last_error();
    EXPECT_EQ(status, rank.num_ranks == 1 ? XD_SUCCESS : XD_ERROR_PEER_LOST) << text;
    EXPECT_TRUE(status == XD_SUCCESS || text.find("has left") != std::string::npos) << text;
  });
}

// Each rank leaves when its own part of the last operation has ended. Others may be in it yet.
TEST(Leaving, AfterTheLastOperationIsNoLossToThoseWhoAreStillInIt) {
  const Load load;
  const Case c = plain_case(world().num_ranks());
  in_rounds(rounds() / 2, [&](const Rank& rank, Comm& comm, int round) {
    const Rank here = member(rank, comm);
    const Group group = make_group(comm.get(), c.config(rank.rank));
    Batch batch(here, c, 0, Place::ordinary);
    for (const xd_ep_operation operation : {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE}) {
      const Outcome outcome = batch.call(group.get(), operation);
      EXPECT_EQ(outcome, XD_SUCCESS) << "round " << round << ": " << outcome.text;
    }
  });
}

// Nothing moves in an operation in which a rank has made a mistake, and each rank says goodbye as
// soon as it knows that. The others know it as well, or are about to: it depends on what all have
// said before.
TEST(Leaving, AfterAnOperationErrorIsNoLossToThoseWhoAreStillInTheOperation) {
  const Load load;
  const Case c = plain_case(world().num_ranks());
  in_rounds(rounds() / 2, [&](const Rank& rank, Comm& comm, int round) {
    const Rank here = member(rank, comm);
    const Group group = make_group(comm.get(), c.config(rank.rank));
    Batch batch(here, c, 0, Place::ordinary);
    batch.prepare(group.get());
    const xd_ep_operation last = round % 2 == 0 ? XD_EP_DISPATCH : XD_EP_PREPARE;
    const bool fails = round / 2 % rank.num_ranks == rank.rank;
    const Outcome outcome =
        fails ? finish(here, group.get(),
                       xd_ep_join_failed(group.get(), last, "on purpose", here.stream()))
              : batch.call(group.get(), last);
    EXPECT_EQ(outcome.status, fails ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH)
        << "round " << round << ": " << outcome.text;
    comm.reset();  // the goodbye; the group goes later
  });
}

}  // namespace
}  // namespace xd::test
