#include "net/rank_results.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>

#include "start_line.h"

namespace bench::net {
namespace {

constexpr std::int64_t kPatience = 60'000'000'000;

template <class Ready>
void wait_until(const char* what, Ready&& ready) {
  const std::int64_t give_up = nanoseconds_now() + kPatience;
  while (!ready()) {
    if (nanoseconds_now() > give_up)
      throw std::runtime_error(std::string("waited 60 s for ") + what);
    ::sched_yield();
  }
}

}  // namespace

struct alignas(64) RankResults::Head {
  std::atomic<std::uint64_t> arrivals;
  alignas(64) std::atomic<std::uint64_t> round;  // of `start`
  std::atomic<std::int64_t> start;
};

struct alignas(64) RankResults::Area {
  double numbers[kNumbers];
  std::byte words[kWordBytes];
};

std::size_t RankResults::bytes() { return sizeof(Head) + kMaxRanks * sizeof(Area); }

RankResults::RankResults(const std::string& path, int rank, int ranks)
    : rank_(rank), ranks_(ranks) {
  if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks)
    throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                             ", expected at most " + std::to_string(kMaxRanks) + " ranks");
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat about {};
  void* memory = MAP_FAILED;
  if (file >= 0 && ::fstat(file, &about) == 0 && static_cast<std::size_t>(about.st_size) == bytes())
    memory = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file >= 0) ::close(file);
  if (memory == MAP_FAILED)
    throw std::runtime_error(path + ": expected a file of " + std::to_string(bytes()) +
                             " bytes, made by the driver");
  head_ = static_cast<Head*>(memory);
}

RankResults::~RankResults() { ::munmap(head_, bytes()); }

RankResults::Area& RankResults::area(int rank) const {
  return reinterpret_cast<Area*>(head_ + 1)[rank];
}
std::span<double> RankResults::numbers(int rank) const { return area(rank).numbers; }
std::span<std::byte> RankResults::words(int rank) const { return area(rank).words; }

void RankResults::barrier() {
  const std::uint64_t all = ++rounds_ * static_cast<std::uint64_t>(ranks_);
  head_->arrivals.fetch_add(1, std::memory_order_acq_rel);
  wait_until("all ranks to arrive",
             [&] { return head_->arrivals.load(std::memory_order_acquire) >= all; });
}

std::int64_t RankResults::common_start() {
  barrier();
  if (rank_ == 0) {
    head_->start.store(choose_start(), std::memory_order_relaxed);
    head_->round.store(rounds_, std::memory_order_release);
  }
  wait_until("rank 0 to name a start",
             [&] { return head_->round.load(std::memory_order_acquire) == rounds_; });
  return head_->start.load(std::memory_order_relaxed);
}

}  // namespace bench::net
