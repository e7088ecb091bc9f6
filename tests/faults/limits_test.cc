// A process that has reached a limit of the system: the rank in it says so, its peers repeat it.
// Ranks are processes here, and the limit is the last one's.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "conformance/fixed_step.h"
#include "faults/board.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

using std::chrono::milliseconds;

constexpr auto kSoon = milliseconds(5000);
constexpr int kMeetingTimeoutMs = 700;
constexpr const char* kExhausted = "Too many open files";

class Limit {
 public:
  Limit(__rlimit_resource_t resource, rlim_t soft) : resource_(resource) {
    ::getrlimit(resource_, &before_);
    const rlimit now{soft, before_.rlim_max};
    EXPECT_EQ(::setrlimit(resource_, &now), 0);
  }
  ~Limit() { ::setrlimit(resource_, &before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  __rlimit_resource_t resource_;
  rlimit before_{};
};

// This many descriptors more, and no other: numbers below those that are open are taken.
class Descriptors {
 public:
  explicit Descriptors(int more) {
    const int top = 64;
    for (int fd = 0; fd >= 0 && fd < top; taken_.push_back(fd))
      fd = ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
    limit_.emplace(RLIMIT_NOFILE, static_cast<rlim_t>(top + 1 + more));
  }
  ~Descriptors() {
    for (const int fd : taken_) ::close(fd);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

 private:
  std::vector<int> taken_;
  std::optional<Limit> limit_;
};

bool is_last(const Rank& rank) { return rank.rank == rank.num_ranks - 1; }

// How a call ended while the last rank has room for `more` descriptors only.
template <class Call>
Ended with_room_for(int more, const Rank& rank, Board& board, Call&& call) {
  std::optional<Descriptors> few;
  if (is_last(rank)) few.emplace(more);
  board.meet();
  const Ended ended = timed(call);
  board.meet();
  few.reset();
  board.meet();
  return ended;
}

// The last rank tells what it is short of, the others that it has failed of that.
void expect_cause(const Rank& rank, const Ended& ended, const char* cause) {
  EXPECT_EQ(ended.status, is_last(rank) ? XD_ERROR_SYSTEM : XD_ERROR_MISMATCH) << ended;
  EXPECT_TRUE(ended.mentions(cause)) << ended;
  if (!is_last(rank)) {
    const std::string who = "rank " + std::to_string(rank.num_ranks - 1) + " failed";
    EXPECT_TRUE(ended.mentions(who.c_str())) << ended;
  }
  EXPECT_LT(ended.after, kSoon) << ended;
}

struct Joining {
  xd_unique_id id;
  xd_comm* comm = nullptr;
  xd_status operator()(const Rank& rank) {
    xd_comm_config config = id_config(id, rank.rank, rank.num_ranks, kMeetingTimeoutMs);
    config.heap_bytes = 65536;
    return xd_comm_create(&config, &comm);
  }
};

TEST(Limits, OfDescriptorsInCreateAreNamedOnAllRanks) {
  on_every_rank([](Rank& rank) {
    Board board(rank);
    bool joined = false;
    for (int more = 0; !joined; ++more) {
      ASSERT_LT(more, 10 * rank.num_ranks);
      SCOPED_TRACE("room for " + std::to_string(more));
      Joining joining{board.new_id()};
      const Ended ended = with_room_for(more, rank, board, [&] { return joining(rank); });
      const Comm comm(joining.comm);
      joined = board.share(ended.status) ==
               std::vector<std::int64_t>(static_cast<std::size_t>(rank.num_ranks), XD_SUCCESS);
      if (joined) {
        EXPECT_GT(more, rank.num_ranks);
        ok(xd_comm_barrier(comm.get()));
      } else if (more > 0) {
        expect_cause(rank, ended, kExhausted);
      } else if (is_last(rank)) {  // it cannot even connect to the meeting point
        EXPECT_EQ(ended.status, XD_ERROR_SYSTEM) << ended;
        EXPECT_TRUE(ended.mentions(kExhausted)) << ended;
      } else {
        EXPECT_EQ(ended.status, XD_ERROR_TIMEOUT) << ended;
      }
    }
  });
}

TEST(Limits, OfDescriptorsInGrowAndGroupCreateAreNamedAndNotFatal) {
  on_every_rank([](Rank& rank) {
    Board board(rank);
    Joining joining{board.new_id()};
    ok(joining(rank));
    const Comm comm(joining.comm);
    const xd_ep_config config = FixedShape{}.config(rank.num_ranks);
    for (int more = 0; more < rank.num_ranks; ++more) {
      SCOPED_TRACE("room for " + std::to_string(more));
      expect_cause(rank,
                   with_room_for(more, rank, board, [&] { return xd_mem_grow(comm.get(), 4096); }),
                   kExhausted);
      xd_ep_group* group = nullptr;
      expect_cause(rank,
                   with_room_for(more, rank, board,
                                 [&] { return xd_ep_group_create(comm.get(), &config, &group); }),
                   kExhausted);
      EXPECT_EQ(comm_error(comm.get()).status, XD_SUCCESS);
    }
    const auto grow = [&] { return xd_mem_grow(comm.get(), 4096); };
    // Its own memory, the others', and a file that says what memory there is.
    const Ended grown = with_room_for(rank.num_ranks + 1, rank, board, grow);
    EXPECT_EQ(grown.status, XD_SUCCESS) << grown;
    make_group(comm.get(), config);
  });
}

rlim_t address_space() {
  std::ifstream file("/proc/self/statm");
  rlim_t pages = 0;
  file >> pages;
  return pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
}

TEST(Limits, ThatKeepAThreadFromStartingAreNamedOnAllRanks) {
  on_every_rank([](Rank& rank) {
    Board board(rank);
    // Larger than any stack that the system keeps for the next thread.
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    std::size_t usual = 0;
    pthread_attr_getstacksize(&attributes, &usual);
    constexpr std::size_t kStack = std::size_t{128} << 20;
    pthread_attr_setstacksize(&attributes, kStack);
    pthread_setattr_default_np(&attributes);
    Joining joining{board.new_id()};
    std::optional<Limit> limit;
    if (is_last(rank)) limit.emplace(RLIMIT_AS, address_space() + kStack / 2);
    board.meet();
    const Ended ended = timed([&] { return joining(rank); });
    board.meet();
    limit.reset();
    pthread_attr_setstacksize(&attributes, usual);
    pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
    EXPECT_EQ(joining.comm, nullptr);
    expect_cause(rank, ended, "start of thread xd-watch: Resource temporarily unavailable");
    board.meet();
  });
}

}  // namespace
}  // namespace xd::test
