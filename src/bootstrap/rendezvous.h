// Ranks meet over TCP, at a point that a unique id names or that the environment implies.
#pragma once

#include <memory>

#include "bootstrap/bootstrap.h"
#include "bootstrap/environment.h"
#include "bootstrap/unique_id.h"

namespace xd {

std::unique_ptr<Bootstrap> meet_at(const MeetingPoint& point, int rank, int num_ranks);

// Rank 0 serves on the first free port of the range; the others try them all, over and over.
std::unique_ptr<Bootstrap> meet_by_environment(RankEnvironment environment);

}  // namespace xd
