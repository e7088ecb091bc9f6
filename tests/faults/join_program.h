// The program of a rank process that does what the test tells it, line by line, with a low-latency
// group that masks: it is one of the first ranks, or takes the place of one that has ended. With
// RankProgram::resumes the first ranks also have a group that resumes, in which no place is taken
// anew.
#pragma once

#include <functional>
#include <string>

#include "faults/ll/program.h"
#include "faults/rank_program.h"

namespace xd::test {

// Lines, and what the rank says then:
//
//   steps <first> <count> <lost>   batches first .. first + count - 1, each element of which is
//                                  compared: "done"; lost: "-", or ranks as in 1,2
//   run <first>                    batches until one meets a loss: "progress" when some are done,
//                                  "result" with the loss
//   send <number>                  the send half of that batch's dispatch: "done"
//   agree <timeout>                one xd_comm_agree, then its view, masks and a reset:
//                                  "result" with its status, and number:members of the view
//   alone <count>                  batches as a guest, to whom all others are lost: "done"
//   invite                         "result" with the invitation in hexadecimal digits
//   lost                           "lost" with the ranks that are lost
//   refused                        "result" of a barrier, a growth and a group, which need all
//   resources                      "result" with descriptors, threads and bytes of shared memory
//   end                            leaves
//
// A wrong element, or a call that fails otherwise, is told by "after", and ends the process.
std::string run_joining(const RankProgram& program, const Rank& rank, const Talk& talk,
                        const std::function<std::string()>& read_line);

inline constexpr int kStepsBeforeKill = 10;

}  // namespace xd::test
