// libfabric: finding it, agreeing on a provider, and puts over TCP on the loopback interface.
#include "net/fabric/fabric.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>

#include "base/fd.h"
#include "base/math.h"
#include "net/chaos.h"
#include "unit/link_support.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

using Providers = std::vector<std::string>;
using net::Links;
using Library = std::shared_ptr<const net::FabricLibrary>;

TEST(FabricLibrary, ThatIsNowhereIsUnsupportedAndSaysHowToInstallIt) {
  expect_error(error_of([] { net::load_fabric("libfabric-nowhere.so.1"); }), XD_ERROR_UNSUPPORTED,
               "apt-get install libfabric");
}

TEST(FabricAgreement, TakesTheBestProviderThatAllRanksHave) {
  const std::array<Providers, 3> lists{Providers{"efa", "tcp", "tcp;ofi_rxm"},
                                       Providers{"tcp", "tcp;ofi_rxm"}, Providers{"efa", "tcp"}};
  EXPECT_EQ(net::agree_on_provider(lists), "tcp");
  EXPECT_EQ(net::agree_on_provider(std::span(lists).first(1)), "efa");
}

TEST(FabricAgreement, IsRefusedWithEverybodysListWhereThereIsNone) {
  const std::array<Providers, 3> lists{Providers{"efa", "tcp"}, Providers{"tcp;ofi_rxm"},
                                       Providers{}};
  expect_error(error_of([&] { net::agree_on_provider(lists); }), XD_ERROR_MISMATCH,
               "no provider of libfabric is on all ranks: rank 0: efa tcp; rank 1: tcp;ofi_rxm; "
               "rank 2: none");
}

// The libraries that the tests may find: the system's, and a newer one that the tests install. Each
// test runs in a process of its own, which therefore has one of them.
struct Source {
  const char* name;
  const char* file;
};

class Fabric : public testing::TestWithParam<Source> {
 protected:
  void SetUp() override {
    try {
      library_ = net::load_fabric(GetParam().file);
    } catch (const Error& error) {
      if (error.status() != XD_ERROR_UNSUPPORTED) throw;
      GTEST_SKIP() << error.text();
    }
    const Providers providers = net::fabric_providers(*library_, "127.0.0.1");
    provider_ = net::agree_on_provider(std::span(&providers, 1));
    std::printf("libfabric %s, %s\n", net::fabric_version(*library_).c_str(), provider_.c_str());
  }

  Engines open(int ranks) {
    Engines engines;
    for (int r = 0; r < ranks; ++r)
      engines.push_back(net::open_fabric(library_, provider_, "127.0.0.1"));
    return engines;
  }

  Library library_;
  std::string provider_;
};
INSTANTIATE_TEST_SUITE_P(Versions, Fabric,
                         testing::Values(Source{"system", ""}, Source{"wheel", FABRIC_WHEEL}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(Fabric, LinksCarryChunksBetweenThreads) {
  Fleet fleet(open(3), config_of(2, 200));
  run_on_threads(fleet, 200);
}

// Pieces of puts, in any order, over a real network stack.
TEST_P(Fabric, LinksCarryChunksThroughChaos) {
  const auto world = net::make_chaos_world();
  Engines engines = open(2);
  for (std::size_t r = 0; r < engines.size(); ++r) {
    net::ChaosConfig chaos;
    chaos.seed = 1 + r;
    engines[r] = net::make_chaos(std::move(engines[r]), world, chaos);
  }
  Fleet fleet(std::move(engines), config_of(2, 200));
  run_on_threads(fleet, 50);
}

// It is refused where the room is. The sender need not hear of it.
TEST_P(Fabric, APutWithoutTheRoomsKeyDoesNotLand) {
  Engines engines = open(2);
  std::array<std::byte, 64> here{}, there{};
  here.fill(std::byte{1});
  const auto from = engines[0]->expose(here), to = engines[1]->expose(there);
  engines[0]->connect(1, engines[1]->address());
  net::Put put{.peer = 1, .from = from.get(), .to = to->remote(), .bytes = here.size()};
  put.to.key ^= 1;
  net::Events events;
  const auto step = [&] {
    for (const auto& engine : engines) engine->poll(events);
  };
  ASSERT_TRUE(eventually([&] { return step(), engines[0]->put(put); }, kGenerousMs));
  EXPECT_FALSE(eventually([&] { return step(), !events.arrived.empty(); }, 300));
  EXPECT_EQ(there, decltype(there){});
}

// `sent` may need the peer's polls until the put has arrived there, whatever its length, but no
// longer: this is how ranks may part.
TEST_P(Fabric, APutThatHasArrivedIsSentWithoutThePeer) {
  Engines engines = open(2);
  std::vector<std::byte> here(std::size_t{4} << 20), there(here.size());
  const auto from = engines[0]->expose(here), to = engines[1]->expose(there);
  engines[0]->connect(1, engines[1]->address());
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{16}, std::size_t{4096}, here.size()}) {
    SCOPED_TRACE(bytes);
    std::array<net::Events, 2> events;
    const net::Put put{.peer = 1, .from = from.get(), .to = to->remote(), .bytes = bytes, .tag = 1};
    const auto step = [&] {
      for (std::size_t r = 0; r < engines.size(); ++r) engines[r]->poll(events[r]);
    };
    ASSERT_TRUE(eventually([&] { return step(), engines[0]->put(put); }, kGenerousMs));
    ASSERT_TRUE(eventually([&] { return step(), !events[1].arrived.empty(); }, kGenerousMs));
    EXPECT_TRUE(eventually([&] { return engines[0]->poll(events[0]), !events[0].sent.empty(); },
                           kGenerousMs));
  }
}

