// First placements, which exchanges then even out.
#pragma once

#include "ep/balance/assignment.h"

namespace xd::ep {

// The current placement, and the experts that it lacks.
Assignment start_from_current(const Problem& problem);
// Gives experts the replicas that the loads want, as far as these matter: where a share is above a
// quarter of a rank's mean, and the busiest rank is busier than is good enough.
void exchange_replicas(Assignment& assignment);
// Largest first onto the lightest rank, never two replicas of an expert on one rank.
Assignment start_from_scratch(const Problem& problem);
// The greedy method of EPLB, without groups, which may put replicas of an expert on one rank.
Assignment start_as_published(const Problem& problem);

}  // namespace xd::ep
