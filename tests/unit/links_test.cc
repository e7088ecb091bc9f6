// Links between ranks that are threads, what they refuse, and how they tell of failures.
#include "net/links.h"

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <utility>

#include "base/interrupt.h"
#include "base/math.h"
#include "net/engines/in_process.h"
#include "net/engines/layer.h"
#include "unit/link_support.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

using net::Links;

constexpr int kMany = 1000;  // calls of poll(): chaos holds nothing back for as long

TEST(Links, CarryChunksBetweenThreadsThatSleep) {
  for (const int frames : {1, 4}) {
    Fleet fleet(net::make_in_process_engines(3), config_of(frames, 200));
    run_on_threads(fleet, 500);
  }
}

bool all_connected(Fleet& fleet) {
  bool all = true;
  for (const auto& links : fleet.links) {
    links->poll();
    all = all && links->all_connected();
  }
  return all;
}

TEST(Links, PartnersGreetOneAnotherBeforeTheyRelyOnTheirConnections) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    Fleet fleet(chaos_engines(3, seed), config_of(1, 200));
    EXPECT_EQ(fleet.links[2]->first_ungreeted(), 0);
    for (const auto& links : fleet.links) links->greet();
    ASSERT_TRUE(eventually([&] { return all_connected(fleet); }, kGenerousMs));
    for (const auto& links : fleet.links) {
      EXPECT_EQ(links->first_ungreeted(), -1);
      EXPECT_TRUE(links->at_rest());
    }
    run_on_threads(fleet, 20);
  }
}

// Rank 1 answers rank 0, and greets nobody by itself.
TEST(Links, OnlyTheLowerRankOfTwoGreets) {
  Fleet fleet(net::make_in_process_engines(2), config_of(1, 64));
  fleet.links[1]->greet();
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(all_connected(fleet));
  EXPECT_EQ(fleet.links[0]->first_ungreeted(), 0);
  fleet.links[0]->greet();
  EXPECT_TRUE(eventually([&] { return all_connected(fleet); }, kGenerousMs));
  fleet.links[0]->greet();
  expect_error(error_of([&] { fleet.links[1]->poll(); }), XD_ERROR_INTERNAL,
               "rank 0 on host host0: it greets twice");
}

// Sends `text` in a frame of rank 0 to rank 1.
void send_text(Fleet& fleet, const std::string& text) {
  const auto frame = fleet.links[0]->take(0);
  ASSERT_TRUE(frame);
  std::ranges::copy(bytes_of(text), frame->bytes.begin());
  fleet.links[0]->send(*frame, text.size());
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
  send_text(fleet, "two");  // into the frame that came back
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

TEST(Links, AChunkThatIsSentArrivesThoughItsSenderDoesNothingMore) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Fleet fleet(chaos_engines(2, seed), config_of(1, 64));
    Links &sender = *fleet.links[0], &receiver = *fleet.links[1];
    EXPECT_TRUE(sender.is_sent(0, 0));
    send_text(fleet, "one");
    EXPECT_FALSE(sender.is_sent(0, 0));
    for (int i = 0; i < kMany && !sender.is_sent(0, 0); ++i) fleet.links[i % 2]->poll();
    ASSERT_TRUE(sender.is_sent(0, 0)) << seed;
    EXPECT_FALSE(sender.holds_back());
    std::optional<Links::Chunk> chunk;
    for (int i = 0; i < kMany && !chunk; ++i) {
      receiver.poll();
      chunk = receiver.next(0);
    }
    ASSERT_TRUE(chunk) << seed;
    EXPECT_EQ(text_of(chunk->bytes), "one");
    receiver.give_back(*chunk);
    for (int i = 0; i < kMany && !sender.at_rest(); ++i) fleet.links[i % 2]->poll();
    EXPECT_TRUE(sender.at_rest()) << seed;
    EXPECT_TRUE(sender.is_sent(0, 0));
  }
}

TEST(Links, PutsAndTheirBytesAreCountedWithHeadersAndCredits) {
  Fleet fleet(net::make_in_process_engines(2), config_of(2, 64));
  EXPECT_EQ(fleet.links[0]->sent().puts, 0u);
  send_text(fleet, "one");
  send_text(fleet, "three");
  fleet.links[1]->poll();
  while (const auto chunk = fleet.links[1]->next(0)) fleet.links[1]->give_back(*chunk);
  EXPECT_EQ(fleet.links[0]->sent().puts, 2u);
  EXPECT_EQ(fleet.links[0]->sent().bytes, 2 * 16 + 3 + 5u);
  EXPECT_EQ(fleet.links[1]->sent().puts, 2u);
  EXPECT_EQ(fleet.links[1]->sent().bytes, 0u);
}

