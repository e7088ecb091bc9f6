#include "memory/host_segment.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "memory/available.h"
#include "memory/process_token.h"

namespace xd {

// The mappings of this process. Entries are weak: a mapping lives as long as some rank holds it.
class HostSegmentTable {
 public:
  // The table is never destroyed, so that segments may be dropped at any time, also by other static
  // destructors.
  static HostSegmentTable& instance() {
    static HostSegmentTable& table = *new HostSegmentTable;
    return table;
  }

  // Returns the one mapping of this file, and makes it if there is none.
  std::shared_ptr<HostSegment> map(const UniqueFd& fd, std::size_t bytes, bool huge_pages);

 private:
  std::mutex mutex_;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<HostSegment>> entries_;
};

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Memory is taken in steps, with a look at the memory that is left before each. So a process that
// takes memory at the same time is noticed before the kernel's OOM killer comes.
constexpr std::size_t kStep = std::size_t{64} << 20;

struct stat stat_of(const UniqueFd& fd) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail_errno("fstat of a memory segment", errno);
  return status;
}

[[noreturn]] void fail_out_of_memory(const char* what, std::size_t asked, std::size_t taken) {
  const MemoryLimit limit = tightest_limit();
  fail(XD_ERROR_OUT_OF_MEMORY, what, ": asked ", asked, " bytes of shared memory, available ",
       limit.left, " bytes of ", limit.name, ", after taking ", taken);
}

// Fills the page tables now, so that the first operations meet no page faults. Best effort: kernels
// before 5.14 cannot.
void populate(std::byte* base, std::size_t bytes) { ::madvise(base, bytes, MADV_POPULATE_WRITE); }

void allocate_pages(const UniqueFd& fd, const HostSegment& segment, const char* what) {
  for (std::size_t at = 0; at < segment.bytes();) {
    if (segment.bytes() - at > available_memory()) fail_out_of_memory(what, segment.bytes(), at);
    const std::size_t bytes = std::min(kStep, segment.bytes() - at);
    // Touched through the mapping, memory may come in transparent huge pages; fallocate adds what
    // is missing.
    populate(segment.base() + at, bytes);
    int error = 0;
    do {
      error = ::fallocate(fd.get(), 0, static_cast<off_t>(at), static_cast<off_t>(bytes)) == 0
                  ? 0
                  : errno;
    } while (error == EINTR);
    if (error == ENOSPC || error == ENOMEM || error == EFBIG) {
      fail_out_of_memory(what, segment.bytes(), at);
    }
    if (error != 0) fail_errno(concat("fallocate for ", what), error);
    at += bytes;
  }
}

UniqueFd duplicate(const UniqueFd& fd) {
  UniqueFd second(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!second) fail_errno("duplicate of a memory segment's descriptor", errno);
  return second;
}

// Memory files count as files here: growing one past this limit would raise SIGXFSZ.
std::uint64_t file_size_limit() {
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0) fail_errno("getrlimit(RLIMIT_FSIZE)", errno);
  return std::min<std::uint64_t>(limit.rlim_cur, INT64_MAX);
}

void seal(const UniqueFd& fd) {
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail_errno("fcntl(F_ADD_SEALS)", errno);
}

std::byte* map_file(const UniqueFd& fd, std::size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED && errno == ENOMEM) {
    fail(XD_ERROR_OUT_OF_MEMORY, "memory segment: no address space left for ", bytes, " bytes");
  }
  if (base == MAP_FAILED) fail_errno(concat("mmap of ", bytes, " bytes"), errno);
  return static_cast<std::byte*>(base);
}

