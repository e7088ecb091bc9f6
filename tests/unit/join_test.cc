// Doors: who is let into the place of a rank whose process has ended, who is refused and in which
// words, and that nothing of a process that is not let in stays behind. tests/faults/join_test.cc
// has the operations of ranks with one that was let in.
#include "comm/join/join.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/math.h"
#include "comm/channel.h"
#include "comm/comm.h"
#include "comm/join/entrance.h"
#include "meet/invitation.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

constexpr int kTimeoutMs = 20000;

// A process that is forked while this one has no threads of the library, and is told later what it
// needs. It ends when it is killed.
class Child {
 public:
  // `body` gets the 128 bytes of tell(), and returns when the child has said by `said` that it is
  // ready.
  explicit Child(const std::function<void(const xd_unique_id& told,
                                          const std::function<void()>& said)>& body) {
    int to_child[2], from_child[2];
    EXPECT_EQ(::pipe(to_child), 0);
    EXPECT_EQ(::pipe(from_child), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      xd_unique_id told;
      if (::read(to_child[0], told.bytes, sizeof(told.bytes)) == sizeof(told.bytes)) {
        try {
          body(told, [&] { [[maybe_unused]] const auto n = ::write(from_child[1], "y", 1); });
        } catch (...) {
        }
      }
      ::_exit(1);
    }
    ::close(to_child[0]);
    ::close(from_child[1]);
    in_.reset(to_child[1]);
    out_.reset(from_child[0]);
  }
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void tell(const xd_unique_id& bytes) const {
    EXPECT_EQ(::write(in_.get(), bytes.bytes, sizeof(bytes.bytes)), sizeof(bytes.bytes));
  }
  bool is_ready() const {
    char said = 'n';
    return ::read(out_.get(), &said, 1) == 1 && said == 'y';
  }
  pid_t pid() const { return pid_; }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  UniqueFd in_, out_;
};

[[noreturn]] void wait_to_be_killed() {
  while (true) ::pause();
}

xd_comm_config elastic_config(const xd_unique_id& id, int rank, int num_ranks) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.unique_id = &id;
  config.rank = rank;
  config.num_ranks = num_ranks;
  config.timeout_ms = kTimeoutMs;
  config.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
  config.elastic = 1;
  config.heap_bytes = 4096;
  return config;
}

xd_comm_config join_config(const xd_unique_id& invitation, int rank = -1,
                           int timeout_ms = kTimeoutMs) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap = XD_BOOTSTRAP_JOIN;
  config.unique_id = &invitation;
  config.rank = rank;
  config.timeout_ms = timeout_ms;
  return config;
}

using Then = std::function<void(const std::shared_ptr<Comm>&)>;

std::unique_ptr<Child> child_rank(int rank, int num_ranks, const Then& then = {}) {
  return std::make_unique<Child>([=](const xd_unique_id& id, const std::function<void()>& said) {
    const auto comm = Comm::create(elastic_config(id, rank, num_ranks));
    said();
    if (then) then(comm);
    wait_to_be_killed();
  });
}

// Claims the place `rank` at the door of the invitation, and says nothing more.
std::unique_ptr<Child> child_claimant(int rank) {
  return std::make_unique<Child>(
      [=](const xd_unique_id& invitation, const std::function<void()>& said) {
        const Invitation read = decode_invitation(invitation);
        Entrance entrance(read.doors[0], read.secret, "rank", Deadline::after_ms(kTimeoutMs));
        entrance.ask({.ask = Ask::claim, .rank = rank});
        said();
        wait_to_be_killed();
      });
}

