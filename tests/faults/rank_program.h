// What a rank process of a fault test does. The test program starts itself again with these
// settings, tells the rank when to go on through its standard input, and reads what it reports:
//
//   <rank> ready                                     has set up, waits for a line
//   <rank> result <status> <peer> <phase> <text>     of the call that the test is about
//   <rank> after <text>                              "clean", or what failed after the fatal error
#pragma once

#include <crossdock/ep.h>

#include <string>
#include <vector>

namespace xd::test {

enum class Program {
  create,        // xd_comm_create
  create_group,  // xd_ep_group_create
  grow,          // xd_mem_grow
  operation,     // one EP operation
  steps,         // whole training steps, until one fails
};

struct RankProgram {
  Program program = Program::operation;
  xd_ep_operation operation = XD_EP_PREPARE;
  int num_ranks = 1;
  std::vector<int> ranks;  // that live in this process
  int tokens = 12;
  int timeout_ms = 20000;
  xd_unique_id id{};
};

std::vector<std::string> to_arguments(const RankProgram& program);

// True, and runs to the end, if `arguments` are to_arguments of some program.
bool run_if_rank_program(const std::vector<std::string>& arguments);

}  // namespace xd::test
