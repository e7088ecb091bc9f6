// What is wrong with an operation without being fatal, in words: the same on every executor.
#pragma once

#include <span>

#include "ep/group.h"
#include "ep/wire.h"

namespace xd::ep {

// What makes one operation's records unequal, as `rank` sees it; none if nothing does.
Setback disagreement(std::span<const Record> records, int rank);

struct Overflow {
  int rank;  // the lowest that overflows
  std::int64_t needed_rows, capacity_rows;
};
Setback overflow(const Overflow& overflow);

Setback bad_expert_ids(std::int64_t bad_ids, int lowest_rank, int experts);

}  // namespace xd::ep