// The lowest ranks are threads of this process, the others are children, who do `then` at last;
// or the other way round.
class Doors {
 public:
  Doors(int here, int children, const Then& then = {}, bool children_first = false)
      : num_ranks_(here + children),
        first_here_(children_first ? children : 0),
        first_child_(children_first ? 0 : here),
        comms_(at(here)) {
    for (int i = 0; i < children; ++i)
      children_.push_back(child_rank(first_child_ + i, num_ranks_, then));
  }
  void meet() {
    const xd_unique_id id = new_id();
    for (const auto& child : children_) child->tell(id);
    expect_no_errors(on_threads(static_cast<int>(comms_.size()), [&](int i) {
      comms_[at(i)] = Comm::create(elastic_config(id, first_here_ + i, num_ranks_));
    }));
    for (const auto& child : children_) EXPECT_TRUE(child->is_ready());
  }
  Child& child(int rank) { return *children_[at(rank - first_child_)]; }
  void kill(int rank) { child(rank).kill(); }
  std::string pid_of(int rank) { return std::to_string(child(rank).pid()); }
  const std::shared_ptr<Comm>& shared(int rank) { return comms_[at(rank - first_here_)]; }
  Comm& comm(int rank) { return *shared(rank); }
  // These ranks of this process agree on a view.
  void agree(std::vector<int> ranks) {
    expect_no_errors(on_threads(static_cast<int>(ranks.size()), [&](int i) {
      comm(ranks[at(i)]).views().agree(Vote{}, ranks.size() == comms_.size() ? kTimeoutMs : 300);
    }));
  }
  void agree() {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < comms_.size(); ++i)
      ranks.push_back(first_here_ + static_cast<int>(i));
    agree(ranks);
  }
  // The children end, the others agree on that.
  void lose_children() {
    for (const auto& child : children_) child->kill();
    agree();
  }

 private:
  const int num_ranks_, first_here_, first_child_;
  std::vector<std::unique_ptr<Child>> children_;
  std::vector<std::shared_ptr<Comm>> comms_;
};

std::optional<Error> error_of_joining(const xd_comm_config& config) {
  return error_of([&] { Comm::create(config); });
}

void expect_joins(Doors& doors, int rank, const xd_unique_id& invitation) {
  const auto joined = Comm::create(join_config(invitation, rank));
  EXPECT_EQ(joined->rank(), rank);
  EXPECT_FALSE(doors.comm(0).errors().lost(rank));
  EXPECT_EQ(joined->views().known().now.number, 0u);
  EXPECT_EQ(joined->views().known().now.members, Members::of(rank));
}

TEST(Door, LetsAProcessIntoAPlaceThatHasEnded) {
  Doors doors(2, 1);
  doors.meet();
  doors.kill(2);
  doors.agree();
  const xd_unique_id invitation = doors.comm(1).invite();
  auto joined = Comm::create(join_config(invitation));
  EXPECT_EQ(joined->rank(), 2);
  EXPECT_EQ(joined->serial(), 1u);
  // All are let into the next view that they look for it in.
  std::thread guest([&] { joined->views().agree(Vote{}, kTimeoutMs); });
  do {
    doors.agree();
  } while (!doors.comm(0).views().known().now.members.has(2));
  guest.join();
  EXPECT_EQ(joined->views().known().now, doors.comm(0).views().known().now);
  EXPECT_EQ(joined->views().known().now.members, Members::all(3));
  // Its symmetric memory is that of the process before, as the others have it.
  void* const mine = joined->heap().allocate(64);
  const auto place = joined->heap().find(mine, 64);
  ASSERT_TRUE(place);
  std::memset(mine, 7, 64);
  EXPECT_EQ(static_cast<int>(*doors.comm(0).heap().address(2, *place, 64)), 7);
  // Calls that need all ranks are refused, as often as they are made, and finish nothing.
  for (int i = 0; i < 2; ++i) {
    for (Comm* comm : {&doors.comm(0), &doors.comm(1), joined.get()}) {
      expect_error(error_of([&] { comm->collective().barrier(); }), XD_ERROR_UNSUPPORTED,
                   "has taken the place of another process");
      EXPECT_EQ(comm->errors().fatal_error(), nullptr);
    }
  }
  joined.reset();
  EXPECT_TRUE(eventually([&] { return doors.comm(0).errors().left(2); }));
  // The process lives, though the rank has left.
  expect_error(error_of_joining(join_config(invitation, 2)), XD_ERROR_INVALID_ARGUMENT,
               {"config.rank = 2", "lives"});
}

