// Links between ranks that are threads, what they refuse, and how they tell of failures.
#include "net/links.h"

#include <algorithm>
#include <array>

#include "base/math.h"
#include "net/in_process.h"
#include "unit/link_support.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

using net::Links;

constexpr int kGenerousMs = 60000;

net::LinkConfig config_of(int slots, std::size_t slot_bytes) {
  net::LinkConfig config;
  config.slots = slots;
  config.slot_bytes = slot_bytes;
  config.digests = true;
  return config;
}

void run_on_threads(Fleet& fleet, int chunks) {
  const auto ranks = static_cast<int>(fleet.links.size());
  expect_no_errors(on_threads(ranks, [&](int rank) {
    Traffic(*fleet.links[at(rank)], 7, rank, ranks, chunks).run(Deadline::after_ms(kGenerousMs));
  }));
}

TEST(Links, CarryChunksBetweenThreadsThatSleep) {
  for (const int slots : {1, 4}) {
    Fleet fleet(net::make_in_process_engines(3), config_of(slots, 200));
    run_on_threads(fleet, 500);
  }
}

TEST(Links, CarryChunksBetweenThreadsThroughChaos) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    net::ChaosConfig chaos;
    chaos.seed = seed;
    Fleet fleet(chaos_engines(3, chaos), config_of(2, 200));
    run_on_threads(fleet, 50);
  }
}

// Sends `text` in a slot of rank 0 to rank 1.
void send_text(Fleet& fleet, const std::string& text) {
  const auto slot = fleet.links[0]->take(0);
  ASSERT_TRUE(slot);
  std::ranges::copy(bytes_of(text), slot->bytes.begin());
  fleet.links[0]->send(*slot, text.size());
}

TEST(Links, ASlotIsFreeOnlyAfterItsChunkWasGivenBack) {
  Fleet fleet(net::make_in_process_engines(2), config_of(2, 64));
  send_text(fleet, "one");
  send_text(fleet, "");
  fleet.links[0]->poll();
  EXPECT_FALSE(fleet.links[0]->take(0));
  EXPECT_FALSE(fleet.links[0]->at_rest());

  EXPECT_TRUE(fleet.links[1]->poll());
  const auto one = fleet.links[1]->next(0), none = fleet.links[1]->next(0);
  ASSERT_TRUE(one && none);
  EXPECT_FALSE(fleet.links[1]->next(0));
  EXPECT_EQ(text_of(one->bytes), "one");
  EXPECT_TRUE(none->bytes.empty());
  fleet.links[1]->give_back(*none);
  EXPECT_TRUE(fleet.links[0]->poll());
  send_text(fleet, "two");  // into the slot that came back
  EXPECT_FALSE(fleet.links[0]->take(0));
  EXPECT_EQ(text_of(one->bytes), "one");
  fleet.links[1]->give_back(*one);
  fleet.links[1]->poll();
  const auto two = fleet.links[1]->next(0);
  ASSERT_TRUE(two);
  EXPECT_EQ(text_of(two->bytes), "two");
  fleet.links[1]->give_back(*two);
  fleet.links[1]->poll();
  fleet.links[0]->poll();
  EXPECT_TRUE(fleet.links[0]->at_rest());
  EXPECT_TRUE(fleet.links[1]->at_rest());
}

TEST(Links, UsesOfASlotAreToldApartAfterMoreThan256OfThem) {
  Fleet fleet(net::make_in_process_engines(2), config_of(1, 64));
  for (int use = 0; use < 600; ++use) {
    send_text(fleet, std::to_string(use));
    fleet.links[1]->poll();
    const auto chunk = fleet.links[1]->next(0);
    ASSERT_TRUE(chunk);
    ASSERT_EQ(text_of(chunk->bytes), std::to_string(use));
    fleet.links[1]->give_back(*chunk);
    fleet.links[0]->poll();
  }
}

TEST(Links, AWaitThatEndsInTimeNamesRankAndHostAndTheLinksGoOn) {
  Fleet fleet(net::make_in_process_engines(3), config_of(2, 64));
  Links& links = *fleet.links[0];
  const auto slot = links.take(1);
  links.send(*slot, 1);
  const auto error = error_of([&] {
    links.wait_for(Deadline::after_ms(20), 1, "chunks", [&] { return bool{links.next(1)}; });
  });
  expect_error(error, XD_ERROR_TIMEOUT,
               "timed out waiting for chunks of rank 2 on host host1; it has not read 1 of the 2 "
               "slots to it");
  EXPECT_EQ(error->peer(), 2);
  EXPECT_TRUE(links.take(1));
}

