// Kernels' way to links, where threads stand in for kernels: they fill frames in the links' memory
// and command by words, as kernels do.
#include "net/proxy.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/math.h"
#include "net/engines/in_process.h"
#include "support/random.h"
#include "unit/link_support.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

using net::FrameWords;
using net::Proxy;

constexpr std::size_t kFrameBytes = 200;

// Links of one rank, and the memory that its kernels and its proxy share.
struct Station {
  Station(net::Links& links_of_rank, std::span<std::byte> frames)
      : links(links_of_rank),
        memory(frames),
        shared(FrameWords::words(links.map().num_frames())),
        words(FrameWords::in(shared.data(), links.map().num_frames())) {}

  void start() {
    Proxy::Calls calls;
    calls.failed = [this](const Error& error) {
      complaint = error.text();
      failed.store(true, std::memory_order_release);
    };
    calls.sent = [this](const net::Links::Sent& sent) {
      puts.store(sent.puts, std::memory_order_relaxed);
    };
    calls.is_over = [this] { return over.load(); };
    proxy = std::make_unique<Proxy>(links, words, std::move(calls));
  }
  std::span<std::byte> chunk(bool incoming, std::size_t frame) const {
    const net::LinkMap& map = links.map();
    const std::size_t place = map.place(incoming, static_cast<int>(frame / map.frames),
                                        static_cast<unsigned>(frame % map.frames));
    return memory.subspan(place + sizeof(net::LinkHeader), map.frame_bytes);
  }

  net::Links& links;
  const std::span<std::byte> memory;
  std::vector<std::uint64_t> shared;
  const FrameWords words;
  std::string complaint;
  std::atomic<bool> failed{false};
  std::atomic<bool> over{false};       // nobody waits for what it is commanded
  std::atomic<std::uint64_t> puts{0};  // as the proxy has told
  std::unique_ptr<Proxy> proxy;
};

// Links between all ranks, each with a proxy.
struct Stations : Fleet {
  Stations(Engines of_ranks, const net::LinkConfig& config)
      : Fleet(std::move(of_ranks), config, true) {
    for (std::size_t r = 0; r < links.size(); ++r) {
      of_rank.push_back(std::make_unique<Station>(*links[r], memory[r]));
      of_rank.back()->start();
    }
  }

  std::vector<std::unique_ptr<Station>> of_rank;
};

std::uint64_t load(std::uint64_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}
void store(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

// The contents of use `use` of a frame of a pair.
struct Message {
  std::uint64_t seed;
  std::size_t bytes;

  Message(int from, int to, std::size_t frame, std::uint32_t use)
      : seed(((at(from) * 64 + at(to)) * 64 + frame) * 100003 + use), bytes(seed % kFrameBytes) {}
  std::byte at_place(std::size_t i) const {
    return static_cast<std::byte>((seed * 31 + i * 7) & 0xff);
  }
};

// Does as kernels of a rank: fills every frame `uses` times, in any order, and reads what lands.
void run_kernel(Station& station, int rank, int uses) {
  const net::LinkMap& map = station.links.map();
  const std::size_t frames = map.num_frames();
  std::vector<std::uint32_t> filled(frames), read(frames);
  const Deadline deadline = Deadline::after_ms(kGenerousMs);
  const auto all = static_cast<std::uint32_t>(uses);
  std::size_t open = 2 * frames;
  while (open > 0 && !station.failed.load(std::memory_order_acquire)) {
    if (deadline.passed())
      fail(XD_ERROR_TIMEOUT, "rank ", rank, ": ", open, " frames are not done");
    bool worked = false;
    for (std::size_t s = 0; s < frames; ++s) {
      const int neighbour = static_cast<int>(s / map.frames);
      const int other = rank_of_neighbour(rank, neighbour);
      if (filled[s] < all && net::use_of(load(station.words.freed[s])) == filled[s]) {
        const Message message(rank, other, s % map.frames, ++filled[s]);
        const auto chunk = station.chunk(false, s);
        for (std::size_t i = 0; i < message.bytes; ++i) chunk[i] = message.at_place(i);
        store(station.words.filled[s],
              net::frame_word(filled[s], static_cast<std::uint32_t>(message.bytes)));
        worked = true;
        if (filled[s] == all) --open;
      }
      const std::uint64_t landed = load(station.words.landed[s]);
      if (read[s] < all && net::use_of(landed) == read[s] + 1) {
        const Message message(other, rank, s % map.frames, ++read[s]);
        const auto chunk = station.chunk(true, s);
        XD_REQUIRE(net::bytes_of(landed) == message.bytes, "length");
        for (std::size_t i = 0; i < message.bytes; ++i)
          XD_REQUIRE(chunk[i] == message.at_place(i), "byte ", i, " of ", message.bytes);
        store(station.words.read[s], net::frame_word(read[s], 0));
        worked = true;
        if (read[s] == all) --open;
      }
    }
    if (!worked) std::this_thread::yield();
  }
}

net::LinkConfig short_frames(int frames) { return config_of(frames, kFrameBytes); }

void expect_no_complaints(const Stations& stations) {
  for (const auto& station : stations.of_rank)
    EXPECT_FALSE(station->failed.load()) << station->complaint;
}

TEST(Proxy, CarriesWhatKernelsCommand) {
  for (const int frames : {1, 4}) {
    Stations stations(net::make_in_process_engines(3), short_frames(frames));
    expect_no_errors(on_threads(3, [&](int r) { run_kernel(*stations.of_rank[at(r)], r, 100); }));
    expect_no_complaints(stations);
  }
}

TEST(Proxy, CarriesItThroughChaos) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const int ranks = 2 + static_cast<int>(seed % 2);
    Stations stations(chaos_engines(ranks, seed), short_frames(1 + static_cast<int>(seed % 4)));
    expect_no_errors(on_threads(ranks, [&](int r) { run_kernel(*stations.of_rank[at(r)], r, 8); }));
    expect_no_complaints(stations);
  }
}

