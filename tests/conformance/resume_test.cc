// Groups that outlive the loss of ranks, from the caller's side: a rank leaves, and the others go
// on with every element right. Ranks that die are in tests/faults.
#include <crossdock/view.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/case.h"
#include "conformance/said.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

class Resume : public testing::Test {
 protected:
  void SetUp() override {
    if (is_on_devices()) GTEST_SKIP() << "groups on CUDA devices outlive no losses so far";
  }
  static bool is_on_devices() { return world().memory().device().device_type == kDLCUDA; }
};

constexpr std::size_t kHeap = std::size_t{24} << 20;

// Cases of the grid, every so many one, with all layouts, places, overflows, parts and tables.
std::vector<Case> some_cases(int num_ranks) {
  std::vector<Case> some;
  const auto take = [&](const std::vector<Case>& all, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) some.push_back(all[i * all.size() / count]);
  };
  const std::vector<Case> all = all_cases(num_ranks);
  take(all, 16);
  take(cases_in_parts(num_ranks), 3);
  take(cases_with_tables(all), 3);
  for (Case& c : some) c.resumes = true;
  return some;
}

xd_status agree(const Comm& comm, bool leaves = false) {
  xd_comm_agree_args args = XD_COMM_AGREE_ARGS_INIT;
  args.timeout_ms = Rank::kTimeoutMs;
  args.leave = leaves ? 1 : 0;
  return xd_comm_agree(comm.get(), &args, nullptr);
}

// The calling thread's last call, the first that failed in the group, has returned an error of the
// group that is about this rank.
void expect_counted(xd_ep_group* group, xd_status status, int about) {
  xd_ep_status met XD_EP_STATUS_INIT;
  ok(xd_ep_last_error(&met));
  EXPECT_EQ(met.status, status);
  EXPECT_EQ(met.operation, XD_EP_ENTER_VIEW);
  EXPECT_EQ(met.rank, about);
  const volatile std::uint64_t* errors = nullptr;
  ok(xd_ep_group_watch(group, &errors));
  EXPECT_EQ(*errors, 1U);
}

// One communicator and a group for each case.
class Resuming {
 public:
  Resuming(const Rank& rank, const std::string& name)
      : comm_(rank.another_comm(name, kHeap, Rank::kTimeoutMs, XD_COMM_PEER_LOSS_MASK)),
        rank_(rank),
        cases_(some_cases(rank.num_ranks)) {
    rank_.comm = comm_.get();
    for (const Case& c : cases_) groups_.push_back(make_group(comm_.get(), c.config(rank.rank)));
  }

  const Comm& comm() const { return comm_; }
  std::vector<Group>& groups() { return groups_; }
  // One batch through each group.
  void step(int number) {
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      SCOPED_TRACE("rank " + std::to_string(rank_.rank) + ", " + cases_[i].description());
      Step step(rank_, cases_[i], groups_[i].get(), number);
      step.set_table();
      step.run_all();
    }
  }
  void enter_view(int gone) {
    for (const Group& group : groups_) ok(xd_ep_group_enter_view(group.get(), rank_.stream()));
    for (Case& c : cases_) c.gone |= std::uint64_t{1} << gone;
  }
  // Says goodbye, with no vote.
  void leave() {
    groups_.clear();
    comm_.reset();
  }

 private:
  Comm comm_;
  Rank rank_;
  std::vector<Case> cases_;
  std::vector<Group> groups_;
};

TEST_F(Resume, GoesOnWithoutRanksThatLeaveByTheirVote) {
  on_every_rank([](Rank& rank) {
    Resuming run(rank, "by vote");
    run.step(0);
    // The last one leaves, then the first, until one is left.
    for (int left = rank.num_ranks; left > std::max(1, rank.num_ranks - 2); --left) {
      const int gone = left == rank.num_ranks ? rank.num_ranks - 1 : 0;
      ok(agree(run.comm(), rank.rank == gone));
      if (rank.rank == gone) return run.leave();
      run.enter_view(gone);
      run.step(1);
    }
  });
}

