// What one run measures: a list of cases, from a preset or from the command line.
#pragma once

#include <string>
#include <vector>

#include "../workload.h"
#include "ep_rank.h"

namespace bench::gpu {

struct Step {
  Operation operation;
  int sms = 0;           // budget of the group; 0 = the library's choice
  double target_us = 0;  // of 4 GPUs of one NVLink host; 0: none
};

// One batch, its tensors in one kind of memory, and what is measured on it.
struct Case {
  std::string part;  // of a sweep: what varies
  Workload workload;
  bool staged = false;
  bool graph = false;
  bool baseline = true;
  std::vector<Step> steps;
};

// Throws std::invalid_argument for an unknown preset or operation. `ranks` and `devices`: how many
// there are; sweep:gpus takes fewer ranks where `may_shrink`.
std::vector<Case> make_cases(const Options& options, int ranks, int devices, bool may_shrink);

}  // namespace bench::gpu
