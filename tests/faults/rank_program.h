// The program of a rank process in a fault test. The test program starts itself again with these
// settings, tells the rank when to go on through its standard input, and reads what it reports:
//
//   <rank> ready                          has set up, waits for a line
//   <rank> lost <status> <ranks>          of the communicator, and the ranks that are lost, 1,2
//   <rank> result <status> <peer> <phase> <written> <text>
//                                         of a call that the test is about; <written> is 1 if it
//                                         is one of Program::operation and wrote an output
//   <rank> progress                       Program::ll_masked: some steps are done
//   <rank> after <text>                   "clean", or what failed after the fatal error
#pragma once

#include <crossdock/ep.h>
#include <crossdock/gemm.h>

#include <string>
#include <vector>

#include "conformance/case.h"

namespace xd::test {

enum class Program {
  create,          // xd_comm_create
  create_group,    // xd_ep_group_create
  grow,            // xd_mem_grow
  operation,       // EP operations of one kind
  steps,           // whole training steps, until one fails
  replays,         // whole training steps, captured in a CUDA graph
  layers,          // passes of a layer by its parts, forward and backward, until one fails
  outlive,         // notices that peers are lost; then calls that need them, and others
  ll_operation,    // one low-latency operation, after a good step
  ll_steps,        // low-latency steps, whole and in halves, until one fails
  create_context,  // xd_gemm_context_create
  gemm_operation,  // one operation of products, after a good one
  gemm_steps,      // operations of products, until one fails
  ll_masked,       // low-latency steps of a group that goes on without lost ranks: see ll_program.h
  agree,           // agrees on views: see view_program.h
  join,            // does as it is told: see join_program.h
  resume,          // batches through groups that outlive losses: see resume_program.h
};

// The part of an argument that is fatal to touch.
enum class Part {
  all,
  end,   // the last few bytes, and so the last row
  body,  // of a plan, all behind its header: prepare clears the header, waits for its peers to
         // enter, and touches the rest when they have
};

// A rank dies in the operation, by touching an argument.
struct RankDeath {
  int victim = -1;            // -1 = none
  Part part = Part::all;      // of RankProgram::fatal_argument
  xd_unique_id id_of_rest{};  // meeting point of the other ranks afterwards
};

// The value of --executor, "cpu" by default. The tests pass it on to the ranks that they start.
const std::string& executor();
void set_executor(const std::string& name);

// Settings that pass from the test to a rank's process as bytes.
struct RankSettings {
  Program program = Program::operation;
  std::int32_t operation = XD_EP_PREPARE;  // an xd_ep_operation or xd_ll_operation
  xd_ep_operation bulk_operation() const { return static_cast<xd_ep_operation>(operation); }
  xd_gemm_operation product = XD_GEMM_ALL_GATHER;
  int num_ranks = 1;
  int calls = 1;  // calls of the operation, while they succeed
  int parts = 1;  // of plans
  int part = 0;   // of the operation, whose earlier parts are done by then; 0 = the whole
  int tokens = 12;
  int timeout_ms = 20000;       // of the communicator
  int wait_timeout_ms = 0;      // of a low-latency group
  int silence_ms = 0;           // of the communicator; 0 = its default
  int views = 20;               // Program::agree: decided after the loss
  std::size_t bytes = 1 << 20;  // size of the heap that is created, or of its growth
  xd_comm_peer_loss on_peer_loss = XD_COMM_PEER_LOSS_FATAL;
  int losses = 0;           // Program::outlive, resume: ranks that will be lost
  bool resumes = false;     // the group outlives losses
  bool apart = false;       // each rank is on a machine of its own, as far as the library knows
  bool joins = false;       // takes a place by `id`, an invitation
  int wanted = -1;          // the place that it asks for
  bool registered = false;  // tensors lie in virtual memory that the rank has registered
  xd_unique_id id{};
  RankDeath death;
};

struct RankProgram : RankSettings {
  std::string fatal_argument = "none";
  std::vector<int> ranks;  // ranks that live in this process
};

// The case that the groups of a program are made for.
Case case_of(const RankProgram& program);

std::vector<std::string> to_arguments(const RankProgram& program);

// Runs a rank's program to its end and returns true, if `arguments` are to_arguments of some
// program.
bool run_if_rank_program(const std::vector<std::string>& arguments);

}  // namespace xd::test
