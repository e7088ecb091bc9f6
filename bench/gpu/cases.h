// The cases that one run measures, from a preset or from the command line.
#pragma once

#include <string>
#include <vector>

#include "../workload.h"
#include "ep_rank.h"

namespace bench::gpu {

struct Step {
  Operation operation;
  int sms = 0;           // budget of the group; 0 = the library's choice
  double target_us = 0;  // target for 4 GPUs of one NVLink host; 0: none
};

// One batch, its tensors in one kind of memory, and the operations that are measured on it.
struct Case {
  std::string part;  // in a sweep: the value that varies
  Workload workload;
  bool staged = false;
  bool graph = false;
  bool overlap = false;
  bool baseline = true;
  std::vector<Step> steps;
};

struct Limits {
  int ranks;
  int devices;
  int sms;          // multiprocessors of a rank; presets ask for no more
  bool may_shrink;  // sweep:gpus may take fewer ranks
};

// Throws std::invalid_argument for an unknown preset or operation.
std::vector<Case> make_cases(const Options& options, const Limits& limits);

}  // namespace bench::gpu
