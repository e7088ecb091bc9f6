// Where experts and their replicas go, and what has to be copied for it.
#pragma once

#include <cstdint>
#include <vector>

#include "ep/balance/problem.h"

namespace xd::ep {

struct PlannedPlacement {
  std::vector<std::int32_t> expert_of_slot;
  xd_ep_placement_info info;
};

PlannedPlacement plan_placement(const Problem& problem);

std::vector<xd_ep_move> placement_moves(int ranks, int slots, const std::int32_t* from,
                                        const std::int32_t* to);

}  // namespace xd::ep
