// The question to the planner of placements, with the loads brought to one scale.
#pragma once

#include <crossdock/placement.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace xd::ep {

// The sum of all loads, up to rounding down. So scaled loads give bit for bit the same placement,
// and no sum of shares leaves 63 bits.
inline constexpr std::int64_t kAllLoad = std::int64_t{1} << 40;
inline constexpr std::int32_t kEmpty = -1;

struct Problem {
  int experts = 0, ranks = 0, slots = 0;
  std::vector<std::int64_t> loads;    // [experts]
  std::vector<int> room;              // [ranks] slots that may be used
  std::vector<int> hosts;             // [ranks]
  std::vector<std::int32_t> current;  // [ranks * slots]; empty = there is none
  std::int32_t max_moves = std::numeric_limits<std::int32_t>::max();
  int used_ranks = 0;     // ranks with room
  std::int64_t mean = 0;  // load of a rank with room
  // By how much a placement may be busier than the mean, or than a better one that moves more.
  std::int64_t slack = 0;
  std::vector<bool> held;  // [ranks, experts] of usable slots of `current`

  bool has_current() const { return !current.empty(); }
  bool several_hosts() const;
  bool held_before(int rank, int expert) const {
    return has_current() &&
           held[static_cast<std::size_t>(rank) * static_cast<std::size_t>(experts) +
                static_cast<std::size_t>(expert)];
  }
};

// Checks the arguments; throws INVALID_ARGUMENT naming the one that is wrong.
Problem read_problem(const xd_ep_planner_args* args);
void check_slots(std::int32_t num_ranks, std::int32_t slots_per_rank);

}  // namespace xd::ep
