// Measures how long operations of a rank take, from starts that all ranks have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "device.h"

namespace bench {

struct Iterations {
  int warmup;
  int timed;
  int all() const { return warmup + timed; }
  // One of `rounds` equal shares, with as large a share of the warm-up. Steps that take rounds in
  // turn meet the same machine.
  Iterations share(int round, int rounds) const {
    return {(warmup + rounds - 1) / rounds, timed * (round + 1) / rounds - timed * round / rounds};
  }
};

class Stopwatch {
 public:
  Stopwatch() = default;
  virtual ~Stopwatch() = default;
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // `body` is timed and gets the iteration's number, from 0 in the warm-up. `before`, behind which
  // the common start comes, and `after` are not.
  struct Part {
    std::function<void(int)> body;
    std::function<void()> before = [] {}, after = [] {};
    // Behind the common start. Where it is given, the time runs from its end.
    std::function<void()> lead{};
  };
  // Collective. Seconds of each timed iteration on this rank.
  std::vector<double> measure(Iterations iterations, const std::function<void(int)>& body) {
    return measure_parts(iterations, {Part{.body = body}});
  }
  // Likewise of several parts, each with a common start: the time is their sum.
  std::vector<double> measure_parts(Iterations iterations, const std::vector<Part>& parts);

 private:
  virtual double measure_once(const std::function<void()>& lead,
                              const std::function<void()>& body) = 0;
};

// For operations that have ended when their calls return.
class HostStopwatch : public Stopwatch {
 public:
  // Collective, before any other allocation in the communicator's heap: see SharedMemory.
  HostStopwatch(xd_comm* comm, int rank)
      : comm_(comm), rank_(rank), start_(comm, host(), sizeof(std::int64_t)) {}
  static constexpr std::size_t kHeapBytes = 4096;  // taken of the heap

 private:
  double measure_once(const std::function<void()>& lead,
                      const std::function<void()>& body) override;
  std::int64_t agree_on_start();

  xd_comm* const comm_;
  const int rank_;
  const SharedMemory start_;
  std::int64_t last_start_ = 0;
};

}  // namespace bench
