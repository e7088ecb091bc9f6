// A common start for all ranks of this host. A barrier alone lets them go one after another when
// there are fewer cores than ranks; so after it every rank waits, yielding its core, for a moment
// that rank 0 has named. Times count from that moment.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>

namespace bench {

inline std::int64_t nanoseconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Long enough for every rank to have got a core once.
inline std::int64_t choose_start() { return nanoseconds_now() + 300'000; }

inline void wait_for_start(std::int64_t start) {
  while (nanoseconds_now() < start) ::sched_yield();
}

inline double seconds_since(std::int64_t start) {
  return static_cast<double>(nanoseconds_now() - start) * 1e-9;
}

}  // namespace bench
