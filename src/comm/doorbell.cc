#include "comm/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace xd {
namespace {

long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value,
           const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout,
                   nullptr, FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

void Doorbell::ring() {
  rings_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex(&rings_, FUTEX_WAKE, INT_MAX, nullptr);
}

void Doorbell::sleep(std::uint32_t seen, const Deadline& deadline) {
  // FUTEX_WAIT_BITSET takes an absolute time on the monotonic clock, which is steady_clock's.
  const auto since_boot =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.when().time_since_epoch());
  const timespec until{.tv_sec = static_cast<time_t>(since_boot.count() / 1'000'000'000),
                       .tv_nsec = static_cast<long>(since_boot.count() % 1'000'000'000)};
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  futex(&rings_, FUTEX_WAIT_BITSET, seen, &until);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace xd
