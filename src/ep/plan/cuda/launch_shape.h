// The number of thread blocks that an operation gets, their warps, and the work that each begins
// with: a pure function of the problem and the device, tested without a device.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "ep/plan/config.h"
#include "ep/plan/cuda/row_pieces.h"

namespace xd::ep::cuda {

// Warps of a block: the exact number, or the most where shared memory decides.
inline constexpr int kMostPrepareWarps = 16, kMostMoverWarps = 16, kCombineWarps = 20;

// More than any kernel's static shared memory.
inline constexpr std::size_t kStaticSharedBytes = 20480;

// Counters of a block of prepare: a column for each expert, then for each rank the tokens that go
// there, then for each rank the choices.
constexpr std::size_t counter_columns(int experts, int ranks) {
  return static_cast<std::size_t>(experts) + 2 * static_cast<std::size_t>(ranks);
}

struct LaunchLimits {
  int sms = 0;
  std::size_t shared_bytes = 0;  // shared memory that a block may have
  int ranks_on_device = 1;       // ranks of the communicator on this device
};

// Multiprocessors left to others: a caller's small kernels start while ours wait for peers.
inline constexpr int kReservedSms = 4;

// The longest row that combine can cut into strips (bulk/cuda/walk.cuh). It cuts the rows of few
// tokens in two until each warp of the device has two strips, and finds their columns, in vectors
// of 16 bytes, by 32-bit products with the number of strips.
constexpr std::uint64_t longest_row_in_strips(int sms) {
  const auto wanted = static_cast<std::uint32_t>(2 * sms * kCombineWarps);
  return std::uint64_t{std::numeric_limits<std::uint32_t>::max() / std::bit_ceil(wanted)} * 16;
}

struct LaunchShape {
  int blocks = 1;        // one per multiprocessor
  int first_blocks = 0;  // how many of these begin with sending (dispatch) or with partial sums
  int threads = 256;
  std::size_t shared_bytes = 0;
};

// The facts that decide about a launch.
struct Traffic {
  int ranks = 1;
  int tokens = 0;  // tokens of this rank
  int topk = 1;    // the largest that the group allows
  std::uint64_t row_bytes = 0;
  bool row_per_expert = false;  // Layout
  bool receives = false;  // dispatch: copies at the owner follow. combine: partial sums are pushed
  bool staged = false;    // dispatch: peers' rows arrive in the group's memory
  bool scaled = false;    // dispatch: rows are multiplied by their weights at the owner
  bool coded = false;     // combine: partial sums cross as codes
};

// Multiprocessors that operations of a group may use on this device: config.num_sms, or so few that
// any two operations of every rank of the device run at once beside the reserve. (Two groups on two
// streams, begun in different orders on different ranks, would wait for one another if one of them
// kept the other out.) Throws INVALID_ARGUMENT if num_sms leaves too few for the other ranks of the
// device.
int sm_budget(const CommonConfig& config, const LaunchLimits& device);

LaunchShape prepare_shape(int experts, int ranks, int tokens, int budget,
                          const LaunchLimits& device);
LaunchShape dispatch_shape(const Traffic& traffic, const RowPieces& send, const RowPieces& fan_out,
                           int num_sms, int budget, const LaunchLimits& device);
LaunchShape combine_shape(const Traffic& traffic, int num_sms, int budget,
                          const LaunchLimits& device);

// One line that says why there are so many blocks.
std::string explain(const char* operation, const LaunchShape& shape, const Traffic& traffic,
                    int num_sms, int budget);

}  // namespace xd::ep::cuda