TEST(Door, RefusesInWordsAndLetsTheNextOneIn) {
  Doors doors(2, 1);
  doors.meet();
  const xd_unique_id invitation = doors.comm(0).invite();
  for (const int rank : {0, 1, 2}) {  // of threads of this process, too
    expect_error(error_of_joining(join_config(invitation, rank)), XD_ERROR_INVALID_ARGUMENT,
                 {"config.rank = " + std::to_string(rank), "lives, expected a place"});
  }
  expect_error(error_of_joining(join_config(invitation, 2)), XD_ERROR_INVALID_ARGUMENT,
               doors.pid_of(2));
  expect_error(error_of_joining(join_config(invitation)), XD_ERROR_INVALID_ARGUMENT,
               "the processes of all 3 ranks live");
  doors.kill(2);
  doors.agree();
  expect_error(error_of_joining(join_config(invitation, 3)), XD_ERROR_INVALID_ARGUMENT,
               "config.rank = 3, expected -1 to 2");
  xd_comm_config config = join_config(invitation, 2);
  config.num_ranks = 4;
  expect_error(error_of_joining(config), XD_ERROR_INVALID_ARGUMENT, "config.num_ranks = 4");
  config = join_config(invitation, 2);
  config.host = "elsewhere";
  expect_error(error_of_joining(config), XD_ERROR_INVALID_ARGUMENT, {"'elsewhere'", "rank 2"});
  config = join_config(invitation, 2);
  config.heap_bytes = 4096;
  expect_error(error_of_joining(config), XD_ERROR_INVALID_ARGUMENT,
               "config.heap_bytes = 4096, expected 0");
  Invitation other = decode_invitation(invitation);
  other.secret[0] ^= 1;
  const xd_unique_id forged = encode_invitation(other);
  expect_error(error_of_joining(join_config(forged, 2)), XD_ERROR_MISMATCH,
               {"the rank of the invitation", "another meeting"});
  xd_unique_id damaged = invitation;
  damaged.bytes[40] ^= 1;
  expect_error(error_of_joining(join_config(damaged, 2)), XD_ERROR_INVALID_ARGUMENT, "damaged");
  damaged = invitation;
  damaged.bytes[4] ^= 0x40;
  expect_error(error_of_joining(join_config(damaged, 2)), XD_ERROR_MISMATCH, "protocol version");
  const xd_unique_id no_invitation = new_id(100);
  expect_error(error_of_joining(join_config(no_invitation, 2)), XD_ERROR_INVALID_ARGUMENT,
               "holds no invitation");
  expect_joins(doors, 2, invitation);
}

TEST(Door, RefusesAnotherVersionAndBytesThatAreNone) {
  Doors doors(2, 1);
  doors.meet();
  const xd_unique_id invitation = doors.comm(0).invite();
  const Invitation read = decode_invitation(invitation);
  const auto ends = [&](const Bytes& first) {
    const UniqueFd fd = connect_link(read.doors[0]);
    ASSERT_TRUE(fd);
    ASSERT_EQ(send_packet(fd.get(), first), Sent::done);
    Bytes buffer(4096);
    EXPECT_TRUE(
        eventually([&] { return receive_packet(fd.get(), buffer).kind == Packet::Kind::end; }));
  };
  ends(Handshake(Side::client, read.secret, 0, kProtocolVersion + 1).take_output());
  ends(Bytes(72, std::byte{1}));
  ends(Bytes(3, std::byte{1}));
  doors.kill(2);
  doors.agree();
  expect_joins(doors, 2, invitation);
}

TEST(Door, WaitsUntilAllHaveAgreedOnAViewWithoutThePlace) {
  Doors doors(2, 1);
  doors.meet();
  doors.kill(2);
  const xd_unique_id invitation = doors.comm(0).invite();
  expect_error(error_of_joining(join_config(invitation, 2, 300)), XD_ERROR_TIMEOUT,
               {"rank 0", "has not let this process in as rank 2", "agreed on a view"});
  std::shared_ptr<Comm> joined;
  std::thread joining([&] { joined = Comm::create(join_config(invitation, 2)); });
  doors.agree();
  joining.join();
  EXPECT_EQ(joined->rank(), 2);
}

