// Puts the reports of kernels to their host into words.
#pragma once

#include <cstdint>

#include "ep/cuda/params.h"
#include "ep/group.h"

namespace xd::ep::cuda {

// Reads a group's Report. One thread at a time.
class ReportReader {
 public:
  // Gives the group the errors that kernels have reported since the last time. Never waits for
  // kernels.
  void collect(Report& report, Group& group);

  // The setback that kernels have reported last; in a group whose errors are fatal, the first.
  static Setback look(Report& report, const Group& group);

 private:
  std::uint64_t bad_ids_ = 0,
                dropped_rows_ = 0;  // the parts of the totals that the group already has
};

}  // namespace xd::ep::cuda
