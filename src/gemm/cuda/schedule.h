// The order in which an all_gather's rows travel, and in which products take them. Pure.
#pragma once

#include <array>

#include "comm/device/comm.h"
#include "gemm/cost_model.h"

namespace xd::gemm::cuda {

// Ranks [first, first + count), whose rows follow one another.
struct Sources {
  int first;
  int count;
};

struct GatherSchedule {
  // In which order this rank sends its rows: each peer once.
  std::array<int, kMaxDeviceRanks> to{};
  // The sources that each product takes, in order, after this rank's own rows; together all peers.
  std::array<Sources, kMaxDeviceRanks> step{};
  int sends = 0, steps = 0;
};

// The order is such that the rows of step i are the i-th to arrive, where all ranks send alike:
// SPLIT: to the next rank first, so from the one before first; each peer is a step. Where it
// doubles: ranks 2^i apart exchange blocks of 2^i ranks, where the number of ranks is a power of
// two; else along the ring, in products of one peer, two peers, four ..
// SEQUENTIAL: sends along the ring; all peers are one step, or two around this rank, which its
// caller may take in one product.
GatherSchedule gather_schedule(const Option& option, int rank, int ranks);

}  // namespace xd::gemm::cuda
