// One rank's part of the measurement through the library's C API.
#pragma once

#include <cstdint>
#include <iterator>
#include <vector>

#include "ep_calls.h"
#include "workload.h"

namespace bench {

// The operations are followed by two candidates for the floor: every rank, all at once, copies as
// many rows as it sends in a dispatch into a neighbour's symmetric memory, with cached and with
// streaming stores.
inline constexpr std::size_t kOperations = std::size(kOperationNames);

struct EpResults {
  // [operation or copy][iteration]: seconds, the maximum over the ranks.
  std::vector<std::vector<double>> seconds;
  // Checksums of every rank's receive tensor and of its combined tokens, on every rank.
  std::vector<std::uint64_t> recv_checksums, out_checksums;
};

// Collective. The times are complete on rank 0 and empty on the others.
EpResults run_ep(const Launch& launch, int rank, const Workload& workload, bool staged);

}  // namespace bench
