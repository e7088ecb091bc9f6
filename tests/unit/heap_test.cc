// The symmetric heap's allocator.
#include "memory/heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "unit/errors.h"

namespace xd {
namespace {

constexpr std::size_t kUnit = Heap::kAlignment;

// The text of the OUT_OF_MEMORY error; empty if the allocation succeeds.
std::string exhaustion(Heap& heap, std::size_t bytes) {
  return test::refusal_of([&] { heap.allocate(bytes); }, XD_ERROR_OUT_OF_MEMORY);
}

TEST(Heap, KnowsWhatIsAllocated) {
  Heap heap;
  heap.add_segment(64 * kUnit);
  heap.add_segment(8 * kUnit);
  const HeapAddress first = heap.allocate(2 * kUnit), second = heap.allocate(kUnit);
  ASSERT_EQ(second.segment, first.segment);
  ASSERT_EQ(second.offset, first.offset + 2 * kUnit);
  EXPECT_TRUE(heap.is_allocated(first, 0));
  EXPECT_TRUE(heap.is_allocated(first, 2 * kUnit));
  EXPECT_TRUE(heap.is_allocated({first.segment, first.offset + 1}, 2 * kUnit - 1));
  EXPECT_FALSE(heap.is_allocated({first.segment, first.offset + 1}, 2 * kUnit)) << "in two";
  EXPECT_FALSE(heap.is_allocated(first, SIZE_MAX));
  EXPECT_FALSE(heap.is_allocated({second.segment, second.offset + kUnit}, 0)) << "behind all";
  EXPECT_FALSE(heap.is_allocated({1 - first.segment, first.offset}, 1)) << "another segment";
  EXPECT_FALSE(heap.is_allocated({2, 0}, 1));
  heap.release(first);
  EXPECT_FALSE(heap.is_allocated(first, 1));
  EXPECT_TRUE(heap.is_allocated(second, kUnit));
}

TEST(Heap, AHeapWithoutMemoryIsExhausted) {
  Heap heap;
  EXPECT_NE(exhaustion(heap, 1), "");
  heap.add_segment(0);
  EXPECT_NE(exhaustion(heap, 1), "");
  EXPECT_EQ(heap.usage().segments, 1);
}

TEST(Heap, SizesNearTheEndOfTheRangeDoNotWrap) {
  Heap heap;
  heap.add_segment(16 * kUnit);
  for (const std::size_t bytes : {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX - kUnit + 2, SIZE_MAX - kUnit,
                                  SIZE_MAX / 2, std::size_t{1} << 62}) {
    EXPECT_NE(exhaustion(heap, bytes), "") << bytes;
  }
}

TEST(Heap, OnlyTheStartOfALiveAllocationIsReleased) {
  Heap heap;
  heap.add_segment(16 * kUnit);
  const HeapAddress place = heap.allocate(2 * kUnit);
  EXPECT_FALSE(heap.release({0, place.offset + 1}));
  EXPECT_FALSE(heap.release({0, place.offset + kUnit}));
  EXPECT_FALSE(heap.release({0, 4 * kUnit})) << "a free place";
  EXPECT_FALSE(heap.release({0, 16 * kUnit})) << "past the end";
  EXPECT_FALSE(heap.release({1, 0})) << "no such segment";
  EXPECT_TRUE(heap.release(place));
  EXPECT_FALSE(heap.release(place)) << "released twice";
  EXPECT_EQ(heap.usage().used, 0u);
  EXPECT_EQ(heap.usage().largest_free, 16 * kUnit);
}

TEST(Heap, ThreadsMayUseItAtOnce) {
  Heap heap;
  heap.add_segment(64 * kUnit);
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&heap, thread] {
      for (unsigned i = 0; i < 2000; ++i) {
        const HeapAddress place = heap.allocate((thread + i) % 8 * kUnit);
        if (!heap.release(place)) ADD_FAILURE() << "allocation lost";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(heap.usage().used, 0u);
  EXPECT_EQ(heap.usage().largest_free, 64 * kUnit);
}

// The same promises in the plainest form: one flag per unit.
class Model {
 public:
  void add_segment(std::size_t units) { taken_.emplace_back(units, false); }

  struct Run {
    std::size_t segment, first, units;
  };
  std::vector<Run> free_runs() const {
    std::vector<Run> runs;
    for (std::size_t s = 0; s < taken_.size(); ++s) {
      for (std::size_t i = 0; i < taken_[s].size(); ++i) {
        if (taken_[s][i]) continue;
        const bool goes_on = i > 0 && !taken_[s][i - 1];
        if (goes_on) {
          ++runs.back().units;
        } else {
          runs.push_back({s, i, 1});
        }
      }
    }
    return runs;
  }
  void mark(std::size_t segment, std::size_t first, std::size_t units, bool taken) {
    for (std::size_t i = first; i < first + units; ++i) {
      ASSERT_NE(taken_[segment][i], taken) << "segment " << segment << ", unit " << i;
      taken_[segment][i] = taken;
    }
  }

 private:
  std::vector<std::vector<bool>> taken_;
};

class HeapAgainstModel : public testing::Test {
 protected:
  void grow(std::size_t units) {
    heap_.add_segment(units * kUnit);
    model_.add_segment(units);
  }

  void allocate(std::size_t bytes) {
    const std::size_t units = std::max<std::size_t>((bytes + kUnit - 1) / kUnit, 1);
    auto runs = model_.free_runs();
    std::erase_if(runs, [units](const Model::Run& run) { return run.units < units; });
    if (runs.empty()) {
      ASSERT_NE(exhaustion(heap_, bytes), "") << bytes << " bytes";
      return;
    }
    const auto best = *std::min_element(
        runs.begin(), runs.end(),
        [](const Model::Run& a, const Model::Run& b) { return a.units < b.units; });
    const HeapAddress place = heap_.allocate(bytes);
    ASSERT_EQ(place.segment, best.segment);
    ASSERT_EQ(place.offset, best.first * kUnit);
    model_.mark(best.segment, best.first, units, true);
    live_.push_back({best.segment, best.first, units});
  }

  void release(std::size_t index) {
    const Model::Run run = live_[index];
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
    ASSERT_TRUE(heap_.release({static_cast<std::uint32_t>(run.segment), run.first * kUnit}));
    model_.mark(run.segment, run.first, run.units, false);
  }

  void compare_usage() const {
    std::size_t used = 0, largest = 0;
    for (const Model::Run& run : live_) used += run.units * kUnit;
    for (const Model::Run& run : model_.free_runs()) largest = std::max(largest, run.units * kUnit);
    ASSERT_EQ(heap_.usage().used, used);
    ASSERT_EQ(heap_.usage().largest_free, largest);
  }

  Heap heap_;
  Model model_;
  std::vector<Model::Run> live_;
};

TEST_F(HeapAgainstModel, RandomCallsGiveThePlacesOfAPlainModel) {
  const char* given = std::getenv("XD_TEST_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10))
                                         : std::random_device{}();
  SCOPED_TRACE("XD_TEST_SEED=" + std::to_string(seed));
  std::printf("XD_TEST_SEED=%u\n", seed);
  std::mt19937 random(seed);
  const auto below = [&random](std::size_t bound) { return random() % bound; };

  grow(100);
  for (int step = 0; step < 20000 && !HasFatalFailure(); ++step) {
    if (step % 5000 == 4999) grow(1 + below(100));
    if (live_.empty() || below(100) < 55) {
      allocate(below(below(10) == 0 ? 40 * kUnit : 4 * kUnit));
    } else {
      release(below(live_.size()));
    }
    if (step % 16 == 0) compare_usage();
  }
  while (!live_.empty() && !HasFatalFailure()) release(below(live_.size()));
  compare_usage();
}

}  // namespace
}  // namespace xd