TEST(Links, ASlotIsUsedMoreThan256Times) {
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
  const auto frame = links.take(1);
  links.send(*frame, 1);
  const auto error = error_of([&] {
    links.wait_for(Deadline::after_ms(20), 1, "chunks", [&] { return bool{links.next(1)}; });
  });
  expect_error(error, XD_ERROR_TIMEOUT,
               "timed out waiting for chunks of rank 2 on host host1; it has not read 1 of the 2 "
               "frames to it");
  EXPECT_EQ(error->peer(), 2);
  EXPECT_TRUE(links.take(1));
}

TEST(Links, AWaitOfNobodyInParticularNamesTheFirstThatHasNotRead) {
  Fleet fleet(net::make_in_process_engines(3), config_of(2, 64));
  Links& links = *fleet.links[0];
  const auto wait = [&] {
    return error_of(
        [&] { links.wait_for(Deadline::after_ms(20), -1, "credits", [] { return false; }); });
  };
  auto error = wait();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->text(), "timed out waiting for credits");
  EXPECT_EQ(error->peer(), -1);
  ASSERT_TRUE(links.take(0));  // not sent, so rank 1 has nothing to read
  EXPECT_EQ(links.first_unread(), -1);
  links.send(*links.take(1), 1);
  EXPECT_EQ(links.first_unread(), 1);
  error = wait();
  expect_error(error, XD_ERROR_TIMEOUT, "of rank 2 on host host1; it has not read 1 of the 2");
  EXPECT_EQ(error->peer(), 2);

  Engines alone = net::make_in_process_engines(1);
  Links nobody(*alone[0], config_of(2, 64), {});
  expect_error(
      error_of([&] { nobody.wait_for(Deadline::after_ms(20), -1, "news", [] { return false; }); }),
      XD_ERROR_TIMEOUT, "timed out waiting for news");
}

// Carries one chunk from rank 1 to rank 0 and its credit back, but for the last poll() of rank 0.
void carry_one(Fleet& fleet) {
  const auto frame = fleet.links[1]->take(0);
  XD_CHECK(frame);
  fleet.links[1]->send(*frame, 1);
  fleet.links[0]->poll();
  const auto chunk = fleet.links[0]->next(0);
  XD_CHECK(chunk);
  fleet.links[0]->give_back(*chunk);
  fleet.links[1]->poll();
}

// The engine of rank 0 has news in every turn: the `sent` of a credit.
TEST(Links, NewsOfAnotherPartnerDoNotProlongAWait) {
  Fleet fleet(net::make_in_process_engines(3), config_of(2, 64));
  const Deadline end = Deadline::after_ms(kGenerousMs);
  const auto wait = [&](int ms) {
    return error_of([&] {
      fleet.links[0]->wait_for(Deadline::after_ms(ms), 1, "chunks", [&] {
        carry_one(fleet);
        XD_CHECK(!end.passed());
        return false;
      });
    });
  };
  expect_error(wait(20), XD_ERROR_TIMEOUT, "of rank 2 on host host1");
  set_interrupt([](void*) { return 1; }, nullptr);
  const auto error = wait(2 * kGenerousMs);
  set_interrupt(nullptr, nullptr);
  expect_error(error, XD_ERROR_ABORTED, "");
  EXPECT_NO_THROW(fleet.links[0]->poll());
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
  Links here(*engines[0], config_of(2, 64), {{1, "remote"}});
  const auto refusal = [&](std::span<const std::byte> offer) {
    return error_of([&] { here.accept(0, offer); });
  };
  const auto offer_of = [&](const net::LinkConfig& config, int neighbour) {
    return Links(*engines[1], config, {{neighbour, "near"}}).offer(0);
  };
  net::LinkConfig config = config_of(2, 64);
  config.rank = 1;
  const auto refused = [&](int frames, std::size_t bytes, const std::string& text) {
    net::LinkConfig other = config;
    other.frames = frames;
    other.frame_bytes = bytes;
    expect_error(refusal(offer_of(other, 0)), XD_ERROR_MISMATCH,
                 "rank 1 on host remote offers " + text + "; expected 2 of 64");
  };
  refused(2, 128, "2 frames of 128 bytes");
  refused(3, 64, "3 frames of 64 bytes");
  expect_error(refusal(bytes_of("short")), XD_ERROR_MISMATCH,
               "rank 1 on host remote: its offer has 5");
  expect_error(refusal(offer_of(config, 2)), XD_ERROR_MISMATCH,
               "the offer is that of rank 1 to rank 2, expected of rank 1 to rank 0");
  net::LinkConfig of_another = config;
  of_another.rank = 2;
  expect_error(refusal(offer_of(of_another, 0)), XD_ERROR_MISMATCH,
               "the offer is that of rank 2 to rank 0, expected of rank 1 to rank 0");
  const Bytes good = offer_of(config, 0);
  for (const std::size_t word : {7, 8}) {  // the first frame, the channel
    Bytes bad = good;
    bad[8 * word + 5] = std::byte{1};
    expect_error(refusal(bad), XD_ERROR_MISMATCH, "rank 1 on host remote offers channel ");
  }
  EXPECT_FALSE(refusal(good));
  expect_error(refusal(good), XD_ERROR_INTERNAL, "!whom.accepted");
}

