// The common part of tests of resources: how much of the process' things the library holds.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>

#include "support/gtest_main.h"
#include "support/usage.h"

namespace xd::test {

struct Usage {
  std::size_t descriptors = open_descriptors();
  std::size_t threads = live_threads();
  std::size_t shared = shared_bytes();
  std::size_t bytes = live_bytes();
  std::size_t device = world().memory().device_bytes_used();
};

inline void expect_nothing_left(const Usage& before, const Usage& after) {
  EXPECT_EQ(after.descriptors, before.descriptors);
  EXPECT_EQ(after.threads, before.threads);
  EXPECT_EQ(after.shared, before.shared);
  EXPECT_LE(after.bytes, before.bytes + 1024);
  EXPECT_LE(after.device, before.device + (std::size_t{64} << 20));  // pools keep some
}

// The memory that a group or a context on the CPU takes between two moments, on ranks that are
// threads for all of them; peers' segments are mapped here as well: with equal configs, as many as
// there are ranks.
class HostMemoryTaken {
 public:
  explicit HostMemoryTaken(const Rank& rank) : rank_(rank) {}

  // Not before this has been constructed on all ranks, and nothing is taken until all have come.
  void begin() {
    if (!counts()) return;
    shared_ = shared_bytes();
    private_ = live_bytes();
  }
  void expect(std::size_t symmetric_bytes, std::size_t private_bytes) const {
    if (!counts()) return;
    constexpr std::size_t kPage = 4096, kHandles = 8192;
    const auto ranks = static_cast<std::size_t>(rank_.num_ranks);
    const std::size_t local = rank_.threads ? ranks : 1;
    const std::size_t shared = shared_bytes() - shared_;
    EXPECT_GE(shared, ranks * symmetric_bytes);
    EXPECT_LE(shared, ranks * (symmetric_bytes + kPage));
    const std::size_t own = live_bytes() - private_;
    EXPECT_LE(own, local * (private_bytes + kHandles + kPage));
    EXPECT_GE(own + local * kPage, local * private_bytes);
  }

 private:
  // Of ranks that are threads one counts for all.
  bool counts() const { return rank_.rank == 0 || !rank_.threads; }

  const Rank& rank_;
  std::size_t shared_ = 0, private_ = 0;
};

}  // namespace xd::test
