// Groups whose errors finish the communicator.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "conformance/batch.h"
#include "conformance/said.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// The error that a rank must hear of when a mistake was made.
struct Verdict {
  xd_status status;
  std::string text;
  int peer;  // the lowest rank it is about
};

struct Mistake {
  const char* name;
  bool needs_peers;
  xd_ep_operation operation;
  // Makes the mistake in the call that follows, or in its place; returns what the call has.
  std::function<xd_status(const Rank&, Batch&, xd_ep_group*)> make;
  std::function<Verdict(const Rank&)> verdict;
};

xd_status prepare_with_bad_ids(const Rank& rank, Batch& batch, xd_ep_group* group) {
  std::vector<std::int64_t> ids = batch.routed().choices(rank.rank).ids;
  if (rank.rank == rank.num_ranks - 1) ids[0] = -7;
  batch.field(XD_EP_PREPARE, "topk_idx").tensor->write(ids);
  return batch.enqueue(group, XD_EP_PREPARE);
}

// A mistake of rank 0, as that rank and its peers see it.
Verdict fault_of_rank_0(const Rank& rank, const char* named) {
  if (rank.rank == 0) return {XD_ERROR_INVALID_ARGUMENT, named, 0};
  return {XD_ERROR_MISMATCH, "rank 0: its call failed with XD_ERROR_INVALID_ARGUMENT", 0};
}

const Mistake kMistakes[] = {
    {"BadIds", false, XD_EP_PREPARE, prepare_with_bad_ids,
     [](const Rank& rank) -> Verdict {
       return {XD_ERROR_INVALID_ARGUMENT, "topk_idx: 1 expert ids", rank.num_ranks - 1};
     }},
    {"Overflow", false, XD_EP_PREPARE,
     [](const Rank&, Batch& batch, xd_ep_group* group) {
       return batch.enqueue(group, XD_EP_PREPARE);
     },
     [](const Rank&) -> Verdict {
       return {XD_ERROR_OVERFLOW, "rows, expected at most its recv_capacity = 4", 0};
     }},
    {"BadArgument", false, XD_EP_PREPARE,
     [](const Rank& rank, Batch& batch, xd_ep_group* group) {
       if (rank.rank == 0) batch.prepare_args.plan = nullptr;
       return batch.enqueue(group, XD_EP_PREPARE);
     },
     [](const Rank& rank) { return fault_of_rank_0(rank, "plan = NULL"); }},
    {"JoinFailed", false, XD_EP_PREPARE,
     [](const Rank& rank, Batch& batch, xd_ep_group* group) {
       if (rank.rank != 0) return batch.enqueue(group, XD_EP_PREPARE);
       return xd_ep_join_failed(group, XD_EP_PREPARE, "the router gave up", rank.stream());
     },
     [](const Rank& rank) { return fault_of_rank_0(rank, "the router gave up"); }},
    {"NoPlan", false, XD_EP_DISPATCH,
     [](const Rank&, Batch& batch, xd_ep_group* group) {
       batch.plan().fill(std::byte{0});
       return batch.enqueue(group, XD_EP_DISPATCH);
     },
     [](const Rank& rank) -> Verdict {
       return {XD_ERROR_INVALID_ARGUMENT, "plan: these bytes are no plan", rank.rank};
     }},
    {"Disagreement", true, XD_EP_PREPARE,
     [](const Rank& rank, Batch& batch, xd_ep_group* group) {
       if (rank.rank == 0) batch.prepare_args.alignment = 2;
       return batch.enqueue(group, XD_EP_PREPARE);
     },
     [](const Rank& rank) -> Verdict {
       return {XD_ERROR_MISMATCH, "ranks disagree", rank.rank == 0 ? 1 : 0};
     }},
};

// GoogleTest's name of the instance.
void PrintTo(const Mistake& mistake, std::ostream* out) { *out << mistake.name; }

class OnErrorFatal : public testing::TestWithParam<Mistake> {
 protected:
  OnErrorFatal() : c(plain_case(world().num_ranks())) {}  // it has alignment 4

  xd_ep_config fatal_config(const Rank& rank) const {
    xd_ep_config config = c.config(rank.rank);
    config.on_error = XD_EP_ON_ERROR_FATAL;
    config.num_sms = 4;  // two groups of all ranks fit on one device
    if (std::string(GetParam().name) == "Overflow") config.recv_capacity = 4;
    return config;
  }
  Case c;
};

void expect_finished(xd_comm* comm, const Rank& rank, const Verdict& verdict,
                     xd_ep_operation operation) {
  const xd_error_info info = comm_error(comm);
  EXPECT_EQ(info.status, verdict.status) << info.text;
  EXPECT_EQ(info.rank, rank.rank);
  EXPECT_EQ(info.peer, verdict.peer);
  EXPECT_EQ(info.group, 0);
  EXPECT_EQ(info.operation, operation);
  EXPECT_EQ(info.expected_epoch, 1u);
  EXPECT_NE(std::string(info.text).find(verdict.text), std::string::npos) << info.text;
  EXPECT_NE(std::string(info.text).find(", epoch 1: "), std::string::npos) << info.text;
}