TEST(Proxy, SleepsAndWakesUp) {
  Stations stations(net::make_in_process_engines(2), short_frames(2));
  std::this_thread::sleep_for(std::chrono::milliseconds(60));  // naps are long by now
  expect_no_errors(on_threads(2, [&](int r) { run_kernel(*stations.of_rank[at(r)], r, 3); }));
  expect_no_complaints(stations);
}

TEST(Proxy, GivesBackWhatNobodyHasAUseForAsSoonAsItComes) {
  Stations stations(net::make_in_process_engines(2), short_frames(1));
  Station &from = *stations.of_rank[0], &to = *stations.of_rank[1];
  store(to.words.read[0], net::frame_word(2, 0));  // nothing has come yet
  for (const std::uint32_t use : {1u, 2u, 3u}) {
    store(from.words.filled[0], net::frame_word(use, 1));
    if (use == 3) {
      ASSERT_TRUE(eventually([&] { return load(to.words.landed[0]) == net::frame_word(3, 1); }));
      EXPECT_EQ(load(from.words.freed[0]), net::frame_word(2, 0));
      store(to.words.read[0], net::frame_word(3, 0));
    }
    ASSERT_TRUE(eventually([&] { return load(from.words.freed[0]) == net::frame_word(use, 0); }));
  }
  expect_no_complaints(stations);
}

TEST(Proxy, DoesWhatWasCommandedBeforeItEnds) {
  Stations stations(net::make_in_process_engines(2), short_frames(1));
  Station& from = *stations.of_rank[0];
  from.chunk(false, 0)[0] = std::byte{7};
  store(from.words.filled[0], net::frame_word(1, 1));
  std::thread reader([&] {
    Station& to = *stations.of_rank[1];
    ASSERT_TRUE(eventually([&] { return load(to.words.landed[0]) == net::frame_word(1, 1); }));
    EXPECT_EQ(to.chunk(true, 0)[0], std::byte{7});
    store(to.words.read[0], net::frame_word(1, 0));
  });
  from.proxy.reset();
  reader.join();
  EXPECT_EQ(load(from.words.freed[0]), net::frame_word(1, 0));
  EXPECT_EQ(from.puts.load(), 1u);
}

TEST(Proxy, EndsInTimeIfNobodyReads) {
  Stations stations(net::make_in_process_engines(2), short_frames(1));
  Station& from = *stations.of_rank[0];
  store(from.words.filled[0], net::frame_word(1, 1));
  const auto start = std::chrono::steady_clock::now();
  from.proxy.reset();
  EXPECT_GE(ms_since(start), Proxy::kPatienceMs);
  EXPECT_LT(ms_since(start), kGenerousMs);
}

TEST(Proxy, EndsAtOnceIfNobodyWaitsForTheRest) {
  Stations stations(net::make_in_process_engines(2), short_frames(1));
  Station& from = *stations.of_rank[0];
  store(from.words.filled[0], net::frame_word(1, 1));
  const auto start = std::chrono::steady_clock::now();
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    from.over.store(true);  // it is waiting by now
  });
  from.proxy.reset();
  EXPECT_LT(ms_since(start), Proxy::kPatienceMs / 2);
  later.join();
}

int threads_here() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

// A thread that was joined may be listed a moment longer.
bool come_to(int threads) {
  const auto deadline = Deadline::after_ms(5000);
  while (threads_here() != threads && !deadline.passed()) std::this_thread::yield();
  return threads_here() == threads;
}

// Functions that were registered before them run after they have ended.
TEST(Proxy, EndsWithTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        static const int threads = threads_here();
        std::atexit([] { ::_exit(come_to(threads) ? 0 : 3); });
        static const auto* const stations =
            new Stations(net::make_in_process_engines(2), short_frames(1));
        if (threads_here() != threads + static_cast<int>(stations->of_rank.size())) ::_exit(4);
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
}

TEST(Proxy, TellsOfAFailedPutOnce) {
  Stations stations(chaos_engines(2, 5, 3), short_frames(1));
  std::vector<std::thread> kernels;
  for (int r = 0; r < 2; ++r) {
    kernels.emplace_back([&, r] { run_kernel(*stations.of_rank[at(r)], r, 1000); });
  }
  const auto& of_rank = stations.of_rank;
  const bool told = eventually([&] {
    return of_rank[0]->failed.load(std::memory_order_acquire) ||
           of_rank[1]->failed.load(std::memory_order_acquire);
  });
  // Nobody tells the other one, as a communicator would, and nobody waits for what is under way.
  for (const auto& station : of_rank) {
    station->failed.store(true, std::memory_order_release);
    station->over.store(true);
  }
  for (std::thread& kernel : kernels) kernel.join();
  EXPECT_TRUE(told);
}

TEST(Proxy, RefusesWordsThatMakeNoSense) {
  struct Bad {
    std::uint64_t word;
    const char* why;
  };
  for (const Bad& bad : {Bad{net::frame_word(2, 8), "by use 2 of frame 0"},
                         Bad{net::frame_word(1, kFrameBytes + 1), "sends 201 bytes"}}) {
    Stations stations(net::make_in_process_engines(2), short_frames(1));
    Station& station = *stations.of_rank[0];
    store(station.words.filled[0], bad.word);
    ASSERT_TRUE(eventually([&] { return station.failed.load(std::memory_order_acquire); }));
    expect_words(station.complaint, {bad.why});
  }
}

}  // namespace
}  // namespace xd::test