// A place is not another's while a process that may write into its memory lives.
TEST(Door, KeepsAPlaceForAProcessThatHeldItUntilThatHasEnded) {
  Doors doors(2, 1);
  const auto claimant = child_claimant(2);
  doors.meet();
  doors.kill(2);
  doors.agree();
  const xd_unique_id invitation = doors.comm(0).invite();
  claimant->tell(invitation);
  ASSERT_TRUE(claimant->is_ready());
  expect_error(error_of_joining(join_config(invitation, 2, 300)), XD_ERROR_TIMEOUT,
               {"rank 0", "lets another process in"});
  claimant->kill();
  expect_joins(doors, 2, invitation);
}

TEST(Door, ForgetsAProcessThatGivesUpItsClaim) {
  Doors doors(2, 1);
  doors.meet();
  doors.kill(2);
  doors.agree();
  const xd_unique_id invitation = doors.comm(0).invite();
  const Invitation read = decode_invitation(invitation);
  for (int i = 0; i < 3; ++i) {
    Entrance entrance(read.doors[0], read.secret, "rank 0", Deadline::after_ms(kTimeoutMs));
    EXPECT_EQ(entrance.ask({.ask = Ask::claim, .rank = 2}).reply.rank, 2);
  }
  expect_joins(doors, 2, invitation);
}

// Two processes take the places of the children at once, and get to know each other.
void expect_two_join_at_once(bool children_first) {
  Doors doors(2, 2, {}, children_first);
  doors.meet();
  doors.lose_children();
  const int first = children_first ? 2 : 0;
  const xd_unique_id invitations[] = {doors.comm(first).invite(), doors.comm(first + 1).invite()};
  std::shared_ptr<Comm> joined[2];
  expect_no_errors(
      on_threads(2, [&](int i) { joined[i] = Comm::create(join_config(invitations[i])); }));
  EXPECT_EQ(joined[0]->rank() + joined[1]->rank(), children_first ? 0 + 1 : 2 + 3);
  for (const Comm* comm :
       {&doors.comm(first), &doors.comm(first + 1), joined[0].get(), joined[1].get()}) {
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_TRUE(rank == comm->rank() || eventually([&] { return !comm->errors().lost(rank); }));
    }
    EXPECT_EQ(comm->heap().all().size(), doors.comm(first).heap().all().size());
  }
}

TEST(Door, LetsTwoProcessesInAtOnce) { expect_two_join_at_once(false); }

// Then the one that is in first is the first whom the other has to ask.
TEST(Door, LetsTwoProcessesIntoTheLowestPlacesAtOnce) { expect_two_join_at_once(true); }

// ---- Processes that fail on the way, and live ---------------------------------------------------

// Another rank may have failed it.
TEST(Door, TakesAPlaceBackThatWasGivenUpBehindReady) {
  Doors doors(2, 1);
  doors.meet();
  doors.lose_children();
  const xd_unique_id invitation = doors.comm(0).invite();
  const Invitation read = decode_invitation(invitation);
  for (int i = 0; i < 3; ++i) {
    Entrance entrance(read.doors[0], read.secret, "rank 0", Deadline::after_ms(kTimeoutMs));
    entrance.ask({.ask = Ask::claim, .rank = 2});
    entrance.ask({.ask = Ask::ready});
    EXPECT_FALSE(doors.comm(0).errors().lost(2));
  }
  expect_joins(doors, 2, invitation);
}

TEST(Door, TakesAPlaceBackFromAProcessThatHeldItForTooLong) {
  Doors doors(2, 1);
  doors.meet();
  doors.lose_children();
  const xd_unique_id invitation = doors.comm(0).invite();
  const Invitation read = decode_invitation(invitation);
  {
    Entrance late(read.doors[0], read.secret, "rank 0", Deadline::after_ms(kTimeoutMs));
    late.ask({.ask = Ask::claim, .rank = 2, .number = 0});
    Entrance other(read.doors[0], read.secret, "rank 0", Deadline::after_ms(kTimeoutMs));
    // This has come later, so when its time is over that of the first is, too.
    expect_error(error_of([&] { other.ask({.ask = Ask::claim, .rank = 2, .number = 0}); }),
                 XD_ERROR_PEER_LOST, {"rank 0", "has hung up"});
    expect_error(error_of([&] { late.ask({.ask = Ask::ready}); }), XD_ERROR_PEER_LOST,
                 {"rank 0", "has hung up"});
  }
  expect_joins(doors, 2, invitation);
}

