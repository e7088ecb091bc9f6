// One rank's part of the measurement of products through the library's C API, on every device.
#pragma once

#include <crossdock/gemm.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../rank.h"
#include "data.h"

namespace bench {

// The ways that are not the library's algorithms.
inline constexpr const char* kProduct = "product alone";
inline constexpr const char* kTransfer = "transfer alone";
inline constexpr const char* kApart = "one after the other";

struct GemmWay {
  std::string name;  // one of those above, or what the call's `algo` says and how it is called
  std::string algo;  // of the library: the algorithm that ran
  int products = 0;  // products that it computed, one after the other
  double estimate_us = 0;
  double host_us = 0;             // of what is enqueued: p50 of the host's time for it, on rank 0
  std::vector<double> seconds{};  // of every iteration, the maximum over the ranks
};

struct GemmResults {
  std::vector<GemmWay> ways;
  bool right = false;  // exact sums on every rank, and equal bits by all ways
  xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
};

// The tensors of a rank. `whole` are rows of all tokens between the two steps: those that are
// gathered, or the terms of the sum.
struct GemmTensors {
  // Tensors that peers read lie in the symmetric memory of `symmetric_in`, if there is one.
  GemmTensors(const GemmProblem& problem, const Rank& at, xd_comm* symmetric_in);
  static std::size_t heap_bytes(const GemmProblem& problem, int rank);
  Tensor a, b, d, whole;
};

// The two steps that the library interleaves, each for itself, by the best means of a device.
class GemmSteps {
 public:
  GemmSteps() = default;
  virtual ~GemmSteps() = default;
  GemmSteps(const GemmSteps&) = delete;
  GemmSteps& operator=(const GemmSteps&) = delete;

  virtual void product() = 0;
  virtual void transfer() = 0;
  virtual bool has_transfer() const = 0;
  virtual Sums sums() const = 0;  // how transfer() rounds them
  // Chooses the fastest of several means, where all ranks compute at once. Collective.
  virtual void choose() {}
};
using MakeGemmSteps =
    std::function<std::unique_ptr<GemmSteps>(const GemmTensors& tensors, xd_gemm_context* context)>;

// Measures both steps and all algorithms of the library on a device. Collective. The results are
// complete on rank 0.
GemmResults measure_gemm(const GemmProblem& problem, const Rank& at, xd_comm* symmetric_in,
                         const MakeGemmSteps& make_steps);

// Collective, on the host. The results are complete on rank 0.
GemmResults run_gemm(const Launch& launch, int rank, const GemmProblem& problem);

}  // namespace bench
