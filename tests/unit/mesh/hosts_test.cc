// The mesh between hosts: threads of one process that are declared to be parts of several hosts,
// and talk over TCP on the loopback interface; or of one.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>

#include "base/math.h"
#include "unit/mesh/support.h"

namespace xd::test {
namespace {

// ---- Needs of several hosts ----

std::vector<Introduction> introductions_of(const std::vector<const char*>& secrets) {
  std::vector<Introduction> result;
  for (std::size_t r = 0; r < secrets.size(); ++r) {
    result.push_back(make_introduction(static_cast<int>(secrets.size()), {}, secrets[r]));
    result.back().host.part = static_cast<std::uint32_t>(r);
    introduce_address(result.back(), numeric_address("10.0.0.1").value().with_port(4711));
  }
  return result;
}

std::optional<Error> several_hosts_error(int rank, const std::vector<Introduction>& introductions,
                                         const char* secret) {
  return error_of([&] { MetRanks::of(rank, introductions, secret); });
}

TEST(SeveralHosts, NeedTheJobsSecretOnEveryRank) {
  const auto introductions = introductions_of({"s", "", "s"});
  expect_error(several_hosts_error(1, introductions, ""), XD_ERROR_INVALID_ARGUMENT,
               "XD_JOB_SECRET is not set, expected the same unguessable text on all ranks, since "
               "they are on several hosts");
  expect_error(several_hosts_error(0, introductions, "s"), XD_ERROR_MISMATCH, "rank 1 of host 1 (");
  expect_error(several_hosts_error(0, introductions_of({"s", "t"}), "s"), XD_ERROR_MISMATCH,
               "has another XD_JOB_SECRET than rank 0");
  EXPECT_FALSE(several_hosts_error(0, introductions_of({"s", "s"}), "s"));
}

TEST(SeveralHosts, NeedAddressesThatReachOneAnother) {
  auto introductions = introductions_of({"s", "s"});
  introductions[1].address = {};
  expect_error(several_hosts_error(1, introductions, "s"), XD_ERROR_INVALID_ARGUMENT,
               "the meeting point is at a loopback address");
  introduce_address(introductions[1], numeric_address("fd00::1").value().with_port(1));
  expect_error(several_hosts_error(0, introductions, "s"), XD_ERROR_MISMATCH,
               "expected addresses of one family");
  introduce_address(introductions[1], numeric_address("127.0.0.1").value().with_port(1));
  EXPECT_FALSE(several_hosts_error(0, introductions, "s")) << "parts of one host";
  introductions[0].host.boot_id[0] = '!';
  expect_error(several_hosts_error(0, introductions, "s"), XD_ERROR_MISMATCH,
               "has the address 127.0.0.1, which rank 0");
}

// A rank that would be called at such an address would call all hosts, or itself.
TEST(SeveralHosts, NeedAddressesOfTheirOwn) {
  for (const auto* const host : {"0.0.0.0", "255.255.255.255", "224.0.0.1"}) {
    auto introductions = introductions_of({"s", "s"});
    introduce_address(introductions[1], numeric_address(host).value().with_port(1));
    expect_error(several_hosts_error(0, introductions, "s"), XD_ERROR_MISMATCH,
                 std::string("address, ") + host + ", expected one of its own");
  }
}

TEST(SeveralHosts, HaveNamesOfTheirOwn) {
  auto introductions = introductions_of({"s", "s"});
  for (Introduction& i : introductions) i.host_name = {'w', 'e', 's', 't'};
  expect_error(several_hosts_error(0, introductions, "s"), XD_ERROR_MISMATCH,
               "config.host = 'west' on rank 0");
}

// ---- Silence ----

// The system asks a pause after the last sign of life, and then each pause; unless it gives up
// then, as nothing has come for too long.
TEST(Silence, AnInterruptionThatIsShorterLeavesAQuestionBehindItsEnd) {
  for (const int silence : {1000, 1999, 2000, 5000, 10'000, 15'999, 100'000, 86'400'000}) {
    SCOPED_TRACE(silence);
    const SilenceBounds bounds = bounds_of_silence(silence);
    const int begins = bounds.pause_ms, ends = begins + silence - 1;
    const int question = (ends + bounds.pause_ms - 1) / bounds.pause_ms * bounds.pause_ms;
    EXPECT_LT(question, bounds.give_up_ms);
    EXPECT_LE(bounds.give_up_ms, silence + std::max(silence / 5, 2000));
  }
}

// ---- Meshes ----

MeshOptions part(int of_host, int silence_ms = 3000) {
  return {.host_name = {},
          .net_interface = {"127.0.0.1", "the test"},
          .silence_ms = silence_ms,
          .job_secret = "a secret",
          .part_of_host = static_cast<std::uint32_t>(of_host)};
}

// All ranks as threads, started; rank r is on host host_of[r].
std::vector<Member> hosts_mesh(const std::vector<int>& host_of) {
  const int n = static_cast<int>(host_of.size());
  std::vector<Member> members(host_of.size());
  const xd_unique_id id = new_id();
  expect_no_errors(on_threads(
      n, [&](int rank) { members[at(rank)].join(id, rank, n, part(host_of[at(rank)])); }));
  return members;
}

class HostMeshes : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Hosts, HostMeshes,
                         testing::Values(std::vector{0}, std::vector{0, 0, 0}, std::vector{0, 1},
                                         std::vector{0, 0, 1, 1}, std::vector{0, 1, 1, 0, 1},
                                         std::vector{0, 0, 1, 2, 2},
                                         std::vector{2, 2, 2, 0, 1, 0}));

UniqueFd memfd_with(const std::string& text) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(::write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return fd;
}

// Even ranks send a descriptor; sizes differ.
TEST_P(HostMeshes, AllGatherCarriesBlobsToAllAndDescriptorsToNearRanks) {
  const std::vector<int>& host_of = GetParam();
  const int n = static_cast<int>(host_of.size());
  std::vector<Member> members = hosts_mesh(host_of);
  expect_no_errors(on_threads(n, [&](int rank) {
    EXPECT_EQ(members[at(rank)].mesh->local_ranks(), n);
    for (int round = 0; round < 20; ++round) {
      const auto text = [&](int r) {
        return std::to_string(r) + std::string(at((r * 5003 * round) % 32000), 'x');
      };
      const UniqueFd own = memfd_with(std::to_string(rank));
      const auto items = members[at(rank)].gather(text(rank), rank % 2 == 0 ? own.get() : -1);
      ASSERT_EQ(items.size(), host_of.size());
      for (int r = 0; r < n; ++r) {
        EXPECT_EQ(text_of(items[at(r)].blob), text(r)) << r << " in " << round;
        const int fd = items[at(r)].fd.get();
        ASSERT_EQ(fd >= 0, r != rank && r % 2 == 0 && host_of[at(r)] == host_of[at(rank)]);
        if (fd < 0) continue;
        char content = 0;
        EXPECT_EQ(::pread(fd, &content, 1, 0), 1);
        EXPECT_EQ(content, '0' + r);
        EXPECT_TRUE((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
      }
    }
  }));
}

TEST_P(HostMeshes, GoodbyesAbortsAndReportsReachEveryRank) {
  const std::vector<int>& host_of = GetParam();
  const int n = static_cast<int>(host_of.size()), last = n - 1;
  std::vector<Member> members = hosts_mesh(host_of);
  members[0].mesh->send_report(bytes_of("what went wrong"));
  members[0].mesh->send_abort();
  members[at(last)].mesh.reset();
  const auto hears = [&](int r, const std::string& entry) {
    EXPECT_TRUE(eventually([&] { return members[at(r)].diary.has(entry); })) << r << ": " << entry;
  };
  for (int r = 0; r < last; ++r) hears(r, "left " + std::to_string(last));
  for (int r = 1; r < last; ++r) {
    hears(r, "abort 0");
    const bool is_remote = host_of[at(r)] != host_of[0];
    EXPECT_EQ(members[at(r)].diary.has("report of 0: what went wrong"), is_remote) << r;
  }
}

// A letter that a rank sent before it left counts, also where a relay brings it.
TEST_P(HostMeshes, ALetterBeforeAGoodbyeCounts) {
  const std::vector<int>& host_of = GetParam();
  const int n = static_cast<int>(host_of.size());
  for (int round = 0; round < 10; ++round) {
    std::vector<Member> members = hosts_mesh(host_of);
    expect_no_errors(on_threads(n, [&](int rank) {
      const auto items = members[at(rank)].gather("last words of " + std::to_string(rank));
      members[at(rank)].mesh.reset();
      for (int r = 0; r < n; ++r)
        EXPECT_EQ(text_of(items[at(r)].blob), "last words of " + std::to_string(r));
    }));
  }
}

TEST(HostMesh, TheLateRankIsNamedWithItsHostAndNotThoseBehindIt) {
  std::vector<Member> members = hosts_mesh({0, 0, 1, 1});
  const auto errors = on_threads(4, [&](int rank) {
    if (rank != 3) members[at(rank)].gather("", -1, 1500);
  });
  for (const std::size_t r : {0U, 1U, 2U})
    expect_error(errors[r], XD_ERROR_TIMEOUT, "waited too long for rank 3 of host 1 (");
}

TEST(HostMesh, AFailureIsToldToEveryRank) {
  std::vector<Member> members = hosts_mesh({0, 0, 1, 1});
  const auto errors = on_threads(4, [&](int rank) {
    if (rank != 3) return static_cast<void>(members[at(rank)].gather(""));
    try {
      fail(XD_ERROR_SYSTEM, "no luck");
    } catch (const Error&) {
      members[3].mesh->send_failure();
    }
  });
  for (const std::size_t r : {0U, 1U, 2U}) {
    expect_error(errors[r], XD_ERROR_MISMATCH, {"rank 3 of host 1 (", "failed: no luck"});
  }
}

// Its system goes on taking what it is sent, and answers for it.
TEST(HostMesh, ARankThatStandsStillIsNotLost) {
  std::vector<Member> members(2);
  const xd_unique_id id = new_id();
  expect_no_errors(on_threads(
      2, [&](int rank) { members[at(rank)].connect(id, rank, 2, 20000, part(rank, 1000)); }));
  Member& zero = members[0];
  zero.mesh->start(zero.diary);
  const std::string letter(Mesh::kMaxBlob, 'x');
  for (int i = 0; i < 4; ++i)
    expect_error(error_of([&] { zero.gather(letter, -1, 50); }), XD_ERROR_TIMEOUT, "rank 1");
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_TRUE(zero.diary.entries().empty()) << zero.diary.entries()[0];
}

// ---- An odd rank on another host ----

// Rank 1 of two hosts with a rank each. It has met the other, and is not connected.
struct RemoteRank : OddRank {
  RemoteRank(const xd_unique_id& id, const std::atomic<bool>& other_joined)
      : OddRank(id, 1, 2, "a secret"), joined(other_joined) {
    introduce();
  }
  UniqueFd call() const {
    return tcp_connect(control_address(ranks->introductions[0]), Deadline::after_ms(5000));
  }
  void pass_time(int ms) const { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
  // The other may still be connecting when this rank has connected.
  void stay() const {
    EXPECT_TRUE(eventually([&] { return joined.load(); }));
  }

  const std::atomic<bool>& joined;
};

// Two ranks as threads; the first's outcome. It connects, and then does what it is to do.
std::optional<Error> with_remote_rank(
    const std::function<void(RemoteRank&)>& body,
    const std::function<void(Member&)>& then = [](Member&) {}) {
  const xd_unique_id id = new_id();
  Member zero;
  std::atomic<bool> joined = false;
  return on_threads(2, [&](int rank) {
    if (rank == 0) {
      zero.join(id, 0, 2, part(0));
      joined = true;
      return then(zero);
    }
    RemoteRank remote(id, joined);
    body(remote);
  })[0];
}

TEST(HostConnector, ARankThatHasNotCalledAndIsGoneIsNoticedAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const auto error = with_remote_rank([](RemoteRank&) {});
  expect_error(error, XD_ERROR_PEER_LOST,
               {"has gone while the ranks were connecting", "rank 1 of host 1 ("});
  EXPECT_LT(ms_since(start), 3000);
}

TEST(HostConnector, ARankThatIsSlowToCallIsNotLost) {
  EXPECT_FALSE(with_remote_rank([](RemoteRank& remote) {
    remote.pass_time(1500);
    remote.connect();
    remote.stay();
  }));
}

TEST(HostConnector, ARankThatGivesUpBeforeItHasCalledIsHeard) {
  const auto give_up = [](RemoteRank& remote) {
    remote.ranks->processes.processes[0].has_ended = true;  // or so it believes
    EXPECT_TRUE(error_of([&] { remote.connect(); }));
  };
  const auto error = with_remote_rank(give_up, [](Member& zero) { zero.gather(""); });
  expect_error(error, XD_ERROR_PEER_LOST,
               {"failed: rank 0", "the process ended while the ranks were connecting"});
}

// Anybody who has seen a rank's hello may send it, too.
TEST(HostConnector, AHelloWithoutAProofEndsNothing) {
  LogCapture log;
  EXPECT_FALSE(with_remote_rank([](RemoteRank& remote) {
    for (int i = 0; i < 200; ++i) {
      const UniqueFd stranger = remote.call();
      std::size_t sent = 0;
      send_some(stranger.get(), Handshake(Side::client, remote.ranks->secret, 1).take_output(),
                sent);
    }
    remote.connect();
    remote.stay();
  }));
  EXPECT_GT(log.end().size(), 0U);
}

TEST(HostConnector, ARankThatIsResetBehindItsProofIsLost) {
  const auto reset = [](RemoteRank& remote) {
    const UniqueFd fd = remote.call();
    Handshake talk(Side::client, remote.ranks->secret, 1);
    std::size_t count = 0;
    while (!talk.proven()) {
      send_some(fd.get(), talk.take_output(), count);
      std::array<std::byte, sizeof(Hello)> bytes;
      ASSERT_TRUE(receive_some(fd.get(), std::span(bytes).first(talk.wanted()), count));
      talk.receive(std::span<const std::byte>(bytes).first(count));
      if (talk.peer_greeted()) break;  // the proof is in the output
    }
    const Bytes proof = talk.take_output();
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    send_some(fd.get(), proof, count);
  };
  const auto error = with_remote_rank(reset, [](Member& zero) { zero.gather(""); });
  expect_error(error, XD_ERROR_PEER_LOST, "rank 1 of host 1 (");
}

// ----

TEST(HostMesh, OneHostOpensNoPort) {
  const std::size_t before = open_descriptors();
  std::vector<Member> members = threads_mesh(2);
  for (Member& member : members) EXPECT_EQ(member.mesh->rails().num_hosts(), 1);
  // Each rank: a link and an eventfd. Its meeting point ends in the background.
  EXPECT_TRUE(eventually([&] { return open_descriptors() == before + 4; })) << open_descriptors();
}

TEST(HostMesh, ManyRoundsLeaveNothingBehind) {
  const auto round = [] {
    std::vector<Member> members = hosts_mesh({0, 1, 1});
    expect_no_errors(on_threads(3, [&](int rank) { members[at(rank)].gather("hello"); }));
  };
  round();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const std::size_t descriptors = open_descriptors(), threads = running_threads();
  for (int i = 0; i < 20; ++i) round();
  EXPECT_TRUE(eventually([&] { return open_descriptors() <= descriptors; })) << open_descriptors();
  EXPECT_TRUE(eventually([&] { return running_threads() <= threads; })) << running_threads();
}

}  // namespace
}  // namespace xd::test