// ---- Arrangements with the process before -------------------------------------------------------

std::unique_ptr<Channel> channel_to(int peer, const std::shared_ptr<Comm>& comm,
                                    std::byte* memory) {
  return std::make_unique<Channel>(
      comm, Channel::Config{.peer = peer, .memory = memory, .bytes = 64, .counters = 1});
}

TEST(Replaced, AChannelToTheProcessBeforeIsLostForGood) {
  const auto memory_of = [](Comm& comm) {
    return static_cast<std::byte*>(comm.heap().allocate(64));
  };
  Doors doors(2, 1, [&](const std::shared_ptr<Comm>& comm) {
    const auto channel = channel_to(0, comm, memory_of(*comm));
    wait_to_be_killed();
  });
  doors.meet();
  std::byte* memory[2] = {memory_of(doors.comm(0)), memory_of(doors.comm(1))};
  std::unique_ptr<Channel> channels[2];
  expect_no_errors(on_threads(2, [&](int rank) {
    channels[rank] = channel_to(rank == 0 ? 2 : 1, doors.shared(rank), memory[rank]);
  }));
  doors.lose_children();
  const auto joined = Comm::create(join_config(doors.comm(0).invite()));
  std::byte* const theirs = memory_of(*joined);
  std::memset(theirs, 7, 64);
  const std::vector<std::byte> before(theirs, theirs + 64);
  for (int i = 0; i < 2; ++i) {
    for (const auto& error :
         {error_of([&] { channels[0]->put(0, memory[0], 64, 0); }),
          error_of([&] { channels[0]->test(0, 1); }), error_of([&] { channels[0]->wait(0, 1); })})
      expect_error(error, XD_ERROR_PEER_LOST, {"rank 2", "has been replaced"});
  }
  EXPECT_EQ(std::vector<std::byte>(theirs, theirs + 64), before);
  EXPECT_EQ(doors.comm(0).errors().fatal_error(), nullptr);
  channels[1]->put(0, memory[1], 64, 0);  // of others it is untouched
  channels[1]->wait(0, 1);
}

// Though nobody has been lost: the process had left before it ended.
TEST(Replaced, EndsWaitsThatNeedTheProcessBefore) {
  Doors doors(2, 1, [](const std::shared_ptr<Comm>& comm) { comm->close(); });
  doors.meet();
  for (const int rank : {0, 1})
    EXPECT_TRUE(eventually([&] { return doors.comm(rank).errors().left(2); }));
  doors.lose_children();
  const auto joined = Comm::create(join_config(doors.comm(0).invite()));
  EXPECT_LT(doors.comm(0).errors().dead(), 0);
  for (const bool all : {false, true}) {
    HostWait site{.phase = XD_PHASE_HOST,
                  .group = -1,
                  .operation = -1,
                  .epoch = 0,
                  .deadline = doors.comm(0).deadline()};
    (all ? site.needs_all_ranks : site.needs_first_ranks) = true;
    EXPECT_EQ(doors.comm(0).wait(1, site, [] { return false; }), Waited::lost);
  }
}

TEST(Replaced, TheNextGroupIsTheFirstThatAnyRankHas) {
  Doors doors(2, 1);
  doors.meet();
  doors.lose_children();
  const auto joined = Comm::create(join_config(doors.comm(0).invite()));
  const auto list = [&](int rank, int number) {
    Comm& comm = doors.comm(rank);
    comm.catalogue().list(
        number,
        {.call = "call", .terms = {}, .memory = comm.errors().segments(), .mask = [](NearRank) {}});
  };
  expect_error(error_of([&] { adopt_group(*joined, -1, "call"); }), XD_ERROR_UNSUPPORTED,
               "the others have no more groups");
  list(1, 5);
  EXPECT_EQ(adopt_group(*joined, -1, "call").number, 5);
  list(0, 7);
  const AdoptedGroup group = adopt_group(*joined, -1, "call");
  EXPECT_EQ(group.number, 5);
  ASSERT_EQ(group.memory.size(), 3u);
  for (const auto& memory : group.memory) EXPECT_TRUE(memory);
  EXPECT_EQ(adopt_group(*joined, 5, "call").number, 7);
  list(0, 3);
  EXPECT_EQ(adopt_group(*joined, -1, "call").number, 3);
}