// A member leaves between its groups: all have entered the same ones of them, and go on from there
// to the next view.
TEST_F(Resume, MeetsAFurtherLossBetweenGroupsOnTheWayToAView) {
  on_every_rank([](Rank& rank) {
    if (rank.num_ranks < 3) return;
    Resuming run(rank, "on the way");
    const int first = rank.num_ranks - 1, second = 0;
    ok(agree(run.comm(), rank.rank == first));
    if (rank.rank == first) return run.leave();
    const std::size_t half = run.groups().size() / 2;
    for (std::size_t i = 0; i < run.groups().size(); ++i) {
      if (rank.rank == second && i == half) return run.leave();
      EXPECT_EQ(xd_ep_group_enter_view(run.groups()[i].get(), rank.stream()),
                i < half ? XD_SUCCESS : XD_ERROR_PEER_LOST)
          << "group " << i;
    }
    EXPECT_EQ(comm_error(run.comm().get()).status, XD_SUCCESS);
    ok(agree(run.comm()));
    run.enter_view(first);
    run.enter_view(second);
    run.step(0);
  });
}

// Each operation in its parts is cut off behind the first one.
TEST_F(Resume, BeginsPartsAnew) {
  on_every_rank([](Rank& rank) {
    const int last = rank.num_ranks - 1;
    const Comm comm = rank.another_comm("parts", kHeap, Rank::kTimeoutMs, XD_COMM_PEER_LOSS_MASK);
    Rank mine = rank;
    mine.comm = comm.get();
    Case c = plain_case(rank.num_ranks);
    c.resumes = true;
    c.local_experts = c.parts = 3;
    std::vector<Group> groups;
    std::deque<Batch> batches;
    constexpr std::array kOperations{XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_COMBINE_BWD,
                                     XD_EP_DISPATCH_BWD};
    const auto call_part = [&](std::size_t i, int part) {
      Batch& batch = batches[i];
      batch.dispatch_args.part = batch.combine_args.part = part;
      batch.dispatch_bwd_args.part = batch.combine_bwd_args.part = part;
      return batch.call(groups[i].get(), kOperations[i]);
    };
    for (std::size_t i = 0; i < kOperations.size(); ++i) {
      groups.push_back(make_group(comm.get(), c.config(rank.rank)));
      batches.emplace_back(mine, c);
      batches[i].prepare_args.parts = c.parts;
      batches[i].prepare(groups[i].get());
      ok(call_part(i, 1));
    }
    // Also where nobody is lost.
    ok(agree(comm));
    for (std::size_t i = 0; i < groups.size(); ++i) {
      ok(xd_ep_group_enter_view(groups[i].get(), mine.stream()));
      const Outcome outcome = call_part(i, 2);
      EXPECT_EQ(outcome.status, XD_ERROR_INVALID_ARGUMENT) << outcome.text;
      expect_words(outcome.text, {"part"});
      ok(call_part(i, 1));
    }
    if (rank.num_ranks < 2 || rank.rank == last) return;  // a communicator goes
    for (std::size_t i = 0; i < groups.size(); ++i) {
      EXPECT_EQ(call_part(i, 2).status, XD_ERROR_PEER_LOST);
    }
    ok(agree(comm));
    c.gone = std::uint64_t{1} << last;
    for (const Group& group : groups) {
      ok(xd_ep_group_enter_view(group.get(), mine.stream()));
      Step(mine, c, group.get(), 0).run_all();
    }
  });
}

TEST_F(Resume, EndsOperationsOfARankThatHasLeftWithItsLossUntilAViewIsEntered) {
  on_every_rank([](Rank& rank) {
    if (rank.num_ranks < 2) return;
    const int last = rank.num_ranks - 1;
    const Comm comm = rank.another_comm("no vote", kHeap, Rank::kTimeoutMs, XD_COMM_PEER_LOSS_MASK);
    Rank mine = rank;
    mine.comm = comm.get();
    Case c = plain_case(rank.num_ranks);
    c.resumes = true;
    Group group = make_group(comm.get(), c.config(rank.rank));
    Batch batch(mine, c);
    batch.prepare(group.get());
    if (rank.rank == last) return;                            // its communicator goes
    const std::string lost = "rank " + std::to_string(last);  // and its host, where it has a name
    for (int i = 0; i < 2; ++i) {
      for (const xd_ep_operation operation : {XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_PREPARE}) {
        const Outcome outcome = batch.call(group.get(), operation);
        EXPECT_EQ(outcome.status, XD_ERROR_PEER_LOST) << outcome.text;
        expect_words(outcome.text, {lost, " has left"});
        EXPECT_EQ(outcome.met.rank, last);
        EXPECT_EQ(outcome.met.operation, operation);
        EXPECT_EQ(outcome.met.epoch, 2U);  // the one that was broken
      }
      EXPECT_EQ(xd_ep_join_failed(group.get(), XD_EP_DISPATCH, "a mistake", mine.stream()),
                XD_ERROR_PEER_LOST);
      // View 0 has the rank still.
      EXPECT_EQ(xd_ep_group_enter_view(group.get(), mine.stream()), XD_ERROR_PEER_LOST);
      expect_said(lost);
    }
    EXPECT_EQ(comm_error(comm.get()).status, XD_SUCCESS);
    ok(agree(comm));
    for (int i = 0; i < 2; ++i) ok(xd_ep_group_enter_view(group.get(), mine.stream()));
    // Its plan is of rows of a rank that is gone.
    const Outcome old = batch.call(group.get(), XD_EP_DISPATCH);
    EXPECT_EQ(old.status, XD_ERROR_INVALID_ARGUMENT);
    expect_words(old.text, {"plan: ", "other ranks than have entered this group's view"});
    c.gone = std::uint64_t{1} << last;
    for (int number = 0; number < 3; ++number) Step(mine, c, group.get(), number).run_all();
  });
}

