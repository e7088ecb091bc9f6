// Times steps on all ranks, every iteration with a common start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "tensor.h"

namespace bench {

class Timing {
 public:
  struct Size {
    std::size_t steps;
    int iters, warmup;
  };

  // Collective, before any other allocation in the communicator's heap: see SharedBlock.
  Timing(xd_comm* comm, int rank, int ranks, const Size& size);
  static constexpr std::size_t kHeapBytes = 4096;  // taken by a Timing

  // Which of the iterations the calls of measure() do from here on: one of `rounds` equal shares,
  // with as large a share of the warm-up. Steps that take rounds in turn meet the same machine.
  void take_round(int round, int rounds);

  // Collective. Times `body`, warmup + iters times; `rest` runs after each, and is not timed.
  void measure(
      std::size_t step, const std::function<void()>& body,
      const std::function<void()>& rest = [] {}) {
    measure(step, std::vector<Part>{{body, rest}});
  }
  // Likewise for a step of several parts, each with a common start: the time is their sum.
  struct Part {
    std::function<void()> body, rest;
  };
  void measure(std::size_t step, const std::vector<Part>& parts);

  // Collective. [step][iteration]: seconds, the maximum over the ranks; empty on ranks but 0.
  std::vector<std::vector<double>> collect() const;

 private:
  std::int64_t agree_on_start();

  xd_comm* const comm_;
  const int rank_, ranks_;
  const Size size_;
  int begin_ = 0, end_, warmup_;  // of the round
  const SharedBlock start_;
  std::vector<std::vector<double>> seconds_;  // [step][iteration], of this rank
  std::int64_t last_start_ = 0;
};

}  // namespace bench
