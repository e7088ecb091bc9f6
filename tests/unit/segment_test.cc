// Shared memory segments: sharing, identity within a process, exhaustion, and what is left behind.
#include "memory/host_segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memory/available.h"
#include "support/usage.h"
#include "unit/errors.h"

namespace xd {
namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;

UniqueFd duplicate(const UniqueFd& fd) { return UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)); }

ino_t inode_of(const UniqueFd& fd) {
  struct stat status {};
  EXPECT_EQ(::fstat(fd.get(), &status), 0);
  return status.st_ino;
}

// Lines of this process's maps that show the memory file `inode`; of any such file if it is 0.
std::size_t mappings(ino_t inode) {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    const bool ours = line.find("/memfd:crossdock") != std::string::npos;
    const bool wanted = inode == 0 || line.find(" " + std::to_string(inode) + " ") != line.npos;
    if (ours && wanted) ++count;
  }
  return count;
}

using test::error_of;
using test::expect_error;

TEST(Segment, IsZeroWritableAndOfWholePages) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto created = HostSegment::create(3 * page + 1, "test");
  const Segment& segment = *created.segment;
  EXPECT_EQ(segment.bytes(), 4 * page);
  EXPECT_TRUE(std::all_of(segment.base(), segment.base() + segment.bytes(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
  std::memset(segment.base(), 0x5a, segment.bytes());
  EXPECT_TRUE(segment.contains(segment.base()));
  EXPECT_TRUE(segment.contains(segment.base() + segment.bytes() - 1));
  EXPECT_FALSE(segment.contains(segment.base() + segment.bytes()));
  EXPECT_FALSE(segment.contains(segment.base() - 1));
}

TEST(Segment, AllPagesExistFromTheStart) {
  const auto created = HostSegment::create(100 * kMiB + 1, "test");
  struct stat status {};
  ASSERT_EQ(::fstat(created.fd.get(), &status), 0);
  EXPECT_EQ(static_cast<std::size_t>(status.st_size), created.segment->bytes());
  EXPECT_GE(static_cast<std::size_t>(status.st_blocks) * 512, created.segment->bytes());
}

TEST(Segment, SizeCannotChange) {
  const auto created = HostSegment::create(1 * kMiB, "test");
  EXPECT_NE(::ftruncate(created.fd.get(), 4096), 0);
  EXPECT_NE(::ftruncate(created.fd.get(), 2 * kMiB), 0);
  EXPECT_NE(::fcntl(created.fd.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(Segment, UsesHugePagesExactlyWhereTheSystemHasThem) {
  std::size_t free_pages = 0, page_kib = 0, reserved = 0;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key; meminfo >> key;) {
    if (key == "HugePages_Free:") meminfo >> free_pages;
    if (key == "HugePages_Rsvd:") meminfo >> reserved;
    if (key == "Hugepagesize:") meminfo >> page_kib;
  }
  const bool enough = page_kib == 2048 && free_pages >= reserved + 2;
  const auto created = HostSegment::create(3 * kMiB, "test");
  EXPECT_EQ(created.segment->huge_pages(), enough);
  EXPECT_EQ(created.segment->bytes(), enough ? 4 * kMiB : 3 * kMiB);
  EXPECT_FALSE(HostSegment::create(1 * kMiB, "test").segment->huge_pages());
  // The mapping of one who opens it says the same.
  auto created_bytes = created.segment->bytes();
  EXPECT_EQ(HostSegment::open(duplicate(created.fd), created_bytes)->huge_pages(), enough);
}

TEST(Segment, IsMappedOncePerProcess) {
  auto created = HostSegment::create(1 * kMiB, "test");
  const ino_t inode = inode_of(created.fd);
  std::byte* const base = created.segment->base();
  auto second = HostSegment::open(duplicate(created.fd), 1 * kMiB);
  EXPECT_EQ(second->base(), base);
  EXPECT_EQ(mappings(inode), 1u);

  created.segment.reset();
  EXPECT_EQ(mappings(inode), 1u) << "the second holder still needs it";
  EXPECT_EQ(HostSegment::open(duplicate(created.fd), 1 * kMiB)->base(), base);
  second.reset();
  EXPECT_EQ(mappings(inode), 0u);

  const auto again = HostSegment::open(duplicate(created.fd), 1 * kMiB);
  EXPECT_EQ(mappings(inode), 1u);
}

TEST(Segment, ThreadsThatHoldItTogetherHaveOneBase) {
  constexpr int kThreads = 4;
  auto created = HostSegment::create(64 * kKiB, "test");
  created.segment.reset();
  std::vector<std::byte*> bases(kThreads);
  std::barrier sync(kThreads);
  std::atomic<int> differences = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 300; ++round) {
        const auto segment = HostSegment::open(duplicate(created.fd), 64 * kKiB);
        bases[static_cast<std::size_t>(thread)] = segment->base();
        sync.arrive_and_wait();
        if (bases[0] != segment->base()) ++differences;
        sync.arrive_and_wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(differences, 0);
  EXPECT_EQ(mappings(inode_of(created.fd)), 0u);
}

TEST(Segment, MoreThanThereIsIsAnErrorWithBothSizes) {
  const std::uint64_t available = available_memory();
  for (const std::size_t bytes :
       {SIZE_MAX, SIZE_MAX - 4095, SIZE_MAX / 2, SIZE_MAX / 2 + 1, std::size_t{1} << 50,
        static_cast<std::size_t>(available) + 1024 * kMiB}) {
    const auto error = error_of([bytes] { HostSegment::create(bytes, "heap of rank 3"); });
    const std::string asked = "heap of rank 3: asked " + std::to_string(bytes) + " bytes";
    expect_error(error, XD_ERROR_OUT_OF_MEMORY, {asked, "available "});
    EXPECT_TRUE(error->text().starts_with(asked)) << error->text();
  }
  EXPECT_EQ(mappings(0), 0u) << "a failed call must leave nothing behind";
}

// Growing a file past the limit would end the process by SIGXFSZ.
TEST(Segment, TheLimitOnFileSizesIsAnError) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit few{.rlim_cur = 64 * kKiB, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &few), 0);
  for (const std::size_t bytes : {64 * kKiB + 1, 4 * kMiB}) {
    expect_error(error_of([bytes] { HostSegment::create(bytes, "test"); }), XD_ERROR_OUT_OF_MEMORY,
                 "");
  }
  EXPECT_EQ(HostSegment::create(64 * kKiB, "test").segment->bytes(), 64 * kKiB);
  EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
}

TEST(Segment, NoBytesAreAnInvalidArgument) {
  expect_error(error_of([] { HostSegment::create(0, "test"); }), XD_ERROR_INVALID_ARGUMENT, "");
  const auto created = HostSegment::create(4096, "test");
  expect_error(error_of([&] { HostSegment::open(duplicate(created.fd), 0); }),
               XD_ERROR_INVALID_ARGUMENT, "");
}

void expect_refused(UniqueFd fd, std::size_t bytes, const std::string& reason) {
  ASSERT_TRUE(fd);
  expect_error(error_of([&] { HostSegment::open(std::move(fd), bytes); }),
               XD_ERROR_INVALID_ARGUMENT, reason);
}

UniqueFd memory_file(std::size_t bytes, int seals) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(Segment, FilesWhoseSizeMayChangeAreRefused) {
  expect_refused(memory_file(8192, 0), 8192, "sealed");
  expect_refused(memory_file(8192, F_SEAL_SHRINK), 8192, "sealed");
  expect_refused(memory_file(8192, F_SEAL_SHRINK | F_SEAL_GROW), 8192, "sealed");
}

TEST(Segment, FilesOfAnotherSizeAreRefused) {
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  for (const std::size_t bytes : {4096, 8191, 8193, 12288}) {
    expect_refused(memory_file(8192, kAll), bytes, "8192 bytes, expected " + std::to_string(bytes));
  }
}

TEST(Segment, OtherThingsThanMemoryFilesAreRefused) {
  const std::string temporary = testing::TempDir();
  UniqueFd regular(::open(temporary.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(regular.get(), 8192), 0);
  // Where the directory is itself in memory, the file can be told by its seals only.
  expect_refused(std::move(regular), 8192, "memory segment: ");
  UniqueFd in_memory(::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(in_memory.get(), 8192), 0);
  expect_refused(std::move(in_memory), 8192, "sealed");
  expect_refused(UniqueFd(::open("/dev/zero", O_RDWR | O_CLOEXEC)), 8192, "not a memory file");
  expect_refused(UniqueFd(::open("/", O_RDONLY | O_CLOEXEC)), 8192, "not a memory file");
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd writing(ends[1]);
  expect_refused(UniqueFd(ends[0]), 8192, "not a memory file");
}

TEST(Segment, FilesThatCannotBeWrittenAreRefused) {
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
  expect_error(error_of([] { HostSegment::open(memory_file(8192, kAll), 8192); }), XD_ERROR_SYSTEM,
               "mmap");
}

TEST(Segment, DescriptorsAndMappingsStayConstant) {
  const auto round = [] {
    auto created = HostSegment::create(2 * kMiB + 1, "test");
    const std::size_t bytes = created.segment->bytes();
    const auto peer = HostSegment::open(std::move(created.fd), bytes);
    EXPECT_TRUE(error_of([] { HostSegment::open(memory_file(4096, 0), 4096); }));
  };
  round();
  const std::size_t before = test::open_descriptors();
  for (int i = 0; i < 50; ++i) round();
  EXPECT_EQ(test::open_descriptors(), before);
  EXPECT_EQ(mappings(0), 0u);
}

}  // namespace
}  // namespace xd
