// The program of a rank process whose groups outlive the loss of others.
#pragma once

#include <crossdock/ep.h>

#include <string>
#include <vector>

#include "conformance/case.h"
#include "faults/ll/program.h"
#include "faults/rank_program.h"
#include "support/handles.h"

namespace xd::test {

// A group, and the case whose batches go through it.
struct Resumed {
  Case c;
  Group group;
};

// Agrees on views, and enters them with all groups, until one is entered by all. `step`: of this
// rank, which has to be that of all members. Afterwards the cases are without the ranks that are
// gone; their number is returned. Wrong elements are exceptions from then on.
int resume(const Rank& rank, std::vector<Resumed>& groups, int step);
// Batches through all groups, every element of which is compared.
void run_batches(const Rank& rank, const std::vector<Resumed>& groups, int first, int count);

// Batches through two groups until Program::losses ranks have been lost, and some more; "progress"
// tells when kBatchesBeforeLoss are done. Returns the batches, groups and operations in which
// losses were met, as in "17:0:dispatch", or what is left behind at the end.
std::string run_resuming(const RankProgram& program, Rank& rank, const Talk& talk);

inline constexpr int kBatchesBeforeLoss = 3;

}  // namespace xd::test