// Returns nothing if the pool of huge pages cannot hold all bytes.
HostSegment::Created create_in_huge_pages(std::size_t bytes) {
  UniqueFd fd(
      ::memfd_create("crossdock", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | MFD_HUGE_2MB));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return {};
  try {
    // Mapping reserves the pages, and fails at once when the pool is too small.
    auto segment = HostSegmentTable::instance().map(fd, bytes, true);
    if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0) return {};
    seal(fd);
    return {std::move(segment), std::move(fd)};
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

HostSegment::HostSegment(const UniqueFd& fd, std::size_t bytes, bool huge_pages)
    : Segment(map_file(fd, bytes), bytes, huge_pages) {
  if (!huge_pages) ::madvise(base(), bytes, MADV_HUGEPAGE);  // a wish that the system may refuse
}

HostSegment::~HostSegment() { ::munmap(base(), bytes()); }

void HostSegment::keep(UniqueFd fd) {
  static std::mutex& mutex = *new std::mutex;  // ranks of a process share its segments
  const std::scoped_lock lock(mutex);
  if (!kept_) kept_ = std::move(fd);
}

std::shared_ptr<HostSegment> HostSegmentTable::map(const UniqueFd& fd, std::size_t bytes,
                                                   bool huge_pages) {
  const struct stat status = stat_of(fd);
  const std::scoped_lock lock(mutex_);
  // An inode number may come back after its file is gone, but never while an entry is alive: a
  // mapping keeps its file.
  std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = entries_[{status.st_dev, status.st_ino}];
  if (auto known = entry.lock()) return known;
  std::shared_ptr<HostSegment> segment(new HostSegment(fd, bytes, huge_pages));
  entry = segment;
  return segment;
}

HostSegment::Created HostSegment::create(std::size_t bytes, const char* what) {
  XD_REQUIRE(bytes > 0, what, ": bytes = 0, expected more");
  const std::uint64_t limit = file_size_limit();
  if (bytes >= kHugePage && bytes <= limit - std::min<std::uint64_t>(limit, kHugePage)) {
    if (auto created = create_in_huge_pages(round_up(bytes, kHugePage)); created.segment) {
      return created;
    }
  }
  if (bytes > available_memory()) fail_out_of_memory(what, bytes, 0);
  const auto size = round_up(bytes, static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)));
  if (std::max<std::uint64_t>(bytes, size) > limit) {  // `size` may have wrapped
    fail(XD_ERROR_OUT_OF_MEMORY, what, ": asked ", bytes, " bytes of shared memory, available ",
         limit, " bytes, this process's limit on the size of files (ulimit -f)");
  }

  UniqueFd fd(::memfd_create("crossdock", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail_errno("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    if (errno == EFBIG || errno == ENOMEM) fail_out_of_memory(what, bytes, 0);
    fail_errno(concat("ftruncate to ", size, " bytes for ", what), errno);
  }
  auto segment = HostSegmentTable::instance().map(fd, size, false);
  allocate_pages(fd, *segment, what);
  seal(fd);
  return {std::move(segment), std::move(fd)};
}

std::shared_ptr<HostSegment> HostSegment::open(UniqueFd fd, std::size_t bytes) {
  XD_REQUIRE(bytes > 0, "memory segment: bytes = 0, expected more");
  const struct stat status = stat_of(fd);
  struct statfs filesystem {};
  if (::fstatfs(fd.get(), &filesystem) != 0) fail_errno("fstatfs of a memory segment", errno);
  const bool huge_pages = filesystem.f_type == HUGETLBFS_MAGIC;
  XD_REQUIRE(S_ISREG(status.st_mode) && (huge_pages || filesystem.f_type == TMPFS_MAGIC),
             "memory segment: the descriptor is not a memory file");
  // Files that cannot be sealed answer with the error -1, which would have all bits set.
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  XD_REQUIRE(seals >= 0 && (seals & kSeals) == kSeals, "memory segment: seals = ", seals,
             ", expected its size to be sealed (", kSeals, ")");
  XD_REQUIRE(std::cmp_equal(status.st_size, bytes), "memory segment: the file has ", status.st_size,
             " bytes, expected ", bytes);
  auto segment = HostSegmentTable::instance().map(fd, bytes, huge_pages);
  populate(segment->base(), segment->bytes());
  return segment;
}

OwnDemand HostSegmentMaker::demand(std::size_t bytes, const char* what) const {
  const std::uint64_t huge_pages = available_huge_pages();
  if (bytes > available_memory() && bytes > huge_pages) fail_out_of_memory(what, bytes, 0);
  OwnDemand own = make_demand(bytes, memory_limits());
  own.demand.huge_pages = huge_pages;
  own.demand.process = process_token();
  return own;
}

SegmentMaker::Made HostSegmentMaker::create(std::size_t bytes, const char* what) const {
  auto created = HostSegment::create(bytes, what);
  if (keeps_descriptors_) created.segment->keep(duplicate(created.fd));
  const std::uint64_t size = created.segment->bytes();
  Made made{.segment = std::move(created.segment),
            .description = std::vector<std::byte>(sizeof(size)),
            .fd = std::move(created.fd)};
  std::memcpy(made.description.data(), &size, sizeof(size));
  return made;
}

std::shared_ptr<Segment> HostSegmentMaker::open(int owner, std::span<const std::byte> description,
                                                UniqueFd fd) const {
  std::uint64_t size = 0;
  if (description.size() != sizeof(size)) {
    fail(XD_ERROR_MISMATCH, "rank ", owner, " sent a malformed segment description");
  }
  std::memcpy(&size, description.data(), sizeof(size));
  UniqueFd kept = keeps_descriptors_ ? duplicate(fd) : UniqueFd();
  auto segment = HostSegment::open(std::move(fd), size);
  if (kept) segment->keep(std::move(kept));
  return segment;
}

}  // namespace xd
