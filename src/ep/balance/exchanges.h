// Exchanges of experts between the busiest rank and others.
#pragma once

#include <cstdint>

#include "ep/balance/assignment.h"

namespace xd::ep {

// Exchanges pairs of experts, or moves one into an empty slot, until the busiest rank has at most
// `enough`, or no exchange takes `least_gain` from it, or max_moves is reached. Replicas of an
// expert neither come to stand on one rank nor closer together on hosts.
void even_out(Assignment& assignment, std::int64_t enough, std::int64_t least_gain);

}  // namespace xd::ep
