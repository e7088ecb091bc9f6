// Memory that runs out anywhere: the n-th allocation fails, for all n, on one rank's calling
// thread, in a background thread of the library, or wherever it is in the process. The process
// lives, every call on every rank returns soon with an error that says so, and what comes
// afterwards is whole.
//
// XD_TEST_FULL=1 tries every n; otherwise steps are larger.
#define XD_EXPERIMENTAL 1
#include <crossdock/channel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conformance/fixed_step.h"
#include "faults/board.h"
#include "faults/failing_new.h"
#include "support/gtest_main.h"
#include "support/usage.h"

namespace xd::test {
namespace {

using std::chrono::milliseconds;

constexpr auto kSoon = milliseconds(5000);  // far from the timeouts below, also on a busy machine
constexpr int kTimeoutMs = 20000;           // timeout of calls that nothing may delay that long
constexpr int kMeetingTimeoutMs = 400;

bool full() { return std::getenv("XD_TEST_FULL") != nullptr; }

// Where memory is short, and on which rank.
struct Shortage {
  const char* name;
  MemoryFault::Spec spec;
  bool on_rank_0;  // false: on the last rank
};

constexpr Shortage kShortages[] = {
    {"calling_thread", {.of = Of::this_thread}, false},
    {"calling_thread_lasting", {.of = Of::this_thread, .lasting = true}, false},
    {"watch_thread", {.of = Of::thread, .thread = "xd-watch"}, false},
    {"watch_thread_lasting", {.of = Of::thread, .thread = "xd-watch", .lasting = true}, false},
    {"meeting_thread", {.of = Of::thread, .thread = "xd-meeting"}, true},
    {"meeting_thread_lasting", {.of = Of::thread, .thread = "xd-meeting", .lasting = true}, true},
    {"process", {.of = Of::process}, false},
    {"process_lasting", {.of = Of::process, .lasting = true}, false},
};

std::size_t shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("/memfd:") != line.npos;
  return count;
}

// Counts the process's descriptors. One rank of each process looks while the others wait, since
// looking takes a descriptor itself.
struct Usage {
  std::size_t descriptors = open_descriptors();
  std::size_t threads = live_threads();
  std::size_t mappings = shared_mappings();
};

// Threads of the library that no call waits for end by themselves.
void expect_nothing_left(const Usage& before) {
  Usage now;
  for (int i = 0; i < 500; ++i, now = Usage()) {
    if (now.descriptors <= before.descriptors && now.threads <= before.threads) break;
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_LE(now.descriptors, before.descriptors);
  EXPECT_LE(now.threads, before.threads);
  EXPECT_LE(now.mappings, before.mappings);
}

class MemoryFailure : public testing::TestWithParam<Shortage> {
 protected:
  using Call = std::function<xd_status(Rank&)>;
  // The results of the calls of all ranks, on every rank.
  struct Trial {
    long n;
    Ended mine;
    std::vector<std::int64_t> statuses;
    bool all(xd_status status) const {
      return std::ranges::all_of(statuses, [=](std::int64_t s) { return s == status; });
    }
  };
  using Judge = std::function<void(Rank&, const Trial&)>;

  bool of_meetings() const { return GetParam().on_rank_0; }
  bool is_short(const Rank& rank) const {
    return rank.rank == (GetParam().on_rank_0 ? 0 : rank.num_ranks - 1);
  }

  // `call` on all ranks for each n, or every `stride`-th, until it ends before the n-th allocation.
  void for_every_allocation(Rank& rank, Board& board, long stride, const Call& call,
                            const Judge& judge) {
    for (long n = 1;; n += full() ? 1 : stride) {
      ASSERT_LT(n, 5000) << "it never ends";
      board.meet();
      std::optional<MemoryFault> fault;
      if (is_short(rank)) fault.emplace(GetParam().spec, n);
      board.meet();
      const Ended mine = timed([&] { return call(rank); });
      board.meet();
      const bool struck = fault && fault->struck();
      fault.reset();
      board.meet();
      const Trial trial{n, mine, board.share(mine.status)};
      SCOPED_TRACE("allocation " + std::to_string(n));
      expect_named(trial);
      judge(rank, trial);
      const auto all = board.share(struck ? 1 : 0);
      if (std::ranges::none_of(all, [](std::int64_t s) { return s != 0; })) return;
    }
  }

  // A rank was missed: it failed before it could meet the others, or, on a busy machine, did not
  // run for as long as they wait. The words say which.
  static bool missed(const Ended& call) {
    constexpr const char* kWords[] = {"did not come in time", "the meeting point did not answer",
                                      "no way into the meeting in time", "did not connect to rank",
                                      " for rank"};
    return call.status == XD_ERROR_TIMEOUT &&
           std::ranges::any_of(kWords, [&](const char* words) { return call.mentions(words); });
  }

  // The error is one of those that memory's end may cause, and came soon.
  void expect_named(const Trial& trial) const {
    if (trial.mine.status == XD_SUCCESS) return;
    constexpr xd_status kNamed[] = {XD_ERROR_OUT_OF_MEMORY, XD_ERROR_MISMATCH,
                                    XD_ERROR_INVALID_ARGUMENT, XD_ERROR_PEER_LOST, XD_ERROR_SYSTEM};
    // One that never gets memory again cannot even call the others. The meeting point says who is
    // missing a little before their time is over, which a busy machine may not notice.
    const bool lasting = GetParam().spec.lasting;
    if (trial.mine.status == XD_ERROR_TIMEOUT || (lasting && trial.mine.after >= kSoon)) {
      EXPECT_TRUE(lasting || missed(trial.mine)) << trial.mine;
      EXPECT_LT(trial.mine.after, milliseconds(kMeetingTimeoutMs) + kSoon) << trial.mine;
      return;
    }
    EXPECT_TRUE(std::ranges::find(kNamed, trial.mine.status) != std::end(kNamed)) << trial.mine;
    EXPECT_LT(trial.mine.after, kSoon) << trial.mine;
  }
};

Comm join(Board& board, const Rank& rank, int timeout_ms) {
  const xd_unique_id id = board.new_id();
  xd_comm_config config = id_config(id, rank.rank, rank.num_ranks, timeout_ms);
  config.heap_bytes = std::size_t{2} << 20;
  return make_comm(config);
}

TEST_P(MemoryFailure, InCreateIsAnErrorOnAllRanks) {
  on_every_rank([this](Rank& rank) {
    Board board(rank);
    join(board, rank, kTimeoutMs);
    const bool looks = !rank.threads || rank.rank == 0;
    board.meet();
    std::optional<Usage> before;
    if (looks) before.emplace();
    board.meet();
    xd_comm* made = nullptr;
    xd_unique_id id = board.new_id();
    const auto create = [&](Rank& here) {
      xd_comm_config config = id_config(id, here.rank, here.num_ranks, kMeetingTimeoutMs);
      config.heap_bytes = 4096;
      return xd_comm_create(&config, &made);
    };
    // A rank that fails before it has met the others costs them their patience.
    for_every_allocation(rank, board, 43, create, [&](Rank&, const Trial& trial) {
      const Comm comm(std::exchange(made, nullptr));
      EXPECT_EQ(comm != nullptr, trial.mine.status == XD_SUCCESS);
      if (comm) {
        // A communicator that misses a rank cannot be used, and its calls fail at once.
        const Ended used = timed([&] { return xd_comm_barrier(comm.get()); });
        EXPECT_TRUE((used.status == XD_SUCCESS) == trial.all(XD_SUCCESS) || missed(used)) << used;
        EXPECT_LT(used.after, kSoon);
      }
      board.meet();
      id = board.new_id();
    });
    Comm last = join(board, rank, kTimeoutMs);
    ok(xd_comm_barrier(last.get()));
    last.reset();
    board.meet();
    if (looks) expect_nothing_left(*before);
    board.meet();
  });
}

// Calls on a communicator that is there: after each trial it is as good as before, or finished on
// all ranks alike; then the next one takes its place.
class OnOne {
 public:
  OnOne(Board& board, const Rank& rank) : board_(board), rank_(rank) { renew(); }

  xd_comm* get() const { return comm_.get(); }

  // Whether it has been finished, and replaced.
  bool finished() {
    const auto fatal = [this] { return comm_error(comm_.get()).status; };
    bool any = false;
    for (const std::int64_t status : board_.share(fatal())) any |= status != XD_SUCCESS;
    if (!any) return false;
    const auto end = std::chrono::steady_clock::now() + kSoon;
    while (fatal() == XD_SUCCESS && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(milliseconds(1));
    EXPECT_NE(fatal(), XD_SUCCESS) << "rank " << rank_.rank << " does not know";
    const Ended later = timed([&] { return xd_comm_barrier(comm_.get()); });
    EXPECT_EQ(later.status, fatal()) << later;
    EXPECT_LT(later.after, kSoon);
    board_.meet();
    renew();
    return true;
  }

 private:
  void renew() {
    comm_.reset();
    comm_ = join(board_, rank_, kTimeoutMs);
  }

  Board& board_;
  const Rank& rank_;
  Comm comm_;
};

TEST_P(MemoryFailure, InABarrierIsAnErrorOnAllRanks) {
  if (of_meetings()) return;  // is over by then
  on_every_rank([this](Rank& rank) {
    Board board(rank);
    OnOne comm(board, rank);
    for_every_allocation(
        rank, board, 2, [&](Rank&) { return xd_comm_barrier(comm.get()); },
        [&](Rank&, const Trial& trial) {
          if (comm.finished()) return;
          EXPECT_TRUE(trial.all(XD_SUCCESS) || trial.mine.status != XD_SUCCESS) << trial.mine;
          ok(xd_comm_barrier(comm.get()));
        });
  });
}

TEST_P(MemoryFailure, InGrowLeavesAllHeapsAsTheyWere) {
  if (of_meetings()) return;
  on_every_rank([this](Rank& rank) {
    Board board(rank);
    OnOne comm(board, rank);
    const auto total = [&] {
      xd_mem_info info = XD_MEM_INFO_INIT;
      ok(xd_mem_get_info(comm.get(), &info));
      return info.total_bytes;
    };
    std::size_t before = total();
    for_every_allocation(
        rank, board, 11, [&](Rank&) { return xd_mem_grow(comm.get(), 4096); },
        [&](Rank&, const Trial& trial) {
          if (!comm.finished()) {
            EXPECT_EQ(total(), before + (trial.mine.status == XD_SUCCESS ? 4096 : 0)) << trial.mine;
            EXPECT_TRUE(trial.all(XD_SUCCESS) || trial.mine.status != XD_SUCCESS) << trial.mine;
            ok(xd_mem_grow(comm.get(), 4096));
          }
          before = total();
        });
  });
}

TEST_P(MemoryFailure, InGroupCreateLeavesNoGroup) {
  if (of_meetings()) return;
  on_every_rank([this](Rank& rank) {
    Board board(rank);
    OnOne comm(board, rank);
    const xd_ep_config config = FixedShape{}.config(rank.num_ranks);
    xd_ep_group* made = nullptr;
    const auto create = [&](Rank&) { return xd_ep_group_create(comm.get(), &config, &made); };
    for_every_allocation(rank, board, 31, create, [&](Rank& here, const Trial& trial) {
      Group group(std::exchange(made, nullptr));
      EXPECT_EQ(group != nullptr, trial.mine.status == XD_SUCCESS);
      if (comm.finished()) return;
      EXPECT_TRUE(trial.all(XD_SUCCESS) || trial.mine.status != XD_SUCCESS) << trial.mine;
      if (!group) group = make_group(comm.get(), config);
      Rank there = here;
      there.comm = comm.get();
      FixedStep step(there, FixedShape{});
      step.load(static_cast<int>(trial.n));
      step.enqueue_all(group.get());
      step.check();
    });
  });
}

TEST_P(MemoryFailure, InChannelCreateLeavesNoChannel) {
  if (of_meetings()) return;
  on_every_rank([this](Rank& rank) {
    Board board(rank);
    OnOne comm(board, rank);
    xd_channel* made = nullptr;
    const auto create = [&](Rank& here) {
      void* memory = nullptr;
      if (const xd_status status = xd_mem_alloc(comm.get(), 64, &memory); status != XD_SUCCESS) {
        // This rank takes part nevertheless, so that the others hear of it.
        xd_channel_create(comm.get(), here.rank, nullptr, 64, 1, &made);
        return status;
      }
      return xd_channel_create(comm.get(), here.num_ranks - 1 - here.rank, memory, 64, 1, &made);
    };
    for_every_allocation(rank, board, 3, create, [&](Rank&, const Trial& trial) {
      const std::unique_ptr<xd_channel, xd_status (*)(xd_channel*)> channel(
          std::exchange(made, nullptr), xd_channel_destroy);
      EXPECT_EQ(channel != nullptr, trial.mine.status == XD_SUCCESS);
      if (comm.finished()) return;
      EXPECT_TRUE(trial.all(XD_SUCCESS) || trial.mine.status != XD_SUCCESS) << trial.mine;
      if (!channel) return;
      ok(xd_channel_put(channel.get(), 0, nullptr, 0, 0));
      ok(xd_channel_wait(channel.get(), 0, 1));
      board.meet();
    });
  });
}

// Operations allocate when they fail. Even if that allocation fails, the ranks stay in step, and
// the next step is right.
TEST_P(MemoryFailure, InAFailingOperationLeavesTheRanksInStep) {
  if (of_meetings()) return;
  on_every_rank([this](Rank& rank) {
    Board board(rank);
    const Comm comm = join(board, rank, kTimeoutMs);
    Rank there = rank;
    there.comm = comm.get();
    const Group group = make_group(comm.get(), FixedShape{}.config(rank.num_ranks));
    FixedStep step(there, FixedShape{});
    const bool last = rank.rank == rank.num_ranks - 1;
    const Call mistakes[] = {
        [&](Rank&) { return step.enqueue(group.get(), XD_EP_PREPARE); },  // spoiled ids
        [&](Rank&) {                                                      // a bad argument
          const xd_ep_dispatch_args none = XD_EP_DISPATCH_ARGS_INIT;
          return last ? xd_ep_dispatch(group.get(), &none, nullptr)
                      : step.enqueue(group.get(), XD_EP_DISPATCH);
        },
        [&](Rank&) {  // different operations
          return step.enqueue(group.get(), last ? XD_EP_COMBINE : XD_EP_DISPATCH);
        },
        [&](Rank&) {
          return last ? xd_ep_join_failed(group.get(), XD_EP_COMBINE_BWD,
                                          "a text that is too long for a short string", nullptr)
                      : step.enqueue(group.get(), XD_EP_COMBINE_BWD);
        },
        [&](Rank&) {  // with bytes that are no plan
          const xd_ep_dispatch_bwd_args none = XD_EP_DISPATCH_BWD_ARGS_INIT;
          return xd_ep_dispatch_bwd(group.get(), &none, nullptr);
        },
    };
    int number = 0;
    for (const Call& mistake : mistakes) {
      step.load(++number, true);
      if (&mistake != mistakes) {
        step.load(number);
        ok(step.enqueue(group.get(), XD_EP_PREPARE));
      }
      for_every_allocation(rank, board, 5, mistake, [&](Rank&, const Trial& trial) {
        EXPECT_NE(trial.mine.status, XD_SUCCESS) << "mistake " << &mistake - mistakes;
        EXPECT_EQ(comm_error(comm.get()).status, XD_SUCCESS);
        static_cast<void>(group_status(group.get()));
        step.load(++number);
        step.enqueue_all(group.get());
        step.check();
        if (&mistake == mistakes) step.load(number, true);
      });
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Of, MemoryFailure, testing::ValuesIn(kShortages),
                         [](const auto& instance) { return std::string(instance.param.name); });

}  // namespace
}  // namespace xd::test
