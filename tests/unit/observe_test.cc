// Things that people see who look: texts, the board of a process, ranges for profilers.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "observe/profiler.h"
#include "observe/stats_segment.h"

namespace xd::observe {
namespace {

TEST(ObservedText, IsCutAndEnds) {
  Text text;
  EXPECT_STREQ(text.get().data(), "");
  text.set("short");
  EXPECT_STREQ(text.get().data(), "short");
  text.set(std::string(100, 'x'));
  EXPECT_EQ(std::string(text.get().data()), std::string(Text::kBytes - 1, 'x'));
  text.set("");
  EXPECT_STREQ(text.get().data(), "");
}

constexpr Identity kRank{.rank = 2, .num_ranks = 5, .number = 7, .device_type = 1};

// The places that a reader finds in use, of this test's groups.
std::vector<std::size_t> used(const StatsReader& reader) {
  std::vector<std::size_t> places;
  for (std::size_t place = 0; place < kPlaces; ++place) {
    xd_stats_source source XD_STATS_SOURCE_INIT;
    xd_stats stats XD_STATS_INIT;
    if (reader.read(place, source, stats, nullptr, 0)) places.push_back(place);
  }
  return places;
}

TEST(Board, HasAsManyPlacesAsItSays) {
  std::vector<std::unique_ptr<Place>> places;
  for (std::size_t i = 0; i < kPlaces + 3; ++i) places.push_back(std::make_unique<Place>(kRank));
  const StatsReader reader(::getpid());
  EXPECT_EQ(used(reader).size(), kPlaces);
  places.back()->counters().tokens.set(3);  // it keeps its numbers to itself
  EXPECT_EQ(stats_of(places.back()->counters()).tokens, 3u);
  places.erase(places.begin() + 10);
  EXPECT_EQ(used(reader).size(), kPlaces - 1);
  const Place again(kRank);
  EXPECT_EQ(used(reader).size(), kPlaces);
}

TEST(Board, IsGoneWithTheLastPlaceAndComesBackEmpty) {
  { const Place place(kRank); }
  EXPECT_THROW(StatsReader{::getpid()}, Error);
  Place place(kRank);
  place.counters().tokens.set(1);
  const StatsReader reader(::getpid());
  ASSERT_EQ(used(reader), std::vector<std::size_t>{0});
  xd_stats_source source XD_STATS_SOURCE_INIT;
  xd_stats stats XD_STATS_INIT;
  std::vector<std::int64_t> waits(6, -1);
  place.counters().waits()[4].set(9);
  ASSERT_TRUE(reader.read(0, source, stats, waits.data(), 6));
  EXPECT_EQ(source.rank, 2);
  EXPECT_EQ(source.number, 7);
  EXPECT_EQ(stats.tokens, 1u);
  EXPECT_EQ(waits, (std::vector<std::int64_t>{0, 0, 0, 0, 9, -1}));
}

// CMake runs this with a profiler as well: see unit/nvtx_fake.cc.
TEST(Profiler, HearsOfRangesByFunctionAndNameIfItListens) {
  const char* const profiler = std::getenv("NVTX_INJECTION64_PATH");
  EXPECT_EQ(ProfilerRange::listens(), profiler != nullptr);
  Text name;
  {
    const ProfilerRange outer("xd_ep_prepare", name);
    name.set("layer 3");
    const ProfilerRange inner("xd_ep_dispatch", name);
  }
  if (profiler == nullptr) return;
  void* const library = ::dlopen(profiler, RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(library, nullptr) << ::dlerror();
  const auto said = reinterpret_cast<const char* (*)()>(::dlsym(library, "nvtx_fake_said"));
  ASSERT_NE(said, nullptr);
  EXPECT_STREQ(said(), "crossdock: +xd_ep_prepare +xd_ep_dispatch layer 3 - -");
}

}  // namespace
}  // namespace xd::observe