TEST(Links, RefuseConfigsThatCannotBe) {
  Engines engines = net::make_in_process_engines(1);
  const auto refusal = [&](int frames, std::size_t bytes) {
    return error_of([&] { Links(*engines[0], config_of(frames, bytes), {}); });
  };
  expect_error(refusal(0, 64), XD_ERROR_INVALID_ARGUMENT, "frames = 0, expected 1 to 32");
  expect_error(refusal(33, 64), XD_ERROR_INVALID_ARGUMENT, "frames = 33, expected 1 to 32");
  expect_error(refusal(1, 0), XD_ERROR_INVALID_ARGUMENT, "frame_bytes = 0, expected 1 to");
  const std::vector<net::LinkNeighbour> crowd(net::kMaxLinkNeighbours + 1);
  expect_error(error_of([&] { Links(*engines[0], config_of(1, 1), crowd); }),
               XD_ERROR_INVALID_ARGUMENT, "65537 neighbours, expected at most 65536");
}

TEST(Links, RefuseToUseASlotOrAChunkTwice) {
  Fleet fleet(net::make_in_process_engines(2), config_of(1, 64));
  Links &sender = *fleet.links[0], &receiver = *fleet.links[1];
  const auto check_failed = [](auto&& body) {
    expect_error(error_of(body), XD_ERROR_INTERNAL, "internal check failed");
  };
  const auto carry = [&] {
    receiver.poll();
    return receiver.next(0);
  };
  const auto frame = sender.take(0);
  ASSERT_TRUE(frame);
  sender.send(*frame, 1);
  check_failed([&] { sender.send(*frame, 1); });
  const auto chunk = carry();
  ASSERT_TRUE(chunk);
  receiver.give_back(*chunk);
  check_failed([&] { receiver.give_back(*chunk); });
  sender.poll();

  const auto again = sender.take(0);
  ASSERT_TRUE(again);
  check_failed([&] { sender.send(*frame, 1); });
  check_failed([&] { sender.send(*again, 65); });
  sender.send(*again, 64);
  const auto second = carry();
  ASSERT_TRUE(second);
  check_failed([&] { receiver.give_back(*chunk); });
  receiver.give_back(*second);
  receiver.poll();
  sender.poll();
  EXPECT_TRUE(sender.at_rest() && receiver.at_rest());
}

TEST(Links, RefuseToSendBeforeTheyHaveAccepted) {
  Engines engines = net::make_in_process_engines(1);
  Links links(*engines[0], config_of(1, 64), {{1, "remote"}});
  const auto frame = links.take(0);
  ASSERT_TRUE(frame);
  expect_error(error_of([&] { links.send(*frame, 1); }), XD_ERROR_INTERNAL, "accepted");
}

// Links over an engine that the test can look into, and that does wrong at its word.
class OpenEngine final : public net::EngineLayer {
 public:
  using EngineLayer::EngineLayer;

  std::size_t max_put() const override { return longest; }
  std::unique_ptr<net::Region> expose(std::span<std::byte> memory) override {
    region = memory;
    return below().expose(memory);
  }
  bool put(const net::Put& put) override {
    if (refuses) return false;
    if (puts == broken_put) throw std::bad_alloc();
    ++puts;
    net::Put changed = put;
    changed.tag ^= flipped;
    return below().put(changed);
  }
  void poll(net::Events& events) override {
    events.arrived.insert(events.arrived.end(), more.arrived.begin(), more.arrived.end());
    events.sent.insert(events.sent.end(), more.sent.begin(), more.sent.end());
    events.failed.insert(events.failed.end(), more.failed.begin(), more.failed.end());
    more = {};
    below().poll(events);
  }
  bool vouches_for_tags() const override { return vouches; }
  void close() noexcept override {
    closed = true;
    below().close();
  }

