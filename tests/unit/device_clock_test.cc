#include "observe/device_clock.h"

#include <gtest/gtest.h>

namespace xd::observe {
namespace {

constexpr std::uint64_t kStart = 1'000'000'000;

void expect(const DeviceClock::Place& place, std::uint64_t begin_ns, std::uint64_t end_ns) {
  EXPECT_EQ(place.begin_ns, kStart + begin_ns);
  EXPECT_EQ(place.end_ns, kStart + end_ns);
}

TEST(DeviceClock, PlacesWorkBehindTheWorkBefore) {
  DeviceClock clock;
  expect(clock.place(kStart, 0, 50, kStart + 1000), 0, 50);
  expect(clock.place(kStart + 10, 5, 20, kStart + 1000), 55, 75);
  expect(clock.place(kStart + 20, 300, 20, kStart + 1000), 375, 395);
}

TEST(DeviceClock, LetsNoWorkBeginBeforeItIsEnqueued) {
  DeviceClock clock;
  expect(clock.place(kStart, 0, 50, kStart + 1000), 0, 50);
  expect(clock.place(kStart + 500, 100, 20, kStart + 1000), 500, 520);
  expect(clock.place(kStart + 510, 7, 20, kStart + 1000), 527, 547);
}

TEST(DeviceClock, LetsNoWorkEndAfterItIsSeenToHaveEnded) {
  DeviceClock clock;
  expect(clock.place(kStart, 0, 50, kStart + 1000), 0, 50);
  expect(clock.place(kStart + 60, 900, 100, kStart + 1000), 900, 1000);
  // The device says more than lies between the calls: its clock is fast.
  expect(clock.place(kStart + 1010, 0, 500, kStart + 1100), 1010, 1100);
}

TEST(DeviceClock, KeepsALineOfWorkWithItsHostWhateverItsSpeed) {
  for (const double speed : {0.99, 1.0, 1.01}) {
    DeviceClock clock;
    const auto device = [&](std::uint64_t ns) {
      return static_cast<std::uint64_t>(static_cast<double>(ns) * speed);
    };
    std::uint64_t before = 0;
    for (std::uint64_t now = kStart; now < kStart + 1'000'000'000; now += 10'000) {
      const auto place = clock.place(now, device(6'000), device(4'000), now + 5'000);
      ASSERT_GE(place.begin_ns, now);
      ASSERT_LE(place.end_ns, now + 5'000);
      ASSERT_GE(place.begin_ns, before);
      before = place.end_ns;
    }
  }
}

}  // namespace
}  // namespace xd::observe