// A fork that a process leaves behind holds its door open, and answers nobody.
TEST(Door, OfARankThatHasEndedIsPassedByThoughAForkOfItLives) {
  const auto rank_with_fork = [](const xd_unique_id& id, const std::function<void()>& said) {
    const auto comm = Comm::create(elastic_config(id, 0, 3));
    if (::fork() != 0) {
      said();
      wait_to_be_killed();
    }
    for (int fd = 0; fd <= 2; ++fd) ::close(fd);  // for which others may wait
    ::alarm(20);
    wait_to_be_killed();
  };
  Child first(rank_with_fork);
  const auto third = child_rank(2, 3);
  const xd_unique_id id = new_id();
  first.tell(id);
  third->tell(id);
  const auto comm = Comm::create(elastic_config(id, 1, 3));
  EXPECT_TRUE(first.is_ready() && third->is_ready());
  first.kill();
  third->kill();
  comm->views().agree(Vote{}, kTimeoutMs);
  const auto joined = Comm::create(join_config(comm->invite(), 2));
  EXPECT_EQ(joined->rank(), 2);
  EXPECT_TRUE(joined->errors().lost(0));
  EXPECT_FALSE(joined->errors().lost(1));
}

// ---- Configs ------------------------------------------------------------------------------------

TEST(Elastic, NeedsMasksAndMoreThanOneRank) {
  const xd_unique_id id = new_id(100);
  xd_comm_config config = elastic_config(id, 0, 1);
  config.on_peer_loss = XD_COMM_PEER_LOSS_FATAL;
  expect_error(error_of_joining(config), XD_ERROR_INVALID_ARGUMENT,
               {"config.on_peer_loss = FATAL", "expected MASK"});
  config = elastic_config(id, 0, 1);
  config.elastic = 2;
  expect_error(error_of_joining(config), XD_ERROR_INVALID_ARGUMENT, "config.elastic = 2");
  config.elastic = 1;
  const auto alone = Comm::create(config);
  expect_error(error_of([&] { alone->invite(); }), XD_ERROR_INVALID_ARGUMENT, "has one rank");
  config.elastic = 0;
  const auto rigid = Comm::create(config);
  expect_error(error_of([&] { rigid->invite(); }), XD_ERROR_INVALID_ARGUMENT, "elastic = 0");
}

// Whichever descriptor there is none for: that of the door is among them.
TEST(Elastic, FailsInWordsWithoutDescriptors) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const xd_unique_id id = new_id(100);
  const xd_comm_config config = elastic_config(id, 0, 1);
  std::vector<Error> errors;
  bool is_made = false;
  for (rlim_t most = 3; !is_made && most < 200; ++most) {
    const rlimit tight{most, before.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &tight);
    const auto error = error_of_joining(config);
    ::setrlimit(RLIMIT_NOFILE, &before);
    is_made = !error;
    if (error) errors.push_back(*error);
  }
  EXPECT_TRUE(is_made);
  EXPECT_FALSE(errors.empty());
  for (const Error& error : errors) EXPECT_EQ(error.status(), XD_ERROR_SYSTEM) << error.text();
}

TEST(Elastic, IsEqualOnAllRanks) {
  const xd_unique_id id = new_id();
  const auto errors = on_threads(2, [&](int rank) {
    xd_comm_config config = elastic_config(id, rank, 2);
    config.elastic = rank;
    Comm::create(config);
  });
  for (const auto& error : errors)
    expect_error(error, XD_ERROR_MISMATCH, "config.elastic = 0 on rank 0 and 1 on rank 1");
}

}  // namespace
}  // namespace xd::test
