#include "net/measure.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "start_line.h"

namespace bench::net {
namespace {

double processor_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

// A rank's numbers: seconds of all iterations, seconds of processor, what was sent.
Measure::Measure(RankResults& rank_results, int iters, int warmup)
    : rank_results_(rank_results), iters_(iters), warmup_(warmup) {
  const auto most = static_cast<int>(RankResults::kNumbers / 2 - 2);
  if (iters < 1 || iters > most)
    throw std::invalid_argument("--iters " + std::to_string(iters) + ": expected 1 to " +
                                std::to_string(most));
}

void Measure::step(const std::string& name, const std::function<void()>& body,
                   const std::function<Sent()>& sent) {
  double* const seconds = rank_results_.numbers(rank_results_.rank()).data();
  double* const processor = seconds + iters_;
  const Sent before = sent();
  for (int i = -warmup_; i < iters_; ++i) {
    const std::int64_t start = rank_results_.common_start();
    wait_for_start(start);
    const double begun = processor_seconds();
    body();
    if (i < 0) continue;
    seconds[i] = seconds_since(start);
    processor[i] = processor_seconds() - begun;
  }
  const Sent after = sent();
  processor[iters_] = (after.puts - before.puts) / (warmup_ + iters_);
  processor[iters_ + 1] = (after.bytes - before.bytes) / (warmup_ + iters_);
  processor[iters_ + 2] = (after.wire - before.wire) / (warmup_ + iters_);
  rank_results_.barrier();
  if (rank_results_.rank() == 0) print(name);
  rank_results_.barrier();
}

void Measure::print(const std::string& name) const {
  const auto count = static_cast<std::size_t>(iters_);
  std::vector<double> sums(2 * count + 3);
  for (int rank = 0; rank < rank_results_.ranks(); ++rank) {
    const auto numbers = rank_results_.numbers(rank);
    for (std::size_t i = 0; i < sums.size(); ++i)
      sums[i] = i < count ? std::max(sums[i], numbers[i]) : sums[i] + numbers[i];
  }
  const auto half = sums.begin() + iters_;
  const nlohmann::ordered_json line{{"step", name},
                                    {"seconds", std::vector<double>(sums.begin(), half)},
                                    {"cpu", std::vector<double>(half, half + iters_)},
                                    {"puts", sums[2 * count]},
                                    {"bytes", sums[2 * count + 1]},
                                    {"wire", sums[2 * count + 2]}};
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

}  // namespace bench::net
