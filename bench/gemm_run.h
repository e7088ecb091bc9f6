// One rank's part of the measurement of products through the library's C API.
#pragma once

#include <crossdock/gemm.h>

#include <string>
#include <vector>

#include "gemm_data.h"
#include "ranks.h"

namespace bench {

// The ways that are not the library's algorithms.
inline constexpr const char* kProduct = "product alone";
inline constexpr const char* kTransfer = "transfer alone";
inline constexpr const char* kApart = "one after the other";

struct GemmWay {
  std::string name;  // one of those above, or what the call's `algo` says
  std::string algo;  // of the library: the algorithm that ran
  int products = 0;  // that it computed, one after the other
  double estimate_us = 0;
  std::vector<double> seconds{};  // of every iteration, the maximum over the ranks
};

struct GemmResults {
  std::vector<GemmWay> ways;
  bool right = false;  // exact sums on every rank, and equal bits by all ways
  xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
};

// Collective. The results are complete on rank 0 and empty on the others.
GemmResults run_gemm(const Launch& launch, int rank, const GemmProblem& problem);

}  // namespace bench
