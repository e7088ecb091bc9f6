// Hosts, near ranks and their memory.
#include "comm/near_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "comm/hosts.h"
#include "memory/segment.h"

namespace xd {
namespace {

std::vector<int> numbers(const NearRanks& ranks) { return {ranks.begin(), ranks.end()}; }

class Pages final : public Segment {
 public:
  explicit Pages(std::vector<std::uint64_t>& words)
      : Segment(reinterpret_cast<std::byte*>(words.data()), words.size() * sizeof(words[0]),
                false) {}
};

TEST(Hosts, OneHostHasAllRanksAndPeersBeginWithTheNext) {
  const HostMap hosts(2, 4);
  EXPECT_EQ(int{hosts.self()}, 2);
  EXPECT_EQ(numbers(hosts.near()), (std::vector{0, 1, 2, 3}));
  EXPECT_EQ(numbers(hosts.peers()), (std::vector{3, 0, 1}));
}

TEST(Hosts, ARankAloneIsNearToItselfAndHasNoPeers) {
  const HostMap hosts(0, 1);
  EXPECT_EQ(numbers(hosts.near()), (std::vector{0}));
  EXPECT_TRUE(hosts.peers().empty());
}

TEST(Hosts, RanksThatDeclareSeveralAreAllNear) {
  const std::vector<std::string> names{"a", "b", "a", "b"};
  const HostMap hosts = HostMap::of_names(1, 4, names);
  EXPECT_EQ(numbers(hosts.near()), (std::vector{0, 1, 2, 3}));
  EXPECT_EQ(numbers(hosts.peers()), (std::vector{2, 3, 0}));
  EXPECT_EQ(std::vector(hosts.by_host().begin(), hosts.by_host().end()), (std::vector{0, 2, 1, 3}));
}

// Ranks 1 and 3 are on another machine, which this rank shares no memory with.
TEST(Hosts, NearRanksAreThoseOfOneMachineAndTheOrderOfSumsHasAll) {
  const HostMap hosts(Rails(2, std::vector{0, 1, 0, 1}));
  EXPECT_FALSE(hosts.all_are_near());
  EXPECT_EQ(numbers(hosts.near()), (std::vector{0, 2}));
  for (int rank = 0; rank < 4; ++rank) {
    const auto near = hosts.find_near(rank);
    EXPECT_EQ(near.has_value(), rank % 2 == 0);
    EXPECT_EQ(hosts.is_near(rank), rank % 2 == 0);
    EXPECT_EQ(near ? int{*near} : rank, rank);
  }
  EXPECT_EQ(std::vector(hosts.by_host().begin(), hosts.by_host().end()), (std::vector{0, 2, 1, 3}));
}

// Names do not matter, and neither does the rank that asks; the partition does.
TEST(Hosts, TheFingerprintTellsPartitionsApart) {
  const auto of = [](int rank, std::vector<std::string> names) {
    return HostMap::of_names(rank, 4, names).fingerprint();
  };
  EXPECT_EQ(HostMap(2, 4).fingerprint(), 0u);
  EXPECT_EQ(of(1, {"a", "a", "a", "a"}), 0u);
  const std::uint64_t pairs = of(0, {"a", "a", "b", "b"});
  EXPECT_NE(pairs, 0u);
  EXPECT_EQ(of(3, {"y", "y", "x", "x"}), pairs);
  const std::set<std::uint64_t> all{0u,
                                    pairs,
                                    of(0, {"a", "b", "a", "b"}),
                                    of(0, {"a", "b", "b", "b"}),
                                    of(0, {"a", "a", "a", "b"}),
                                    of(0, {"a", "b", "c", "d"})};
  EXPECT_EQ(all.size(), 6u);
}

TEST(NearMemory, ATableHasEachRanksOwnMemoryAndNoneForARankWithoutASegment) {
  std::vector<std::uint64_t> first(4, 10), last(4, 30);
  const HostMap hosts(0, 3);
  const std::vector<std::shared_ptr<Segment>> segments{std::make_shared<Pages>(first), nullptr,
                                                       std::make_shared<Pages>(last)};
  const NearTable table(segments);
  EXPECT_EQ(*table.of(hosts.near()[0]).array<std::uint64_t>(), 10u);
  EXPECT_FALSE(table.of(hosts.near()[1]));
  EXPECT_EQ(*table.of(hosts.near()[2]).array<std::uint64_t>(), 30u);
}

TEST(NearMemory, APieceFromAnOffsetIsThatManyBytesFurtherOn) {
  std::vector<std::uint64_t> words{1, 2, 3, 4};
  const NearMemory memory(reinterpret_cast<std::byte*>(words.data()));
  EXPECT_EQ(memory.from(16).array<std::uint64_t>(), &words[2]);
  EXPECT_EQ(memory.from(8).address(16), reinterpret_cast<std::byte*>(&words[3]));
  memory.from(8).signal(77);
  EXPECT_EQ(memory.from(8).seen(), 77u);
  EXPECT_EQ(words, (std::vector<std::uint64_t>{1, 77, 3, 4}));
}

// Waits for the signal; false if it does not come.
bool await(NearMemory memory, std::uint64_t word) {
  const Deadline deadline = Deadline::after_ms(20000);
  while (memory.seen() != word) {
    if (deadline.passed()) return false;
    std::this_thread::yield();
  }
  return true;
}

// ThreadSanitizer says so if a signal does not order the stores before it.
TEST(NearMemory, ARankThatHasSeenASignalSeesAllThatWasStoredBefore) {
  constexpr std::uint64_t kRounds = 2000, kWords = 8;
  std::vector<std::uint64_t> words(2 + kWords);
  const NearMemory there(reinterpret_cast<std::byte*>(words.data())), back = there.from(8),
                                                                      row = there.from(16);
  std::thread writer([=] {
    for (std::uint64_t n = 1; n <= kRounds; ++n) {
      for (std::uint64_t i = 0; i < kWords; ++i) row.array<std::uint64_t>()[i] = n + i;
      there.signal(n);
      if (!await(back, n)) return;
    }
  });
  std::uint64_t wrong = 0;
  for (std::uint64_t n = 1; n <= kRounds; ++n) {
    if (!await(there, n)) {
      ADD_FAILURE() << "no signal " << n;
      break;
    }
    for (std::uint64_t i = 0; i < kWords; ++i) wrong += row.array<std::uint64_t>()[i] != n + i;
    back.signal(n);
  }
  writer.join();
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace xd