TEST(Links, APeerThatTheWatchHasLostEndsEveryWait) {
  Fleet fleet(net::make_in_process_engines(2), config_of(1, 64));
  fleet.links[0]->lose(0, "its process ended");
  fleet.links[0]->lose(0, "a second reason");
  const auto error = error_of([&] {
    fleet.links[0]->wait_for(Deadline::after_ms(kGenerousMs), 0, "chunks", [] { return false; });
  });
  expect_error(error, XD_ERROR_PEER_LOST, "rank 1 on host host0: its process ended");
  EXPECT_EQ(error->peer(), 1);
  expect_error(error_of([&] { fleet.links[0]->take(0); }), XD_ERROR_PEER_LOST, "rank 1");
  expect_error(error_of([&] { fleet.links[0]->next(0); }), XD_ERROR_PEER_LOST, "rank 1");
}

TEST(Links, APutThatFailsEndsEveryWaitAndNamesRankAndHost) {
  Fleet fleet(net::make_in_process_engines(3), config_of(1, 64));
  fleet.links[2].reset();
  fleet.engines[2].reset();
  Links& links = *fleet.links[0];
  links.send(*links.take(1), 1);
  const auto error = error_of(
      [&] { links.wait_for(Deadline::after_ms(kGenerousMs), 0, "chunks", [] { return false; }); });
  expect_error(error, XD_ERROR_SYSTEM, "rank 2 on host host1: network: its engine has been closed");
  EXPECT_EQ(error->peer(), 2);
  expect_error(error_of([&] { links.poll(); }), XD_ERROR_SYSTEM, "rank 2 on host host1");
  expect_error(error_of([&] { links.take(0); }), XD_ERROR_SYSTEM, "rank 2 on host host1");
}

TEST(Links, OffersThatDifferAreRefused) {
  Engines engines = net::make_in_process_engines(2);
  Links here(*engines[0], config_of(2, 64), {{1, "far"}});
  Links there(*engines[1], config_of(2, 128), {{0, "near"}});
  expect_error(error_of([&] { here.accept(0, there.offer(0)); }), XD_ERROR_MISMATCH,
               "rank 1 on host far offers 2 slots of 128 bytes, digests 1; expected 2 of 64");
  expect_error(error_of([&] { here.accept(0, bytes_of("short")); }), XD_ERROR_MISMATCH, "rank 1");
}

TEST(Links, RefuseConfigsThatCannotBe) {
  Engines engines = net::make_in_process_engines(1);
  const auto refusal = [&](int slots, std::size_t bytes) {
    return error_of([&] { Links(*engines[0], config_of(slots, bytes), {}); });
  };
  expect_error(refusal(0, 64), XD_ERROR_INVALID_ARGUMENT, "slots = 0, expected 1 to 32");
  expect_error(refusal(33, 64), XD_ERROR_INVALID_ARGUMENT, "slots = 33, expected 1 to 32");
  expect_error(refusal(1, 0), XD_ERROR_INVALID_ARGUMENT, "slot_bytes = 0, expected 1 to");
}

// Links over an engine whose rooms and put() the test can look into.
class OpenEngine final : public net::Engine {
 public:
  explicit OpenEngine(std::unique_ptr<net::Engine> below) : below_(std::move(below)) {}

  std::size_t max_put() const override { return below_->max_put(); }
  Bytes address() const override { return below_->address(); }
  void connect(int peer, std::span<const std::byte> address) override {
    below_->connect(peer, address);
  }
  std::unique_ptr<net::Room> expose(std::span<std::byte> memory) override {
    room = memory;
    return below_->expose(memory);
  }
  bool put(const net::Put& put) override {
    net::Put changed = put;
    changed.tag ^= flipped;
    return below_->put(changed);
  }
  void poll(net::Events& events) override { below_->poll(events); }
  int sleep_on() override { return below_->sleep_on(); }
  void close() noexcept override { below_->close(); }

