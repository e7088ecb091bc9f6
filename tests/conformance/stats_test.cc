// The numbers that groups keep for people who look, and how another process finds them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "conformance/batch.h"
#include "conformance/slots/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr xd_ep_operation kFive[] = {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE,
                                     XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD};

struct Numbers {
  xd_stats stats = XD_STATS_INIT;
  std::vector<std::int64_t> wait_ns;
  std::uint64_t calls() const {
    return std::accumulate(std::begin(stats.calls), std::end(stats.calls), std::uint64_t{0});
  }
};

template <class Group>
Numbers numbers_of(const Rank& rank, Group* group, xd_status (*read)(Group*, xd_stats*, int64_t*)) {
  Numbers numbers;
  numbers.wait_ns.assign(static_cast<std::size_t>(rank.num_ranks), -1);
  ok(read(group, &numbers.stats, numbers.wait_ns.data()));
  return numbers;
}
Numbers numbers_of(const Rank& rank, xd_ep_group* group) {
  return numbers_of(rank, group, xd_ep_group_stats);
}
Numbers numbers_of(const Rank& rank, xd_ll_group* group) {
  return numbers_of(rank, group, xd_ll_group_stats);
}

std::uint64_t bytes_of(const DLTensor& tensor) {
  return static_cast<std::uint64_t>(tensor.shape[0] * tensor.shape[1]) * tensor.dtype.bits / 8;
}

// XD_NET_TEST=apart makes machines of declared hosts. A rank sends its partners an entry of each
// operation at least.
void expect_puts_between_machines_alone(const Rank& rank, const xd_stats& stats) {
  xd_comm_info info XD_COMM_INFO_INIT;
  ok(xd_comm_get_info(rank.comm, &info));
  if (info.num_hosts == 1 || std::getenv("XD_NET_TEST") == nullptr) {
    EXPECT_EQ(stats.net_puts, 0u);
    EXPECT_EQ(stats.net_bytes, 0u);
  } else {
    EXPECT_GE(stats.net_puts,
              std::accumulate(std::begin(stats.calls), std::end(stats.calls), std::uint64_t{0}));
    EXPECT_GT(stats.net_bytes, stats.net_puts);
  }
}

TEST(Stats, CountCallsTokensAndRows) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    EXPECT_EQ(numbers_of(rank, group.get()).calls(), 0u);
    Batch batch(rank, c);
    for (int round = 0; round < 3; ++round) {
      for (const xd_ep_operation operation : kFive) ok(batch.call(group.get(), operation));
    }
    const xd_stats stats = numbers_of(rank, group.get()).stats;
    for (const xd_ep_operation operation : kFive) {
      EXPECT_EQ(stats.calls[operation], 3u) << operation;
      EXPECT_GT(stats.call_ns[operation], 0u) << operation;
    }
    const DLTensor* const moved[] = {batch.dispatch_args.tokens, batch.combine_args.out,
                                     batch.combine_bwd_args.grad_out,
                                     batch.dispatch_bwd_args.grad_tokens};
    std::uint64_t tokens = 0, bytes = 0;
    for (const DLTensor* tensor : moved) {
      tokens += 3 * static_cast<std::uint64_t>(tensor->shape[0]);
      bytes += 3 * bytes_of(*tensor);
    }
    EXPECT_EQ(stats.tokens, tokens);
    EXPECT_EQ(stats.token_bytes, bytes);
    EXPECT_EQ(stats.failed_calls, 0u);
    EXPECT_EQ(stats.counts_rows, rank.asynchronous() ? 0 : 1);
    expect_puts_between_machines_alone(rank, stats);
    if (stats.counts_rows == 0) return;
    xd_ep_plan_info info XD_EP_PLAN_INFO_INIT;
    ok(xd_ep_plan_get_info(batch.plan().data(), batch.plan().bytes(), &info));
    EXPECT_EQ(stats.rows, 12 * static_cast<std::uint64_t>(info.recv_rows));
  });
}

// A rank without rows for a machine sends it the entry of each operation and nothing else, and
// gives back the entry that comes from there. Among machines of unequal size ranks have other
// numbers.
TEST(Stats, CountPutsOfEntriesAloneWhereNoRowGoesToOtherMachines) {
  Case c = plain_case(world().num_ranks());
  c.pattern = Pattern::nobody;
  on_every_rank([&](Rank& rank) {
    xd_comm_info info XD_COMM_INFO_INIT;
    ok(xd_comm_get_info(rank.comm, &info));
    const bool apart = info.near_ranks < rank.num_ranks;
    const bool even = info.near_ranks * info.num_hosts == rank.num_ranks;
    if (rank.asynchronous() || (apart && !even)) return;
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const std::uint64_t before = numbers_of(rank, group.get()).stats.net_puts;
    ok(xd_comm_barrier(rank.comm));  // an entry of the next operation may come in this one
    for (const xd_ep_operation operation :
         {XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD})
      ok(batch.call(group.get(), operation));
    const std::uint64_t puts = numbers_of(rank, group.get()).stats.net_puts - before;
    const int machines = apart ? info.num_hosts : 1;
    EXPECT_EQ(puts, static_cast<std::uint64_t>(4 * 2 * (machines - 1)));
  });
}

