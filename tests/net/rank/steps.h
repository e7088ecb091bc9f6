// Steps of expert parallelism that a rank process makes when it is told to.
#pragma once

#include <crossdock/ep.h>

#include <string>

namespace xd::test {

// Makes a group and goes through all five operations `count` times, with other tokens in each step.
// Returns "fine", the error of the first call that failed with its text, or the step that was
// wrong.
std::string make_steps(xd_comm* comm, int rank, int num_ranks, int count);

// The same in slots: dispatch in halves, then combine.
std::string make_slot_steps(xd_comm* comm, int rank, int num_ranks, int count);

}  // namespace xd::test