  std::span<std::byte> region;
  std::size_t longest = SIZE_MAX;
  std::uint32_t flipped = 0;  // bits of the next tags
  bool refuses = false, closed = false, vouches = true;
  int puts = 0, broken_put = -1;  // puts that were taken; the one that throws
  net::Events more;               // events that the next poll() reports first
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

TEST(Links, CloseTheEngineAlsoWithChunksUnderWay) {
  for (const bool at_rest : {true, false}) {
    OpenFleet fleet;
    if (!at_rest) send_text(fleet, "abc");
    EXPECT_TRUE(fleet.links[1]->at_rest());  // it has sent nothing itself
    fleet.links[1].reset();
    EXPECT_TRUE(fleet.engine(1).closed);
    EXPECT_FALSE(fleet.engine(0).closed);
  }
}

TEST(Links, RefuseSlotsThatAreLongerThanAPut) {
  OpenEngine engine(std::move(net::make_in_process_engines(1)[0]));
  engine.longest = 79;
  expect_error(error_of([&] { Links(engine, config_of(1, 64), {}); }), XD_ERROR_INVALID_ARGUMENT,
               "frame_bytes = 64, expected 16 less than the engine's longest put of 79 bytes");
  EXPECT_FALSE(error_of([&] { Links(engine, config_of(1, 63), {}); }));
}

TEST(Links, AnEngineThatTakesNoPutsDoesNotProlongAWait) {
  OpenFleet fleet;
  fleet.engine(0).refuses = true;
  send_text(fleet, "abc");
  EXPECT_LT(fleet.links[0]->sleep_on(), 0);
  expect_error(error_of([&] {
                 fleet.links[0]->wait_for(Deadline::after_ms(20), 0, "credits",
                                          [&] { return fleet.links[0]->at_rest(); });
               }),
               XD_ERROR_TIMEOUT, "it has not read 1 of the 2 frames to it");
  fleet.engine(0).refuses = false;
  fleet.links[0]->poll();
  EXPECT_TRUE(fleet.links[1]->poll());
}

TEST(Links, APutThatThrowsEndsThemAndNoneIsMadeTwice) {
  OpenFleet fleet;
  OpenEngine& engine = fleet.engine(0);
  engine.refuses = true;
  send_text(fleet, "one");
  send_text(fleet, "two");
  engine.refuses = false;
  engine.broken_put = 1;
  EXPECT_THROW(fleet.links[0]->poll(), std::bad_alloc);
  EXPECT_EQ(engine.puts, 1);
  engine.broken_put = -1;
  expect_error(error_of([&] { fleet.links[0]->poll(); }), XD_ERROR_OUT_OF_MEMORY, "memory");
  expect_error(error_of([&] { fleet.links[0]->take(0); }), XD_ERROR_OUT_OF_MEMORY, "memory");
  EXPECT_EQ(engine.puts, 1);
}

TEST(Links, AnEngineThatIsOfNoUseAnyMoreEndsThem) {
  OpenFleet fleet;
  fleet.engine(0).more.failed = {{-1, "the queue is broken"}};
  for (int i = 0; i < 2; ++i) {
    const auto error = error_of([&] { fleet.links[0]->poll(); });
    expect_error(error, XD_ERROR_SYSTEM, "network: the queue is broken");
    EXPECT_EQ(error->peer(), -1);
  }
}

TEST(Links, PutsThatCannotHaveBeenSentAreNoticed) {
  // In the low half the use, then the frame, then the neighbour; and the id of all credits.
  constexpr std::array<std::uint64_t, 7> kIds{
      1, 0, 2, 1ull << 32 | 1, 2ull << 32 | 1, 1ull << 40 | 1, UINT64_MAX};
  for (const std::uint64_t id : kIds) {
    OpenFleet fleet;
    send_text(fleet, "abc");
    fleet.engine(0).more.sent = {id};  // in front of the first use of frame 0, which is right
    const std::string text = concat("network: the engine says that put ", id, " is sent");
    expect_error(error_of([&] { fleet.links[0]->poll(); }), XD_ERROR_INTERNAL, text);
    expect_error(error_of([&] { fleet.links[0]->take(0); }), XD_ERROR_INTERNAL, text);
  }
}

TEST(Links, AHeaderThatHasChangedOnTheWayIsNoticed) {
  for (const std::size_t change : {0, 4}) {  // use, length
    OpenFleet fleet;
    send_text(fleet, "abc");
    const auto region = fleet.engine(1).region;
    region[region.size() / 2 + change] ^= std::byte{0x40};
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
        Case{1u << 28, "a put arrived with the tag"},       // frame 16 of 2
        Case{1u << 3, "a put arrived with the tag"},        // neighbour 8 of 1
        Case{1u << 17, "use 3 (mod 256) of its frame 0"},   // for the third time at once
        Case{3u << 29, "it gave back use 1 (mod 256)"}}) {  // a credit for nothing
    OpenFleet fleet;
    fleet.engine(0).flipped = bad.flipped;
    send_text(fleet, "abc");
    expect_error(error_of([&] { fleet.links[1]->poll(); }), XD_ERROR_INTERNAL, bad.text);
    expect_error(error_of([&] { fleet.links[1]->next(0); }), XD_ERROR_INTERNAL, bad.text);
  }
}