TEST(Stats, CountTokensAndRowsOfPartsOnce) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    constexpr int parts = 3;
    batch.prepare_args.parts = parts;
    batch.prepare(group.get());
    for (const xd_ep_operation operation : {XD_EP_DISPATCH, XD_EP_COMBINE}) {
      for (int part = 1; part <= parts; ++part) {
        batch.dispatch_args.part = batch.combine_args.part = part;
        ok(batch.call(group.get(), operation));
      }
    }
    const xd_stats stats = numbers_of(rank, group.get()).stats;
    const auto tokens = static_cast<std::uint64_t>(batch.dispatch_args.tokens->shape[0]);
    EXPECT_EQ(stats.tokens, 2 * tokens);
    xd_ep_plan_info info XD_EP_PLAN_INFO_INIT;
    const std::vector<std::byte> plan = batch.plan().read();
    ok(xd_ep_plan_get_info(plan.data(), plan.size(), &info));
    if (stats.counts_rows != 0) {
      EXPECT_EQ(stats.rows, 2 * static_cast<std::uint64_t>(info.recv_rows));
    }
  });
}

TEST(Stats, CountRowsThatAreStaged) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    for (const Place place : {Place::symmetric, Place::ordinary}) {
      const Group group = make_group(rank.comm, c.config(rank.rank));
      Batch batch(rank, c, 0, place);
      for (const xd_ep_operation operation : {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE}) {
        ok(batch.call(group.get(), operation));
      }
      // A GPU reads expert_out where it lies.
      const std::uint64_t staged = rank.asynchronous() ? 1 : 2;
      EXPECT_EQ(numbers_of(rank, group.get()).stats.staged_tensors,
                place == Place::symmetric ? 0 : staged);
      rank.memory->synchronize();
    }
  });
}

TEST(Stats, CountFailuresBadIdsAndDroppedRows) {
  Case c = plain_case(world().num_ranks());
  c.capacity = Capacity::dropping;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    EXPECT_EQ(xd_ep_join_failed(group.get(), XD_EP_COMBINE, "on purpose", rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
    rank.memory->synchronize();
    Batch batch(rank, c);
    std::vector<std::int64_t> ids = batch.routed().choices(rank.rank).ids;
    ids[0] = -7;
    batch.field(XD_EP_PREPARE, "topk_idx").tensor->write(ids);
    const Outcome outcome = batch.call(group.get(), XD_EP_PREPARE);
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    for (int look = 0; look < 2;
         ++look) {  // a look clears nothing; nor does the status, read above
      const xd_stats stats = numbers_of(rank, group.get()).stats;
      EXPECT_EQ(stats.calls[XD_EP_COMBINE], 1u);
      EXPECT_EQ(stats.failed_calls, rank.asynchronous() ? 1u : 2u);
      EXPECT_EQ(stats.bad_ids, static_cast<std::uint64_t>(rank.num_ranks));
      EXPECT_EQ(stats.tokens, 0u);
      EXPECT_EQ(stats.dropped_rows, static_cast<std::uint64_t>(outcome.group.dropped_rows));
    }
  });
}

constexpr std::chrono::milliseconds kLate{100};

void expect_the_last_is_late(const Rank& rank, const Numbers& numbers) {
  const auto last = static_cast<std::size_t>(rank.num_ranks - 1);
  const auto me = static_cast<std::size_t>(rank.rank);
  EXPECT_EQ(numbers.wait_ns[me], 0);
  EXPECT_EQ(numbers.stats.measures_waits, rank.asynchronous() ? 0 : 1);
  if (rank.asynchronous() || me == last) return;
  // All have met just before, but on a busy machine this rank may be late as well.
  EXPECT_GT(numbers.wait_ns[last], std::chrono::nanoseconds(kLate).count() / 2);
}

TEST(Stats, TellWhichRankWasWaitedFor) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank waits for nobody";
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank == rank.num_ranks - 1) std::this_thread::sleep_for(kLate);
    batch.prepare(group.get());
    expect_the_last_is_late(rank, numbers_of(rank, group.get()));
  });
}

TEST(Stats, OfLowLatencyGroupsAreTheSame) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const std::vector<std::int32_t> owners = c.owners();
    const LlGroup group = make_group(rank.comm, c.config(owners));
    LlBatch batch(rank, c, 0);
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank == rank.num_ranks - 1) std::this_thread::sleep_for(kLate);
    batch.dispatch(group.get());
    batch.combine(group.get());
    const Numbers numbers = numbers_of(rank, group.get());
    EXPECT_EQ(numbers.stats.calls[XD_LL_DISPATCH - XD_LL_DISPATCH], 1u);
    EXPECT_EQ(numbers.stats.calls[XD_LL_COMBINE - XD_LL_DISPATCH], 1u);
    expect_puts_between_machines_alone(rank, numbers.stats);
    expect_the_last_is_late(rank, numbers);
  });
}

