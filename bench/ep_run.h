// One rank's part of the measurement through the library's C API.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ranks.h"
#include "workload.h"

namespace bench {

// In the order of the table. The last two are candidates for the floor: every rank, all at once,
// copies as many rows as it sends in a dispatch into a neighbour's symmetric memory.
inline constexpr std::array kSteps{"prepare",     "dispatch",    "combine",       "dispatch_bwd",
                                   "combine_bwd", "copy cached", "copy streaming"};
inline constexpr std::size_t kOperations = 5;

struct EpResults {
  // [step][iteration]: seconds, the maximum over the ranks.
  std::vector<std::vector<double>> seconds;
  // Checksums of every rank's receive tensor and of its combined tokens.
  std::vector<std::uint64_t> recv_checksums, out_checksums;
};

// Collective. The results are complete on rank 0 and empty on the others.
EpResults run_ep(const Launch& launch, int rank, const Workload& workload, bool staged);

}  // namespace bench
