// The estimate of available memory, on made-up copies of /proc and /sys.
#include "memory/available.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace xd {
namespace {

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

}  // namespace
}  // namespace xd
