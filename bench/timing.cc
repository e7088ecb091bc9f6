#include "timing.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "start_line.h"

namespace bench {

Timing::Timing(xd_comm* comm, int rank, int ranks, const Size& size)
    : comm_(comm),
      rank_(rank),
      ranks_(ranks),
      size_(size),
      end_(size.iters),
      warmup_(size.warmup),
      start_(comm, sizeof(std::int64_t)),
      seconds_(size.steps, std::vector<double>(static_cast<std::size_t>(size.iters))) {}

void Timing::take_round(int round, int rounds) {
  begin_ = size_.iters * round / rounds;
  end_ = size_.iters * (round + 1) / rounds;
  warmup_ = (size_.warmup + rounds - 1) / rounds;
}

void Timing::measure(std::size_t step, const std::vector<Part>& parts) {
  for (int i = begin_ - warmup_; i < end_; ++i) {
    double sum = 0;
    for (const Part& part : parts) {
      const std::int64_t start = agree_on_start();
      wait_for_start(start);
      part.body();
      sum += seconds_since(start);
      part.rest();
    }
    if (i >= begin_) seconds_[step][static_cast<std::size_t>(i)] = sum;
  }
}

std::int64_t Timing::agree_on_start() {
  ok(xd_comm_barrier(comm_));
  const std::atomic_ref<std::int64_t> named(*static_cast<std::int64_t*>(start_.of(0)));
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

std::vector<std::vector<double>> Timing::collect() const {
  std::vector<std::vector<double>> of_step;
  for (const std::vector<double>& mine : seconds_)
    of_step.push_back(slowest(comm_, rank_, ranks_, mine));
  if (rank_ != 0) of_step.clear();
  return of_step;
}

}  // namespace bench
