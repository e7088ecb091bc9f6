#include "stopwatch.h"

#include <atomic>
#include <stdexcept>

#include "ranks.h"
#include "start_line.h"

namespace bench {

std::vector<double> Stopwatch::measure_parts(Iterations iterations,
                                             const std::vector<Part>& parts) {
  std::vector<double> seconds;
  for (int i = 0; i < iterations.all(); ++i) {
    double sum = 0;
    for (const Part& part : parts) {
      part.before();
      sum += measure_once(part.lead, [&] { part.body(i); });
      part.after();
    }
    if (i >= iterations.warmup) seconds.push_back(sum);
  }
  return seconds;
}

double HostStopwatch::measure_once(const std::function<void()>& lead,
                                   const std::function<void()>& body) {
  std::int64_t start = agree_on_start();
  wait_for_start(start);
  if (lead) {
    lead();
    start = nanoseconds_now();
  }
  body();
  return seconds_since(start);
}

std::int64_t HostStopwatch::agree_on_start() {
  ok(xd_comm_barrier(comm_));
  const std::atomic_ref<std::int64_t> named(*reinterpret_cast<std::int64_t*>(start_.of(0)));
  if (rank_ == 0) named.store(choose_start(), std::memory_order_relaxed);
  // The barrier has ended the last round, so a value that differs from the one at its start
  // belongs to this round.
  const std::int64_t give_up = nanoseconds_now() + 60'000'000'000;
  std::int64_t start = named.load(std::memory_order_relaxed);
  while (start == last_start_) {
    if (nanoseconds_now() > give_up) throw std::runtime_error("rank 0 named no start in 60 s");
    ::sched_yield();
    start = named.load(std::memory_order_relaxed);
  }
  return last_start_ = start;
}

}  // namespace bench