TEST_P(OnErrorFatal, FinishesTheCommunicatorWithItsStatusAndText) {
  const Mistake& mistake = GetParam();
  if (mistake.needs_peers && world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees";
  on_every_rank([&](Rank& rank) {
    const Verdict verdict = mistake.verdict(rank);
    {
      const Comm comm = rank.another_comm("finished", std::size_t{1} << 20);
      Rank there = rank;
      there.comm = comm.get();
      xd_ep_config config = fatal_config(rank);
      const Group group = make_group(comm.get(), config);
      config = c.config(rank.rank);
      config.num_sms = 4;
      const Group forgiving = make_group(comm.get(), config);
      EXPECT_EQ(xd_ep_join_failed(forgiving.get(), XD_EP_COMBINE, "harmless", rank.stream()),
                XD_ERROR_INVALID_ARGUMENT);
      rank.memory->synchronize();
      ASSERT_EQ(comm_error(comm.get()).status, XD_SUCCESS);

      Batch batch(there, c);
      const Outcome outcome = finish(there, group.get(), mistake.make(there, batch, group.get()));
      EXPECT_EQ(outcome, verdict.status);
      EXPECT_TRUE(outcome.mentions(verdict.text)) << outcome.text;
      expect_finished(comm.get(), rank, verdict, mistake.operation);
      const volatile std::uint64_t* errors = nullptr;
      ok(xd_ep_group_watch(group.get(), &errors));
      EXPECT_EQ(__atomic_load_n(errors, __ATOMIC_ACQUIRE), 1u);
      for (xd_ep_group* any : {forgiving.get(), group.get()}) {
        Batch later(there, c, 1);
        EXPECT_EQ(later.enqueue(any, XD_EP_PREPARE), verdict.status);
        expect_said(verdict.text);
        EXPECT_EQ(std::string(xd_last_error()).find("xd_ep_prepare: xd_ep_prepare"),
                  std::string::npos)
            << xd_last_error();
      }
      EXPECT_EQ(xd_comm_barrier(comm.get()), verdict.status);
      EXPECT_EQ(__atomic_load_n(errors, __ATOMIC_ACQUIRE), 1u) << "the calls since met nothing new";
      expect_finished(comm.get(), rank, verdict, mistake.operation);
    }  // no barrier: a rank that leaves early tells the others its error, and they show their own
    const Comm next = rank.another_comm("next", std::size_t{1} << 20);
    Rank there = rank;
    there.comm = next.get();
    const Group good = make_group(next.get(), c.config(rank.rank));
    Step(there, c, good.get(), 0).run_all();
  });
}

TEST_P(OnErrorFatal, LetsNothingMoveThatWasEnqueuedBehind) {
  const Mistake& mistake = GetParam();
  if (mistake.needs_peers && world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees";
  on_every_rank([&](Rank& rank) {
    const Comm comm = rank.another_comm("behind", std::size_t{1} << 20);
    Rank there = rank;
    there.comm = comm.get();
    const Group group = make_group(comm.get(), fatal_config(rank));
    const Group good = make_group(rank.comm, c.config(rank.rank));
    Batch prepared(rank, c);
    prepared.prepare(good.get());
    Batch batch(there, c);
    static_cast<void>(mistake.make(there, batch, group.get()));
    const xd_status behind = prepared.enqueue(group.get(), XD_EP_DISPATCH);
    rank.memory->synchronize();
    if (!rank.asynchronous()) {
      EXPECT_EQ(behind, mistake.verdict(rank).status);
    }
    EXPECT_TRUE(prepared.untouched(XD_EP_DISPATCH));
    expect_finished(comm.get(), rank, mistake.verdict(rank), mistake.operation);
    ok(xd_comm_barrier(rank.comm));
  });
}

// A host that waits in a collective call would wait for peers that are finished as well.
TEST_P(OnErrorFatal, ReleasesAHostThatWaitsInACollectiveCall) {
  const Mistake& mistake = GetParam();
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank waits for nobody";
  on_every_rank([&](Rank& rank) {
    const Comm comm = rank.another_comm("waiting", std::size_t{1} << 20);
    Rank there = rank;
    there.comm = comm.get();
    const Group group = make_group(comm.get(), fatal_config(rank));
    const Verdict verdict = mistake.verdict(rank);
    const auto start = std::chrono::steady_clock::now();
    xd_status waited = verdict.status;
    std::thread host([&] {
      if (rank.rank == 0) waited = xd_comm_barrier(comm.get());
    });
    Batch batch(there, c);
    static_cast<void>(mistake.make(there, batch, group.get()));
    rank.memory->synchronize();
    host.join();
    EXPECT_EQ(waited, verdict.status);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    ok(xd_comm_barrier(rank.comm));
  });
}

INSTANTIATE_TEST_SUITE_P(Mistakes, OnErrorFatal, testing::ValuesIn(kMistakes),
                         [](const testing::TestParamInfo<Mistake>& instance) {
                           return std::string(instance.param.name);
                         });

// Good batches, and drops, are no errors.
TEST(OnErrorFatalGroup, WorksAsAnyOther) {
  Case c = plain_case(world().num_ranks());
  c.capacity = Capacity::dropping;
  on_every_rank([&](Rank& rank) {
    xd_ep_config config = c.config(rank.rank);
    config.on_error = XD_EP_ON_ERROR_FATAL;
    const Group group = make_group(rank.comm, config);
    for (int number = 0; number < 3; ++number) Step(rank, c, group.get(), number).run_all();
    EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
  });
}

}  // namespace
}  // namespace xd::test
