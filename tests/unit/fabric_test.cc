// libfabric: finding it, agreeing on a provider, and puts over TCP on the loopback interface.
#include "net/fabric/fabric.h"

#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <future>

#include "base/math.h"
#include "base/tcp.h"
#include "comm/remote/adapters.h"
#include "net/engines/chaos.h"
#include "net/fabric/tag_seal.h"
#include "support/stranger.h"
#include "unit/link_support.h"
#include "unit/net_support.h"

// LeakSanitizer asks for it: libfabric 1.17 forgets connections that strangers have broken off.
extern "C" const char* __lsan_default_suppressions();   // NOLINT(bugprone-reserved-identifier)
extern "C" const char* __lsan_default_suppressions() {  // NOLINT(bugprone-reserved-identifier)
  return "leak:libfabric.so";
}

namespace xd::test {
namespace {

using Providers = std::vector<std::string>;
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

TEST(TagSeal, OpensItsOwnTagsAndNoOthers) {
  const net::TagSeal seal{.key = 0x1234'5678'9ABC'DEF0, .mask = 0x0F1E'2D3C, .has_check = 1};
  for (const std::uint32_t tag : {0u, 1u, 0x2000'0000u, UINT32_MAX}) {
    EXPECT_EQ(seal.open(seal.close(tag)), tag);
    for (int bit = 0; bit < 64; ++bit)
      EXPECT_FALSE(seal.open(seal.close(tag) ^ std::uint64_t{1} << bit)) << bit;
  }
}

// A provider that carries 32 bits leaves no room for the check.
TEST(TagSeal, HidesTagsWhereItCannotCheckThem) {
  const net::TagSeal seal{.key = 1, .mask = 0x0F1E'2D3C, .has_check = 0};
  EXPECT_EQ(seal.close(0x2000'0000), 0x2F1E'2D3Cu);
  EXPECT_EQ(seal.open(0x2F1E'2D3C), 0x2000'0000u);
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
    adapter_ = net::fabric_adapters(*library_, "127.0.0.1", net::Where::at_address).at(0);
    std::printf("libfabric %s, %s\n", net::fabric_version(*library_).c_str(),
                adapter_.provider.c_str());
  }

  Engines open(int ranks) {
    Engines engines;
    for (int r = 0; r < ranks; ++r) engines.push_back(net::open_fabric(library_, adapter_));
    return engines;
  }

  // The first two, to each other.
  static void introduce(const Engines& engines) {
    engines[0]->connect(1, engines[1]->address());
    engines[1]->connect(0, engines[0]->address());
  }

  Library library_;
  net::Adapter adapter_;
};
INSTANTIATE_TEST_SUITE_P(Versions, Fabric,
                         testing::Values(Source{"system", ""}, Source{"wheel", FABRIC_WHEEL}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(Fabric, AnInterfaceThatIsNamedIsFoundWithTheAddressThatItHas) {
  EXPECT_EQ(adapter_.name, "lo");
  const auto named = choose_adapters(*library_, {.name = "lo", .address = "127.0.0.1"});
  ASSERT_FALSE(named.empty());
  EXPECT_EQ(named[0].provider, adapter_.provider);
  ASSERT_EQ(named[0].adapters.size(), 1U);
  EXPECT_EQ(named[0].adapters[0].address, "127.0.0.1");
  EXPECT_NO_THROW(net::open_fabric(library_, named[0].adapters[0]));
  expect_error(error_of([&] { choose_adapters(*library_, {.name = "eth-9"}); }),
               XD_ERROR_INVALID_ARGUMENT, {"XD_NET_DEVICE = eth-9", "lo (tcp"});
}

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

// It is refused where the region is. The sender need not hear of it.
TEST_P(Fabric, APutWithoutTheRoomsKeyDoesNotLand) {
  Engines engines = open(2);
  std::array<std::byte, 64> here{}, there{};
  here.fill(std::byte{1});
  const auto from = engines[0]->expose(here), to = engines[1]->expose(there);
  introduce(engines);
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
  introduce(engines);
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

// It knows the region and its key, and is on a peer's host, but the peer has never heard of it.
TEST_P(Fabric, AStrangersTagIsRefusedAndPeersGoOn) {
  Engines engines = open(3);
  std::array<std::byte, 64> here{}, there{};
  const auto from = engines[0]->expose(here), to = engines[1]->expose(there);
  const auto stranger = engines[2]->expose(here);
  introduce(engines);
  Bytes guessed = engines[1]->address();
  guessed[2] ^= std::byte{1};  // of the key of its tags' seal
  engines[2]->connect(1, guessed);
  std::array<net::Events, 3> events;
  const auto deliver = [&](std::size_t sender, const net::Put& put) {
    const auto step = [&] {
      for (std::size_t r = 0; r < engines.size(); ++r) engines[r]->poll(events[r]);
    };
    ASSERT_TRUE(eventually([&] { return step(), engines[sender]->put(put); }, kGenerousMs));
    ASSERT_TRUE(eventually([&] { return step(), !events[sender].sent.empty(); }, kGenerousMs));
  };
  const net::Put put{.peer = 1, .from = from.get(), .to = to->remote(), .bytes = 0, .tag = 7};
  net::Put strange = put;
  strange.from = stranger.get();
  LogCapture log;
  deliver(2, strange);
  deliver(0, put);
  EXPECT_EQ(events[1].arrived, std::vector<std::uint32_t>{7});
  EXPECT_TRUE(events[1].failed.empty());
  const auto lines = log.end();
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_TRUE(lines[0].find("an unknown sender, or damaged bytes") != std::string::npos)
      << lines[0];
}

TcpAddress place_in(const Bytes& address) {
  sockaddr_in name;
  std::memcpy(&name, address.data() + address.size() - sizeof(name), sizeof(name));
  return from_sockaddr(reinterpret_cast<const sockaddr&>(name));
}

bool lets_in(const Bytes& address) {
  return !error_of([&] { tcp_connect(place_in(address), Deadline::after_ms(300)); });
}

// On a peer's host, before all peers are there. They get lost there, or end what is theirs.
TEST_P(Fabric, StrangersWhoAreLetInDisturbNoLinks) {
  Fleet fleet(open(2), config_of(2, 200));
  const TcpAddress place = place_in(fleet.engines[1]->address());
  for (const char* const mode : {"tags", "messages", "nonsense", "bytes"}) {
    SCOPED_TRACE(mode);
    auto says = std::async(std::launch::async, [&] {
      return stranger_says("", "127.0.0.1", "127.0.0.1", place.port(), mode);
    });
    do run_on_threads(fleet, 200);
    while (says.wait_for(std::chrono::milliseconds(0)) != std::future_status::ready);
    const std::string taken = says.get();
    std::printf("%s: %s\n", mode, taken.c_str());
    EXPECT_TRUE(taken.ends_with(" taken")) << taken;
  }
}

TEST_P(Fabric, PeersHostsAloneAreLetInAndNobodyWhenAllAreThere) {
  Engines engines = open(2);
  const Bytes address = engines[1]->address();
  EXPECT_FALSE(lets_in(address));
  introduce(engines);
  EXPECT_TRUE(lets_in(address));
  engines[1]->shut();
  EXPECT_FALSE(lets_in(address));
  engines[1]->connect(5, engines[0]->address());
  EXPECT_TRUE(lets_in(address));
}

TEST_P(Fabric, AnAddressOfAnotherKindIsRefused) {
  Engines engines = open(1);
  expect_error(error_of([&] { engines[0]->connect(1, bytes_of("nowhere")); }), XD_ERROR_MISMATCH,
               "the address of peer 1");
}

TEST_P(Fabric, AProviderThatIsNotThereIsAnError) {
  const net::Adapter nowhere{.provider = "nowhere", .name = "lo", .address = "127.0.0.1"};
  expect_error(error_of([&] { net::open_fabric(library_, nowhere); }), XD_ERROR_SYSTEM,
               "has no provider nowhere for lo 127.0.0.1");
}

}  // namespace
}  // namespace xd::test
