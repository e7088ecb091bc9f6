#include "observe/stats_segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cerrno>
#include <cstdio>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/fd.h"
#include "base/math.h"

namespace xd::observe {
namespace {

void construct(Counters* counters, const Identity& identity) {
  new (counters) Counters{};
  for (int r = 0; r < identity.num_ranks; ++r) new (counters->waits() + r) Number{};
  counters->identity = identity;
}

// This process's stats segment. A fork begins one of its own and leaves its parent's alone.
class StatsSegment {
 public:
  static StatsSegment& instance() {
    static StatsSegment* const stats_segment =
        new StatsSegment;  // sequences may go after static objects
    return *stats_segment;
  }

  struct Claimed {
    int index;
    Counters* counters;
  };
  // A null pointer where no place can be had.
  Claimed claim(const Identity& identity) noexcept {
    const std::lock_guard lock(mutex_);
    if (pid_ != ::getpid()) forget();
    if (base_ == nullptr && !open()) return {};
    std::size_t i = 0;
    while (i < used_.size() && used_[i]) ++i;
    if (i == used_.size() || !allocate(i, identity.num_ranks)) {
      if (used_.none()) close();
      return {};
    }
    used_.set(i);
    construct(counters(i), identity);
    next_generation(i);
    return {static_cast<int>(i), counters(i)};
  }

  void release(const Claimed& place) noexcept {
    const std::lock_guard lock(mutex_);
    const std::size_t i = at(place.index);
    // A place of a parent process is the parent's.
    if (pid_ != ::getpid() || base_ == nullptr || counters(i) != place.counters) return;
    next_generation(i);
    used_.reset(i);
    if (used_.none()) close();
  }

 private:
  Counters* counters(std::size_t i) const {
    return reinterpret_cast<Counters*>(base_ + StatsMap::place(i));
  }
  // Release: who sees a place in use finds its counters made. The fence: who sees counters of the
  // next use, and looks behind an acquire fence, finds that this one is over.
  void next_generation(std::size_t i) {
    auto& header = *reinterpret_cast<StatsHeader*>(base_);
    header.generation[i].fetch_add(1, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_release);
  }

  bool open() noexcept {
    UniqueFd fd(::memfd_create(kStatsName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd || ::fchmod(fd.get(), S_IRUSR | S_IWUSR) != 0 ||
        ::ftruncate(fd.get(), StatsMap::kBytes) != 0 ||
        ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 ||
        ::fallocate(fd.get(), 0, 0, StatsMap::kPage) != 0) {
      return false;
    }
    void* const base = ::mmap(nullptr, StatsMap::kBytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
    if (base == MAP_FAILED) return false;
    base_ = static_cast<std::byte*>(base);
    fd_ = std::move(fd);
    new (base_) StatsHeader{StatsHeader::kMagic, StatsMap::kLayout, {}};
    return true;
  }
  // Gives a place its pages, so that touching them cannot fail.
  bool allocate(std::size_t i, int ranks) noexcept {
    return ::fallocate(fd_.get(), 0, static_cast<off_t>(StatsMap::place(i)),
                       static_cast<off_t>(Counters::bytes(ranks))) == 0;
  }
  void close() noexcept {
    ::munmap(base_, StatsMap::kBytes);
    base_ = nullptr;
    fd_.reset();
  }
  // The parent's groups may still write into its stats segment here, so the mapping stays.
  void forget() noexcept {
    base_ = nullptr;
    fd_.reset();
    used_.reset();
    pid_ = ::getpid();
  }

  std::mutex mutex_;
  pid_t pid_ = ::getpid();
  UniqueFd fd_;
  std::byte* base_ = nullptr;
  std::bitset<kPlaces> used_;
};

}  // namespace

Place::Place(const Identity& identity) {
  const StatsSegment::Claimed claimed = StatsSegment::instance().claim(identity);
  index_ = claimed.index;
  counters_ = claimed.counters;
  if (counters_ != nullptr) return;
  memory_.reset(new (std::align_val_t{alignof(Counters)})
                    std::byte[Counters::bytes(identity.num_ranks)]);
  counters_ = reinterpret_cast<Counters*>(memory_.get());
  construct(counters_, identity);
}

Place::~Place() {
  if (memory_ == nullptr) StatsSegment::instance().release({index_, counters_});
}

// ---- Reading -----------------------------------------------------------------------------------

namespace {

// The process's descriptor of its stats segment.
UniqueFd open_stats_segment(int pid) {
  const std::string folder = concat("/proc/", pid, "/fd");
  const std::unique_ptr<DIR, int (*)(DIR*)> list(::opendir(folder.c_str()), ::closedir);
  XD_REQUIRE(list, "pid = ", pid, ", expected a process of this user");
  const std::string target = concat("/memfd:", kStatsName);
  while (const dirent* entry = ::readdir(list.get())) {
    const std::string link = folder + "/" + entry->d_name;
    std::array<char, 256> text{};
    const ssize_t length = ::readlink(link.c_str(), text.data(), text.size() - 1);
    if (length <= 0 || !std::string_view(text.data()).starts_with(target)) continue;
    UniqueFd fd(::open(link.c_str(), O_RDONLY | O_CLOEXEC));
    if (fd) return fd;
  }
  fail(XD_ERROR_INVALID_ARGUMENT, "pid = ", pid, ", expected a process with groups");
}

}  // namespace

StatsReader::StatsReader(int pid) {
  const UniqueFd fd = open_stats_segment(pid);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail_errno("fstat", errno);
  // A file that can shrink under a reader would end it by SIGBUS.
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  const bool good = status.st_size == static_cast<off_t>(StatsMap::kBytes) && seals >= 0 &&
                    (seals & F_SEAL_SHRINK) != 0;
  const auto* base =
      good ? ::mmap(nullptr, StatsMap::kBytes, PROT_READ, MAP_SHARED, fd.get(), 0) : MAP_FAILED;
  if (good && base == MAP_FAILED) fail_errno("mmap", errno);
  base_ = good ? static_cast<const std::byte*>(base) : nullptr;
  const auto* header = reinterpret_cast<const StatsHeader*>(base_);
  if (good && header->magic == StatsHeader::kMagic && header->layout == StatsMap::kLayout) return;
  if (good) ::munmap(const_cast<std::byte*>(base_), StatsMap::kBytes);
  fail(XD_ERROR_UNSUPPORTED, "pid = ", pid,
       ": its library lays out its numbers otherwise, expected the same version as here");
}

StatsReader::~StatsReader() { ::munmap(const_cast<std::byte*>(base_), StatsMap::kBytes); }

bool StatsReader::read(std::size_t place, xd_stats_source& source, xd_stats& stats,
                       std::int64_t* waits, int max_ranks) const {
  const auto& generation = reinterpret_cast<const StatsHeader*>(base_)->generation[place];
  const auto& counters = *reinterpret_cast<const Counters*>(base_ + StatsMap::place(place));
  // A place that changes hands meanwhile is read again, or taken for free.
  for (int tries = 0; tries < 3; ++tries) {
    const std::uint32_t before = generation.load(std::memory_order_acquire);
    if (before % 2 == 0) return false;
    source = source_of(counters);
    stats = stats_of(counters);
    const int ranks = std::clamp(source.num_ranks, 0, XD_MAX_RANKS);
    for (int r = 0; r < std::min(ranks, max_ranks); ++r) {
      waits[r] = static_cast<std::int64_t>(counters.waits()[r].get());
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (generation.load(std::memory_order_relaxed) == before) return true;
  }
  return false;
}

}  // namespace xd::observe