// Of no kind, frame or neighbour; a chunk of another use; a credit for nothing; a second greeting.
TEST(Links, TagsThatCannotBeAreRefusedWhereAnybodyCanMakeThem) {
  OpenFleet fleet;
  fleet.engine(1).vouches = false;
  for (const auto& links : fleet.links) links->greet();
  ASSERT_TRUE(eventually([&] { return all_connected(fleet); }, kGenerousMs));
  LogCapture log;
  fleet.engine(1).more.arrived = {0,
                                  0x3F01'0000,
                                  0x2001'0008,
                                  net::LinkTag{net::TagKind::chunk, 0, 3, 0}.word(),
                                  net::LinkTag{net::TagKind::credit, 1, 1, 0}.word(),
                                  net::LinkTag{net::TagKind::greeting, 0, 0, 0}.word()};
  send_text(fleet, "abc");
  EXPECT_TRUE(fleet.links[1]->poll());
  const auto chunk = fleet.links[1]->next(0);
  ASSERT_TRUE(chunk);
  EXPECT_EQ(text_of(chunk->bytes), "abc");
  const auto lines = log.end();
  ASSERT_EQ(lines.size(), 6U);
  for (const std::string& line : lines)
    EXPECT_TRUE(line.find("of an unknown sender, or damaged") != std::string::npos) << line;
}

TEST(Links, ACreditOfAnotherUseIsNoticed) {
  OpenFleet fleet;
  send_text(fleet, "abc");
  fleet.links[1]->poll();
  const auto chunk = fleet.links[1]->next(0);
  ASSERT_TRUE(chunk);
  fleet.engine(1).flipped = 1u << 17;
  fleet.links[1]->give_back(*chunk);
  const auto error = error_of([&] { fleet.links[0]->poll(); });
  expect_error(error, XD_ERROR_INTERNAL,
               "rank 1 on host host0: it gave back use 3 (mod 256) of frame 0, which is in use 1");
  EXPECT_EQ(error->peer(), 1);
}

TEST(Links, ACreditForASlotThatWasTakenButNotSentIsNoticed) {
  OpenFleet fleet;
  ASSERT_TRUE(fleet.links[1]->take(0));
  fleet.engine(0).flipped = 3u << 29;  // a credit instead of a chunk
  send_text(fleet, "abc");
  expect_error(error_of([&] { fleet.links[1]->poll(); }), XD_ERROR_INTERNAL,
               "which is in use 1 and not to be given back");
}

TEST(Links, AUseThatComesBeforeTheLastOneWasReadIsNoticed) {
  OpenFleet fleet;
  send_text(fleet, "abc");
  fleet.engine(0).flipped = 1u << 24 | 3u << 16;  // use 2 of frame 0 for use 1 of frame 1
  send_text(fleet, "def");
  expect_error(error_of([&] { fleet.links[1]->poll(); }), XD_ERROR_INTERNAL,
               "use 2 (mod 256) of its frame 0 arrived; expected use 2, and not yet");
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
  EXPECT_EQ(events.failed[0].text, "the put reaches beyond the region");
  EXPECT_TRUE(events.sent.empty());
  EXPECT_FALSE(engines[0]->put(put));
  EXPECT_EQ(there, decltype(there){});
  expect_error(error_of([&] { engines[0]->connect(1, bytes_of("nowhere")); }), XD_ERROR_MISMATCH,
               "the address of peer 1");
}

}  // namespace
}  // namespace xd::test
