// Measures how long an operation takes on the device, from a start that all ranks have in common.
#pragma once

#include <functional>
#include <vector>

#include "device.h"
#include "kernels.h"

namespace bench::gpu {

struct Iterations {
  int warmup;
  int timed;
  int all() const { return warmup + timed; }
};

// Each rank makes one, collectively.
class Stopwatch {
 public:
  // `slots`: memory of slots_bytes() on every rank.
  Stopwatch(const SharedMemory& slots, int rank, int ranks, const Stream& stream);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  static std::size_t slots_bytes() { return kMaxRanks * sizeof(std::uint32_t); }

  // Seconds of each timed iteration on this rank, taken by events on the stream. `enqueue` gets the
  // iteration's number, from 0 in the warm-up.
  std::vector<double> measure(Iterations iterations, const std::function<void(int)>& enqueue);
  // `before` and `after` enqueue what is not timed; the common start comes behind `before`.
  std::vector<double> measure_between(Iterations iterations, const std::function<void()>& before,
                                      const std::function<void(int)>& enqueue,
                                      const std::function<void()>& after);

 private:
  double measure_once(const std::function<void()>& enqueue);

  const Stream& stream_;
  const PinnedWords words_;
  Gate gate_{};
  cudaEvent_t start_ = nullptr, end_ = nullptr;
};

}  // namespace bench::gpu
