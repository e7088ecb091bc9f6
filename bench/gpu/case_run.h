// Runs one case on all ranks.
#pragma once

#include <string>
#include <vector>

#include "../report.h"
#include "cases.h"
#include "overlap.h"
#include "wire_floor.h"

namespace bench::gpu {

struct StepResult {
  Step step;
  int blocks;                   // on rank 0, of which a multiprocessor has one; 0 = not known
  std::vector<double> seconds;  // the maximum over the ranks, of every iteration
  OverlapTimes overlap;         // empty: not measured
};

// Complete on rank 0.
struct CaseResult {
  std::vector<StepResult> steps;
  Volume volume;
  WireFloor::Result floor, copy_engine;
  std::vector<double> nccl;  // empty: not measured
  xd_ep_memory group_memory = XD_EP_MEMORY_INIT;
};

// Collective. Throws if any rank fails, naming the ranks on standard error; earlier measurements
// stand in `result`.
void run_case(const Place& place, const Case& one, int number, CaseResult& result);

}  // namespace bench::gpu
