// The estimate of available memory, and what ranks make of it together, on made-up copies of /proc
// and /sys.
#include "memory/available.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "memory/demand.h"
#include "unit/errors.h"

namespace xd {
namespace {

using test::expect_words;

class AvailableMemory : public testing::Test {
 protected:
  AvailableMemory() {
    std::string pattern = testing::TempDir() + "crossdock-available-XXXXXX";
    root_ = ::mkdtemp(pattern.data());
  }
  ~AvailableMemory() override { std::filesystem::remove_all(root_); }

  void file(const std::string& path, const std::string& content) const {
    const std::filesystem::path full = root_ + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << content;
  }

  std::uint64_t available() const { return available_memory(root_); }

  void system_with_gibibyte() const {
    file("/proc/meminfo",
         "MemTotal:        4194304 kB\nMemFree:          100000 kB\n"
         "MemAvailable:     786432 kB\nSwapTotal:       1000000 kB\nSwapFree:         262144 kB\n");
  }

  std::string root_;
};

constexpr std::uint64_t kGibibyte = std::uint64_t{1} << 30;

TEST_F(AvailableMemory, UnknownIsUnlimited) { EXPECT_EQ(available(), UINT64_MAX); }

TEST_F(AvailableMemory, IsReclaimableMemoryAndFreeSwap) {
  system_with_gibibyte();
  EXPECT_EQ(available(), kGibibyte);
}

TEST_F(AvailableMemory, IsWhatTheControlGroupLeaves) {
  system_with_gibibyte();
  file("/proc/self/cgroup", "0::/a/b\n");
  file("/sys/fs/cgroup/a/b/memory.max", "1000000\n");
  file("/sys/fs/cgroup/a/b/memory.current", "400000\n");
  EXPECT_EQ(available(), 600000u);
}

TEST_F(AvailableMemory, FileCacheOfAGroupCanBeReclaimed) {
  system_with_gibibyte();
  file("/proc/self/cgroup", "0::/a\n");
  file("/sys/fs/cgroup/a/memory.max", "1000000\n");
  file("/sys/fs/cgroup/a/memory.current", "900000\n");
  file("/sys/fs/cgroup/a/memory.stat",
       "anon 300000\nfile 600000\nshmem 100000\ninactive_file 200000\nactive_file 300000\n");
  EXPECT_EQ(available(), 600000u);
}

TEST_F(AvailableMemory, GroupsAboveLimitToo) {
  system_with_gibibyte();
  file("/proc/self/cgroup", "0::/a/b\n");
  file("/sys/fs/cgroup/a/b/memory.max", "max\n");
  file("/sys/fs/cgroup/a/b/memory.current", "10\n");
  file("/sys/fs/cgroup/a/memory.max", "5000\n");
  file("/sys/fs/cgroup/a/memory.current", "4000\n");
  EXPECT_EQ(available(), 1000u);
}

TEST_F(AvailableMemory, NothingIsLeftInAFullGroup) {
  system_with_gibibyte();
  file("/proc/self/cgroup", "0::/a\n");
  file("/sys/fs/cgroup/a/memory.max", "5000\n");
  file("/sys/fs/cgroup/a/memory.current", "6000\n");
  EXPECT_EQ(available(), 0u);
}

TEST_F(AvailableMemory, VersionOneGroupsAreUnderstood) {
  system_with_gibibyte();
  file("/proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/job\n0::/\n");
  file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  file("/sys/fs/cgroup/memory/memory.usage_in_bytes", "123456\n");
  file("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "80000\n");
  file("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "70000\n");
  file("/sys/fs/cgroup/memory/job/memory.stat",
       "inactive_file 1\ntotal_inactive_file 20000\ntotal_active_file 10000\n");
  EXPECT_EQ(available(), 40000u);
}

// As in a container: the path is the host's, and the container's own group is what is mounted.
TEST_F(AvailableMemory, TheMountedGroupCountsWhereThePathIsNotVisible) {
  system_with_gibibyte();
  file("/proc/self/cgroup", "4:memory:/docker/0123\n");
  file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n");
  file("/sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n");
  EXPECT_EQ(available(), 7000u);
}

TEST_F(AvailableMemory, OfThisMachineIsBelievable) {
  EXPECT_GT(available_memory(), 1u << 20);
  EXPECT_LT(available_memory(), std::uint64_t{1} << 50);
}

TEST_F(AvailableMemory, HugePagesAreThoseThatNobodyHasOrHasReserved) {
  EXPECT_EQ(available_huge_pages(root_), 0u);
  file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "10\n");
  EXPECT_EQ(available_huge_pages(root_), 10u << 21);
  file("/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "7\n");
  EXPECT_EQ(available_huge_pages(root_), 3u << 21);
}

// Ranks whose processes see the same or different control groups, on one host.
class SharedLimits : public AvailableMemory {
 protected:
  static constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

  SharedLimits() {
    system_with_gibibyte();
    for (const char* group : {"/job", "/job/a", "/job/b"}) limit(group, 9'000'000'000);
  }

  void limit(const std::string& group, std::uint64_t bytes, std::uint64_t used = 0) const {
    file("/sys/fs/cgroup" + group + "/memory.max", std::to_string(bytes) + "\n");
    file("/sys/fs/cgroup" + group + "/memory.current", std::to_string(used) + "\n");
  }

  void add_rank(const std::string& group, std::uint64_t bytes, std::uint64_t huge_pages = 0) {
    file("/proc/self/cgroup", "0::" + group + "\n");
    own_.push_back(make_demand(bytes, memory_limits(root_)));
    own_.back().demand.huge_pages = huge_pages;
    own_.back().demand.process = own_.size();
  }

  // The error text that a rank gets; "" = none.
  std::string told(int rank, xd_status expected) const {
    std::vector<MemoryDemand> of_rank;
    for (const OwnDemand& own : own_) of_rank.push_back(own.demand);
    return test::refusal_of(
        [&] { require_together(of_rank, rank, own_[static_cast<std::size_t>(rank)]); }, expected);
  }

  std::vector<OwnDemand> own_;
};

TEST_F(SharedLimits, TogetherWithinThemRanksAreTakenAtTheirWord) {
  limit("/job", 100 * kMiB);
  for (int rank = 0; rank < 4; ++rank) add_rank("/job", 24 * kMiB);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(told(rank, XD_SUCCESS), "");
}

TEST_F(SharedLimits, BeyondOneAllWhoAskHearTheSumAndTheLimit) {
  limit("/job", 110 * kMiB, 10 * kMiB);
  for (int rank = 0; rank < 4; ++rank) add_rank("/job", rank == 2 ? 0 : 40 * kMiB);
  const std::string sum =
      "ranks 0, 1, 3 together asked 125829120 bytes of shared memory, and page tables take 983040; "
      "available 104857600 bytes";
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(told(rank, XD_ERROR_OUT_OF_MEMORY),
              sum + " of control group /job, whose memory.max is 115343360; rank " +
                  std::to_string(rank) + " asked 41943040");
  }
  EXPECT_EQ(told(2, XD_ERROR_MISMATCH), sum);
}

TEST_F(SharedLimits, ThatRanksSawAtDifferentTimesCountByTheLeastThatTheyLeave) {
  limit("/job", 100 * kMiB);
  add_rank("/job", 40 * kMiB);
  limit("/job", 100 * kMiB, 30 * kMiB);
  add_rank("/job", 40 * kMiB);
  for (const int rank : {0, 1}) EXPECT_NE(told(rank, XD_ERROR_OUT_OF_MEMORY), "");
}

TEST_F(SharedLimits, GroupsOfTheirOwnDoNotAddUp) {
  limit("/job/a", 50 * kMiB);
  limit("/job/b", 50 * kMiB);
  add_rank("/job/a", 40 * kMiB);
  add_rank("/job/b", 40 * kMiB);
  for (const int rank : {0, 1}) EXPECT_EQ(told(rank, XD_SUCCESS), "");
}

TEST_F(SharedLimits, OfAGroupAboveTheirsAddUp) {
  limit("/job", 70 * kMiB);
  add_rank("/job/a", 40 * kMiB);
  add_rank("/job/b", 40 * kMiB);
  for (const int rank : {0, 1}) {
    expect_words(told(rank, XD_ERROR_OUT_OF_MEMORY), {"control group /job, whose"});
  }
}

TEST_F(SharedLimits, OfTheHostAddUp) {
  add_rank("/job/a", 600 * kMiB);
  add_rank("/job/b", 600 * kMiB);
  for (const int rank : {0, 1}) {
    expect_words(told(rank, XD_ERROR_OUT_OF_MEMORY), {"bytes of this host; rank"});
  }
}

TEST_F(SharedLimits, OfSomeRanksLeaveTheOthersWithAMismatch) {
  limit("/job/a", 50 * kMiB);
  add_rank("/job/b", 40 * kMiB);
  add_rank("/job/a", 40 * kMiB);
  add_rank("/job/a", 40 * kMiB);
  EXPECT_TRUE(told(0, XD_ERROR_MISMATCH).starts_with("ranks 1, 2 together asked 83886080 bytes"));
  for (const int rank : {1, 2}) EXPECT_NE(told(rank, XD_ERROR_OUT_OF_MEMORY), "");
}

// Huge pages belong to no process until they are taken, and then whole segments lie in them.
TEST_F(SharedLimits, AreSparedWhatHugePagesHold) {
  limit("/job", 50 * kMiB);
  for (int rank = 0; rank < 3; ++rank) add_rank("/job", 40 * kMiB, 80 * kMiB);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(told(rank, XD_SUCCESS), "");
  add_rank("/job", 40 * kMiB, 80 * kMiB);
  EXPECT_TRUE(told(0, XD_ERROR_MISMATCH).starts_with("ranks 2, 3 together asked 83886080 bytes"));
}

TEST_F(SharedLimits, HoldForSizesThatDoNotAddUpInSixtyFourBits) {
  for (int rank = 0; rank < 3; ++rank) add_rank("/job", UINT64_MAX / 2);
  expect_words(told(1, XD_ERROR_OUT_OF_MEMORY), {"18446744073709551615 bytes"});
}

TEST_F(SharedLimits, TheTightestCountWhereThereAreMany) {
  std::string group;
  for (int depth = 0; depth < 12; ++depth) {
    group += "/g" + std::to_string(depth);
    limit(group, (depth == 5 ? 70 : 900) * kMiB);
  }
  add_rank(group, 40 * kMiB);
  add_rank(group, 40 * kMiB);
  expect_words(told(0, XD_ERROR_OUT_OF_MEMORY), {"/g4/g5, whose"});
}

}  // namespace
}  // namespace xd
