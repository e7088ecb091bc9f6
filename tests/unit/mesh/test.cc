// The mesh between threads of one process.
#include "meet/mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "base/warning_limit.h"
#include "meet/introduction.h"
#include "meet/packet.h"
#include "unit/mesh/support.h"

namespace xd::test {
namespace {

// The kernel tells of the unread message first.
TEST(MeshSocket, WhatAPeerSentBeforeItClosedUponUnreadMessagesIsReceived) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd here(ends[0]);
  UniqueFd there(ends[1]);
  ASSERT_EQ(send_packet(here.get(), bytes_of("never read")), Sent::done);
  EXPECT_FALSE(has_packet(here.get()));
  for (const char* text : {"first", "goodbye"})
    ASSERT_EQ(send_packet(there.get(), bytes_of(text)), Sent::done);
  there.reset();
  std::array<std::byte, 64> buffer;
  EXPECT_TRUE(has_packet(here.get()));
  for (const char* text : {"first", "goodbye"}) {
    const Packet packet = receive_packet(here.get(), buffer);
    ASSERT_EQ(packet.kind, Packet::Kind::data) << text;
    EXPECT_EQ(text_of(packet.bytes), text);
  }
  EXPECT_FALSE(has_packet(here.get()));
  EXPECT_EQ(receive_packet(here.get(), buffer).kind, Packet::Kind::end);
}

TEST(Mesh, BlobsMayBeEmptyOrAsLargeAsAllowed) {
  std::vector<Member> members = threads_mesh(2);
  expect_no_errors(on_threads(2, [&](int rank) {
    for (const std::size_t size : {std::size_t{0}, Mesh::kMaxBlob}) {
      const auto items = members[static_cast<std::size_t>(rank)].gather(std::string(size, 'x'));
      EXPECT_EQ(items[0].blob.size() + items[1].blob.size(), 2 * size);
    }
  }));
}

TEST(Mesh, MissingRanksAreNamed) {
  std::vector<Member> members = threads_mesh(4);
  const auto start = std::chrono::steady_clock::now();
  const auto errors = on_threads(4, [&](int rank) {
    if (rank < 2) members[static_cast<std::size_t>(rank)].gather("", -1, 200);
  });
  EXPECT_LT(ms_since(start), 1000);
  expect_error(errors[0], XD_ERROR_TIMEOUT, "rank 0 waited too long for ranks 2, 3");
  expect_error(errors[1], XD_ERROR_TIMEOUT, "rank 1 waited too long for ranks 2, 3");
}

TEST(Mesh, GoodbyeIsReportedOnceAndEndsWaits) {
  std::vector<Member> members = threads_mesh(3);
  const auto errors = on_threads(3, [&](int rank) {
    if (rank != 1) return static_cast<void>(members[static_cast<std::size_t>(rank)].gather(""));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    members[1].mesh.reset();
  });
  expect_error(errors[0], XD_ERROR_PEER_LOST, "rank 1 has left");
  expect_error(errors[2], XD_ERROR_PEER_LOST, "rank 1 has left");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(members[0].diary.entries(), std::vector<std::string>{"left 1"});
  EXPECT_EQ(members[2].diary.entries(), std::vector<std::string>{"left 1"});
}

// Connects two ranks, of which the first reads nothing before it is started.
void connect_and_join(Member& zero, Member& one) {
  const xd_unique_id id = new_id();
  expect_no_errors(on_threads(2, [&](int rank) {
    if (rank == 0) zero.connect(id, 0, 2);
    if (rank == 1) one.join(id, 1, 2);
  }));
}

TEST(Mesh, WhatWasSentBeforeAGoodbyeCounts) {
  Member zero, one;
  connect_and_join(zero, one);
  // Rank 0 reads nothing before it starts: rank 1 gets no answer, but what it sent is on its way.
  expect_error(error_of([&] { one.gather("early", -1, 50); }), XD_ERROR_TIMEOUT, "rank 0");
  one.mesh.reset();
  EXPECT_TRUE(zero.diary.entries().empty());
  zero.mesh->start(zero.diary);
  EXPECT_TRUE(eventually([&] { return zero.diary.has("left 1"); }));
  EXPECT_EQ(text_of(zero.gather("late")[1].blob), "early");
  expect_error(error_of([&] { zero.gather("later"); }), XD_ERROR_PEER_LOST, "rank 1 has left");
}

TEST(Mesh, AGoodbyeWaitsForAPeerThatIsBehindWithReading) {
  Member zero, one;
  connect_and_join(zero, one);
  for (int i = 0; i < 3000; ++i) one.mesh->send_abort();  // more than there is room for
  std::thread leaves([&] { one.mesh.reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  zero.mesh->start(zero.diary);
  EXPECT_TRUE(eventually([&] { return zero.diary.entries().size() == 2; }));
  leaves.join();
  EXPECT_EQ(zero.diary.entries(), (std::vector<std::string>{"abort 1", "left 1"}));
}

TEST(Mesh, ARankThatLeavesDoesNotWaitForEverForAPeerThatDoesNotRead) {
  Member zero, one;
  connect_and_join(zero, one);
  for (int i = 0; i < 3000; ++i) one.mesh->send_abort();
  const auto start = std::chrono::steady_clock::now();
  one.mesh.reset();
  EXPECT_LT(ms_since(start), 5000);
}

TEST(Mesh, AForkedChildMayDestroyItsCopySilently) {
  std::vector<Member> members = threads_mesh(2);
  const pid_t child = ::fork();
  if (child == 0) {
    members.clear();
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  expect_no_errors(on_threads(2, [&](int r) { members[static_cast<std::size_t>(r)].gather(""); }));
  EXPECT_TRUE(members[0].diary.entries().empty());
  EXPECT_TRUE(members[1].diary.entries().empty());
}

// ---- Odd ranks ----

TEST(Mesh, ARankThatSendsNonsenseIsGivenUpWithOneLine) {
  const auto head = [](MeshMessageType type, std::uint32_t has_descriptor, std::uint64_t round) {
    const MeshHeader header{type, has_descriptor, round, 1};
    const auto bytes = std::as_bytes(std::span(&header, 1));
    return Bytes(bytes.begin(), bytes.end());
  };
  const std::vector<Bytes> nonsense{
      bytes_of("?"),
      Bytes(70000),                                 // larger than any message
      head(static_cast<MeshMessageType>(9), 0, 0),  // unknown
      head(MeshMessageType::exchange, 1, 0),        // announces a descriptor that is not there
      head(MeshMessageType::exchange, 0, 1),        // a round that no rank can have reached
      head(MeshMessageType::goodbye, 0, 7)};
  for (std::size_t i = 0; i < nonsense.size(); ++i) {
    const xd_unique_id id = new_id();
    Member zero;
    LogCapture log;
    expect_no_errors(on_threads(2, [&](int rank) {
      if (rank == 0) return zero.join(id, 0, 2);
      OddRank odd(id, 1, 2);
      odd.introduce();
      odd.connect();
      EXPECT_EQ(send_packet(odd.links[0].get(), nonsense[i]), Sent::done);
      EXPECT_TRUE(eventually([&] { return zero.diary.has("lost 1"); })) << i;
      send_packet(odd.links[0].get(), head(MeshMessageType::goodbye, 0, 0));
    }));
    expect_error(error_of([&] { zero.gather(""); }), XD_ERROR_PEER_LOST, "rank 1");
    EXPECT_EQ(zero.diary.entries().size(), 1U);
    EXPECT_EQ(log.end().size(), 1U) << i;
  }
}

TEST(Mesh, StrangersOnTheSocketAreRefused) {
  const xd_unique_id id = new_id();
  Member zero, one;
  LogCapture log;
  UniqueFd silent;  // until all ranks are connected
  std::optional<OddRank> odd;
  const auto errors = on_threads(3, [&](int rank) {
    if (rank == 0) return zero.join(id, 0, 3);
    if (rank == 1) return one.join(id, 1, 3);
    odd.emplace(id, 2, 3);
    odd->introduce();
    const Tag& listener = odd->ranks->introductions[0].socket_name;
    const UniqueFd garbage = connect_link(listener);
    send_packet(garbage.get(), bytes_of("let me in"));
    const UniqueFd wrong_secret = connect_link(listener);
    send_packet(wrong_secret.get(),
                Handshake(Side::client, make_random<Secret>(), 2).take_output());
    silent = connect_link(listener);
    pollfd ends[]{{garbage.get(), 0, 0}, {wrong_secret.get(), 0, 0}};
    EXPECT_TRUE(eventually([&] { return ::poll(ends, 2, 0) == 2; }));
    odd->connect();
  });
  const auto lines = log.end();
  expect_no_errors(errors);
  ASSERT_EQ(lines.size(), 2U) << testing::PrintToString(lines);
  expect_words(lines[0], {"does not speak this library's protocol"});
  expect_words(lines[1], {"means another meeting"});
}

TEST(Mesh, ThousandsOfStrangersFillNoLog) {
  constexpr int kStrangers = 200;
  const xd_unique_id id = new_id();
  Member zero;
  LogCapture log;
  std::optional<OddRank> odd;
  const auto errors = on_threads(2, [&](int rank) {
    if (rank == 0) return zero.join(id, 0, 2);
    odd.emplace(id, 1, 2);
    odd->introduce();
    for (int i = 0; i < kStrangers; ++i) {
      UniqueFd stranger;
      ASSERT_TRUE(eventually([&] {  // the listener has room for a few
        stranger = connect_link(odd->ranks->introductions[0].socket_name);
        return static_cast<bool>(stranger);
      }));
      send_packet(stranger.get(), bytes_of("let me in"));
      pollfd end{stranger.get(), 0, 0};
      ASSERT_TRUE(eventually([&] { return ::poll(&end, 1, 0) == 1; }));
    }
    odd->connect();
  });
  const auto lines = log.end();
  expect_no_errors(errors);
  ASSERT_GE(lines.size(), 2U);
  EXPECT_LE(lines.size(), 2U * (WarningLimit::kLines + 1)) << "two intervals on a slow machine";
  expect_words(lines[0], {"does not speak this library's protocol"});
  expect_words(lines.back(), {"more connections refused"});
}

TEST(Mesh, ARankLostBeforeItIsConnectedIsNamed) {
  const xd_unique_id id = new_id();
  const auto errors = on_threads(3, [&](int rank) {
    Member member;
    if (rank != 1) return member.connect(id, rank, 3, 3000);
    OddRank odd(id, 1, 3);
    odd.introduce();  // and is gone
  });
  // Rank 2 calls rank 1, which does not answer. Rank 0, which rank 1 would have called, hears of it
  // when rank 2 gives up.
  expect_error(errors[2], XD_ERROR_PEER_LOST, "rank 1 has gone");
  expect_error(errors[0], XD_ERROR_PEER_LOST, "rank 2");
}

TEST(Mesh, ARankThatNeverConnectsIsNamedInTime) {
  const xd_unique_id id = new_id();
  const auto start = std::chrono::steady_clock::now();
  const auto errors = on_threads(2, [&](int rank) {
    Member member;
    if (rank == 0) return member.connect(id, 0, 2, 500);
    OddRank odd(id, 1, 2);
    odd.introduce();
  });
  expect_error(errors[0], XD_ERROR_TIMEOUT, "rank 1 did not connect to rank 0");
  EXPECT_LT(ms_since(start), 1500);
}

TEST(Mesh, OnlyMeetingRanksCanBePeers) {
  const Introduction own = make_introduction(4);
  EXPECT_FALSE(error_of([&] { check_peer(0, own, 1, make_introduction(4)); }));
  const auto error_with = [&](auto change) {
    Introduction theirs = make_introduction(4);
    change(theirs);
    return error_of([&] { check_peer(0, own, 1, theirs); });
  };
  expect_error(error_with([](auto& i) { i.version = 9; }), XD_ERROR_MISMATCH,
               concat("rank 1 speaks protocol version 9, expected ", kProtocolVersion).c_str());
  expect_error(error_with([](auto& i) { i.num_ranks = 5; }), XD_ERROR_MISMATCH, "num_ranks = 5");
}

// Counts the watch thread's ticks.
class Clockwork final : public MeshEvents {
 public:
  void on_lost(const Loss&) override {}
  void on_left(int) override {}
  void on_abort(int) override {}
  void on_report(int, std::span<const std::byte>) override {}
  void on_end(xd_status, int) noexcept override {}
  int tick_ms() const override { return 5; }
  void on_tick() override { ++ticks; }
  std::atomic<int> ticks{0};
};

TEST(Mesh, TicksComeWhileNothingElseDoes) {
  Clockwork events[2];
  std::unique_ptr<Mesh> meshes[2];
  const xd_unique_id id = new_id();
  expect_no_errors(on_threads(2, [&](int rank) {
    const auto bootstrap = make_bootstrap(id_config(id, rank, 2));
    meshes[rank] = Mesh::connect(*bootstrap, Deadline::after_ms(20000));
    meshes[rank]->start(events[rank]);
  }));
  EXPECT_TRUE(eventually([&] { return events[0].ticks > 3 && events[1].ticks > 3; }));
}

}  // namespace
}  // namespace xd::test
