// The results of cases, as text and as JSON lines.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include "../machine.h"
#include "case_run.h"
#include "machine.h"

namespace bench::gpu {

struct Run {
  Machine machine;
  GpuMachine gpus;
  Options options;
  Place place;
  std::string baseline;  // "NCCL 2.28.9", or the reason why there is none
};

void print_head(const Run& run);
void print_case(const Run& run, const Case& one, const CaseResult& result);

struct Finished {
  Case one;
  CaseResult result;
};
// One line per operation: floor, ours, SMs, target.
void print_summary(const std::vector<Finished>& cases);

// A file of JSON objects, one per line: first the machine, then every measured operation. Lines are
// on disk when a case ends, so that a run that is cut short leaves its earlier results.
class JsonLines {
 public:
  // Throws std::runtime_error if the file cannot be written.
  JsonLines(const std::string& path, const Run& run);
  void add(const Run& run, const Case& one, const CaseResult& result);

 private:
  void write(const Json& line);
  const std::string path_;
  std::ofstream file_;
};

}  // namespace bench::gpu
