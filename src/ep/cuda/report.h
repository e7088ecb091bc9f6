// What kernels report to their host, in words.
#pragma once

#include <cstdint>

#include "ep/cuda/params.h"
#include "ep/group.h"

namespace xd::ep::cuda {

// Reads a group's Report. One thread at a time.
class ReportReader {
 public:
  // Gives the group what kernels have written since the last time. Never waits for them.
  void collect(Report& report, Group& group);

  // What kernels have written last: in a group whose errors are fatal, the first.
  static Setback look(Report& report, const Group& group);

 private:
  std::uint64_t bad_ids_ = 0, dropped_rows_ = 0;  // of the totals, already given
};

}  // namespace xd::ep::cuda