TEST_P(Fabric, AnAddressOfAnotherKindIsRefused) {
  Engines engines = open(1);
  expect_error(error_of([&] { engines[0]->connect(1, bytes_of("nowhere")); }), XD_ERROR_MISMATCH,
               "the address of peer 1");
}

TEST_P(Fabric, AProviderThatIsNotThereIsAnError) {
  expect_error(error_of([&] { net::open_fabric(library_, "nowhere", "127.0.0.1"); }),
               XD_ERROR_SYSTEM, "has no provider nowhere for 127.0.0.1");
}

// ---- Ranks as processes ----

// Connections between all ranks, made before they part.
class Wires {
 public:
  explicit Wires(int ranks) {
    for (int r = 0; r < ranks; ++r) ends_.emplace_back(at(ranks));
    for (int r = 0; r < ranks; ++r) {
      for (int other = r + 1; other < ranks; ++other) {
        int pair[2];
        if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
          fail_errno("socketpair", errno);
        ends_[at(r)][at(other)].reset(pair[0]);
        ends_[at(other)][at(r)].reset(pair[1]);
      }
    }
  }
  void send(int rank, int other, std::span<const std::byte> bytes) const {
    if (::send(ends_[at(rank)][at(other)].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0)
      fail_errno("send", errno);
  }
  Bytes receive(int rank, int other) const {
    Bytes bytes(4096);
    const ssize_t size = ::recv(ends_[at(rank)][at(other)].get(), bytes.data(), bytes.size(), 0);
    if (size < 0) fail_errno("recv", errno);
    bytes.resize(at(size));
    return bytes;
  }
  bool has_news(int rank, int other) const {
    pollfd one{ends_[at(rank)][at(other)].get(), POLLIN, 0};
    return ::poll(&one, 1, 0) > 0;
  }
  // Waits for all ranks.
  void meet(int rank) const {
    const int ranks = static_cast<int>(ends_.size());
    for (int p = 0; p + 1 < ranks; ++p) send(rank, rank_of_partner(rank, p), bytes_of("here"));
    for (int p = 0; p + 1 < ranks; ++p) receive(rank, rank_of_partner(rank, p));
  }

 private:
  std::vector<std::vector<UniqueFd>> ends_;
};

// The engine and the links of one rank, connected.
struct Seat {
  std::unique_ptr<net::Engine> engine;
  std::optional<net::Links> links;

  Seat(std::unique_ptr<net::Engine> own, int rank, int ranks, const Wires& wires,
       net::LinkConfig config)
      : engine(std::move(own)) {
    std::vector<net::LinkPartner> partners;
    for (int p = 0; p + 1 < ranks; ++p) partners.push_back({rank_of_partner(rank, p), "here"});
    config.rank = rank;
    links.emplace(*engine, config, partners);
    for (int p = 0; p + 1 < ranks; ++p) wires.send(rank, partners[at(p)].rank, links->offer(p));
    for (int p = 0; p + 1 < ranks; ++p) links->accept(p, wires.receive(rank, partners[at(p)].rank));
    wires.meet(rank);
  }
};

// Runs body(rank) in a process of its own, which ends with 0 unless the body throws.
template <class Body>
pid_t fork_rank(int rank, Body&& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  try {
    body(rank);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    ::_exit(1);
  }
  ::_exit(0);
}

TEST_P(Fabric, LinksCarryChunksBetweenProcesses) {
  constexpr int kRanks = 3;
  const Wires wires(kRanks);
  const auto body = [&](int rank) {
    Seat seat(std::move(open(1)[0]), rank, kRanks, wires, config_of(2, 200));
    Traffic(*seat.links, 9, rank, kRanks, 100).run(Deadline::after_ms(kGenerousMs));
    wires.meet(rank);
  };
  std::vector<pid_t> children;
  for (int r = 1; r < kRanks; ++r) children.push_back(fork_rank(r, body));
  const auto error = error_of([&] { body(0); });
  EXPECT_FALSE(error) << error->text();
  for (const pid_t child : children) {
    if (error) ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

// The engine may notice or not, as the contract says: either way the wait ends and names the rank.
TEST_P(Fabric, AKilledPeerEndsTheWaitInAnErrorThatNamesIt) {
  const Wires wires(2);
  const auto sit = [&](int rank) {
    return Seat(std::move(open(1)[0]), rank, 2, wires, config_of(4, 200));
  };
  const pid_t child = fork_rank(1, [&](int rank) {
    Seat seat = sit(rank);
    seat.links->wait_for(Deadline::after_ms(kGenerousMs), 0, "a chunk",
                         [&] { return seat.links->next(0).has_value(); });
    wires.send(1, 0, bytes_of("first chunk"));
    ::pause();
  });
  Seat seat = sit(0);
  Links& links = *seat.links;
  links.send(*links.take(0), 100);
  // The child polls until it has the chunk, and this rank until the child has.
  const auto arrived = [&] { return wires.has_news(0, 1); };
  ASSERT_TRUE(eventually([&] { return links.poll(), arrived(); }, kGenerousMs));
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const auto error = error_of([&] {
    while (const auto slot = links.take(0)) links.send(*slot, 100);
    links.wait_for(Deadline::after_ms(500), 0, "credits", [&] { return links.at_rest(); });
  });
  ASSERT_TRUE(error);
  EXPECT_TRUE(error->status() == XD_ERROR_SYSTEM || error->status() == XD_ERROR_TIMEOUT);
  EXPECT_EQ(error->peer(), 1);
  EXPECT_NE(error->text().find("rank 1 on host here"), std::string::npos) << error->text();
  std::printf("%s\n", error->what());
}

}  // namespace
}  // namespace xd::test