// ---- Monitors ----------------------------------------------------------------------------------

struct CloseMonitor {
  void operator()(xd_monitor* monitor) const { xd_monitor_close(monitor); }
};
using Monitor = std::unique_ptr<xd_monitor, CloseMonitor>;

Monitor open_monitor(int pid) {
  xd_monitor* monitor = nullptr;
  ok(xd_monitor_open(pid, &monitor));
  return Monitor(monitor);
}

struct Seen {
  xd_stats_source source = XD_STATS_SOURCE_INIT;
  xd_stats stats = XD_STATS_INIT;
};

// The groups of this name.
std::vector<Seen> see(xd_monitor* monitor, const std::string& name) {
  std::int32_t places = 0;
  ok(xd_monitor_places(monitor, &places));
  std::vector<Seen> found;
  for (std::int32_t place = 0; place < places; ++place) {
    Seen seen;
    ok(xd_monitor_read(monitor, place, &seen.source, &seen.stats, nullptr, 0));
    if (seen.source.in_use == 1 && seen.source.name == name) found.push_back(seen);
  }
  return found;
}

std::string name_of(const Rank& rank, int number) {
  return "of rank " + std::to_string(number) + " in " + rank.run_name;
}

TEST(Monitor, SeesAGroupByItsNameAsLongAsItLives) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group other = make_group(rank.comm, c.config(rank.rank));
    const Monitor monitor = open_monitor(::getpid());
    const std::string name = name_of(rank, rank.rank);
    EXPECT_TRUE(see(monitor.get(), name).empty());
    {
      const Group group = make_group(rank.comm, c.config(rank.rank));
      ok(xd_ep_group_set_name(group.get(), name.c_str()));
      Batch batch(rank, c);
      batch.prepare(group.get());
      const std::vector<Seen> found = see(monitor.get(), name);
      ASSERT_EQ(found.size(), 1u);
      const xd_stats_source& source = found[0].source;
      EXPECT_EQ(source.rank, rank.rank);
      EXPECT_EQ(source.num_ranks, rank.num_ranks);
      EXPECT_EQ(source.first_operation, XD_EP_PREPARE);
      EXPECT_EQ(source.device_type, rank.memory->device().device_type);
      EXPECT_EQ(source.operation, -1);
      EXPECT_EQ(source.waits_for, -1);
      EXPECT_EQ(std::string(source.detail).find("EXPERT_MAJOR"), 0u) << source.detail;
      EXPECT_EQ(found[0].stats.calls[XD_EP_PREPARE], 1u);
    }
    EXPECT_TRUE(see(monitor.get(), name).empty());
  });
}

// The last rank comes when a monitor has told it that rank 0 waits for it.
TEST(Monitor, SeesWhomARankWaitsForWhileItWaits) {
  if (!world().threads() || world().num_ranks() == 1) {
    GTEST_SKIP() << "the ranks must be threads of one process, and several";
  }
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const std::string first = name_of(rank, 0);
    if (rank.rank == 0) ok(xd_ep_group_set_name(group.get(), first.c_str()));
    Batch batch(rank, c);
    ok(xd_comm_barrier(rank.comm));
    const int last = rank.num_ranks - 1;
    if (rank.rank == last && !rank.asynchronous()) {
      const Monitor monitor = open_monitor(::getpid());
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      xd_stats_source source XD_STATS_SOURCE_INIT;
      while (source.waits_for != last && std::chrono::steady_clock::now() < deadline) {
        source = see(monitor.get(), first).at(0).source;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_EQ(source.waits_for, last);
      EXPECT_EQ(source.operation, XD_EP_PREPARE);
      EXPECT_GT(source.operation_ns, 0u);
    }
    batch.prepare(group.get());
  });
}

TEST(Monitor, OfAProcessWithoutGroupsIsABadArgument) {
  on_every_rank([&](Rank&) {
    xd_monitor* monitor = nullptr;
    EXPECT_EQ(xd_monitor_open(::getppid(), &monitor), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(monitor, nullptr);
  });
}

TEST(Monitor, RefusesPlacesThatThereAreNot) {
  on_every_rank([&](Rank& rank) {
    const Case c = plain_case(world().num_ranks());
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const Monitor monitor = open_monitor(::getpid());
    Seen seen;
    for (const std::int32_t place : {-1, 1 << 20}) {
      EXPECT_EQ(xd_monitor_read(monitor.get(), place, &seen.source, &seen.stats, nullptr, 0),
                XD_ERROR_INVALID_ARGUMENT);
    }
    EXPECT_EQ(xd_monitor_read(monitor.get(), 0, &seen.source, &seen.stats, nullptr, 1),
              XD_ERROR_INVALID_ARGUMENT);
  });
}

}  // namespace
}  // namespace xd::test