TEST_F(Resume, InAViewOfAllRanksChangesNothing) {
  on_every_rank([](Rank& rank) {
    const Comm comm = rank.another_comm("nobody", kHeap, Rank::kTimeoutMs, XD_COMM_PEER_LOSS_MASK);
    Rank mine = rank;
    mine.comm = comm.get();
    Case c = plain_case(rank.num_ranks);
    c.resumes = true;
    Group group = make_group(comm.get(), c.config(rank.rank));
    Batch batch(mine, c);
    batch.prepare(group.get());
    ok(xd_ep_group_enter_view(group.get(), mine.stream()));
    ok(agree(comm));
    ok(xd_ep_group_enter_view(group.get(), mine.stream()));
    ok(batch.call(group.get(), XD_EP_DISPATCH));
    Step(mine, c, group.get(), 0).run_all();
  });
}

TEST_F(Resume, TellsARankThatHasLeftTheViewThatTheOthersHaveGoneOn) {
  on_every_rank([](Rank& rank) {
    if (rank.num_ranks < 2) return;
    const int last = rank.num_ranks - 1;
    const Comm comm = rank.another_comm("leaves", kHeap, Rank::kTimeoutMs, XD_COMM_PEER_LOSS_MASK);
    Case c = plain_case(rank.num_ranks);
    c.resumes = true;
    const Group group = make_group(comm.get(), c.config(rank.rank));
    ok(agree(comm, rank.rank == last));
    const xd_status status = xd_ep_group_enter_view(group.get(), rank.stream());
    if (rank.rank != last) return ok(status);
    EXPECT_EQ(status, XD_ERROR_PEER_LOST);
    expect_said("the others have gone on without rank " + std::to_string(last));
    expect_counted(group.get(), XD_ERROR_PEER_LOST, last);
  });
}

TEST_F(Resume, IsRefusedWhereItCannotBe) {
  on_every_rank([](Rank& rank) {
    const Case plain = plain_case(rank.num_ranks);
    const Group fixed = make_group(rank.comm, plain.config(rank.rank));
    EXPECT_EQ(xd_ep_group_enter_view(fixed.get(), rank.stream()), XD_ERROR_INVALID_ARGUMENT);
    expect_said("on_peer_loss = XD_EP_PEER_LOSS_FATAL, expected XD_EP_PEER_LOSS_RESUME");
    expect_counted(fixed.get(), XD_ERROR_INVALID_ARGUMENT, rank.rank);
    EXPECT_EQ(xd_ep_group_enter_view(nullptr, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
    xd_ep_config config = plain.config(rank.rank);
    xd_ep_group* made = nullptr;
    config.on_peer_loss = XD_EP_PEER_LOSS_RESUME;
    EXPECT_EQ(xd_ep_group_create(rank.comm, &config, &made), XD_ERROR_INVALID_ARGUMENT);
    expect_said("the communicator has on_peer_loss = FATAL, expected MASK");
    const Comm comm = rank.another_comm("differs", kHeap, Rank::kTimeoutMs, XD_COMM_PEER_LOSS_MASK);
    if (rank.rank == 0) config.on_peer_loss = XD_EP_PEER_LOSS_FATAL;
    const xd_status status = xd_ep_group_create(comm.get(), &config, &made);
    EXPECT_EQ(status, rank.num_ranks == 1 ? XD_SUCCESS : XD_ERROR_MISMATCH);
    if (status == XD_SUCCESS) return ok(xd_ep_group_destroy(made));
    expect_said("config.on_peer_loss = FATAL on rank 0 and RESUME on rank 1");
  });
}

}  // namespace
}  // namespace xd::test