  std::span<std::byte> room;
  std::uint32_t flipped = 0;  // bits of the next tags

 private:
  std::unique_ptr<net::Engine> below_;
};

struct OpenFleet : Fleet {
  static Engines opened() {
    Engines engines = net::make_in_process_engines(2);
    for (auto& engine : engines) engine = std::make_unique<OpenEngine>(std::move(engine));
    return engines;
  }
  OpenFleet() : Fleet(opened(), config_of(2, 64)) {}
  OpenEngine& engine(int rank) { return static_cast<OpenEngine&>(*engines[at(rank)]); }
};

TEST(Links, AByteThatHasChangedOnTheWayIsNoticed) {
  for (const std::size_t change : {0, 4, 16, 18}) {  // use, length, first and last byte
    OpenFleet fleet;
    send_text(fleet, "abc");
    const auto room = fleet.engine(1).room;
    room[room.size() / 2 + change] ^= std::byte{0x40};
    EXPECT_TRUE(fleet.links[1]->poll());
    const auto error = error_of([&] { fleet.links[1]->next(0); });
    expect_error(error, XD_ERROR_INTERNAL, "rank 0 on host host0: ");
    EXPECT_EQ(error->peer(), 0);
  }
}

TEST(Links, TagsThatCannotBeAreNoticed) {
  struct Case {
    std::uint32_t flipped;
    const char* text;
  };
  for (const Case& bad :
       {Case{1u << 30, "a put arrived with the tag"},       // no such kind
        Case{1u << 28, "a put arrived with the tag"},       // slot 16 of 2
        Case{1u << 3, "a put arrived with the tag"},        // partner 8 of 1
        Case{1u << 17, "use 3 (mod 256) of its slot 0"},    // for the third time at once
        Case{3u << 29, "it gave back use 1 (mod 256)"}}) {  // a credit for nothing
    OpenFleet fleet;
    fleet.engine(0).flipped = bad.flipped;
    send_text(fleet, "abc");
    expect_error(error_of([&] { fleet.links[1]->poll(); }), XD_ERROR_INTERNAL, bad.text);
    expect_error(error_of([&] { fleet.links[1]->next(0); }), XD_ERROR_INTERNAL, bad.text);
  }
}

TEST(Chaos, ASourceThatChangesBeforeItWasSentIsNoticed) {
  net::ChaosConfig config;
  config.seed = 5;
  Engines engines = chaos_engines(2, config);
  std::array<std::byte, 64> here{}, there{};
  const auto from = engines[0]->expose(here), to = engines[1]->expose(there);
  engines[0]->connect(1, engines[1]->address());
  const net::Put put{.peer = 1, .from = from.get(), .to = to->remote(), .bytes = here.size()};
  while (!engines[0]->put(put)) {
  }
  here[9] = std::byte{1};
  net::Events events;
  expect_error(error_of([&] {
                 while (events.sent.empty()) engines[0]->poll(events);
               }),
               XD_ERROR_INTERNAL, "the source of a put changed before it was sent");
}

TEST(InProcess, APutBeyondTheRoomFailsAndTouchesNothing) {
  Engines engines = net::make_in_process_engines(2);
  std::array<std::byte, 32> here{}, there{};
  here.fill(std::byte{1});
  const auto from = engines[0]->expose(here), to = engines[1]->expose(there);
  engines[0]->connect(1, engines[1]->address());
  net::Put put{.peer = 1, .from = from.get(), .to = to->remote(), .to_offset = 1, .bytes = 32};
  EXPECT_TRUE(engines[0]->put(put));
  net::Events events;
  engines[0]->poll(events);
  ASSERT_EQ(events.failed.size(), 1u);
  EXPECT_EQ(events.failed[0].peer, 1);
  EXPECT_EQ(events.failed[0].text, "the put reaches beyond the room");
  EXPECT_TRUE(events.sent.empty());
  EXPECT_FALSE(engines[0]->put(put));
  EXPECT_EQ(there, decltype(there){});
  expect_error(error_of([&] { engines[0]->connect(1, bytes_of("nowhere")); }), XD_ERROR_MISMATCH,
               "the address of peer 1");
}

}  // namespace
}  // namespace xd::test
