// One rank's part of the low-latency measurement through the library's C API.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ranks.h"
#include "workload.h"

namespace bench {

// A measured step. `clock` says what is timed: "call", on the CPU, from the common start until the
// call has returned; on CUDA see gpu/ll_cuda.h.
struct LlStep {
  const char* operation;
  const char* by;    // "low latency", or the layout that takes several calls
  const char* rows;  // their type on the way
  const char* clock;
};

struct LlTimes {
  LlStep step;
  std::vector<double> seconds;  // of every iteration, the maximum over the ranks
  int sms = 0;                  // multiprocessors that it holds; 0 = none, or not known
};

struct LlResults {
  std::vector<LlTimes> times;
  bool equal_bits = false;  // all ways end with the same bits on every rank
  xd_ll_memory memory = XD_LL_MEMORY_INIT;
};

// Collective. The results are complete on rank 0 and empty on the others.
LlResults run_ll(const Launch& launch, int rank, const Workload& workload);

}  // namespace bench
