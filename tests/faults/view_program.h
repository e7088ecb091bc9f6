// The program of a rank process that agrees with the others on views, again and again.
#pragma once

#include <string>

#include "faults/ll/program.h"
#include "faults/rank_program.h"

namespace xd::test {

// Agrees until Program::losses ranks are members no more and some views more have come; "progress"
// tells when kViewsBeforeLoss have. A rank that has been left out reports that as its result, waits
// for a line, and lets itself be taken in again. With Program::calls = 2 the others then wait for a
// line, and agree until all ranks are members. Returns the members that have been, by the views in
// which they changed, as in "0:0,1,2 57:0,2", or what was wrong.
std::string run_agreeing(const RankProgram& program, const Rank& rank, const Talk& talk);

inline constexpr int kViewsBeforeLoss = 10;

}  // namespace xd::test
