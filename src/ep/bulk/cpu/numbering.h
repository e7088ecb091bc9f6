// The third step of prepare: numbers the rows of this rank's choices in (token, k) order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ep/plan/cpu/choices.h"
#include "ep/plan/placement.h"
#include "ep/plan/plan.h"

namespace xd::ep::cpu {

// Working memory, allocated with the group.
struct NumberingMemory {
  std::vector<std::int64_t> next_row;  // by physical number [E] or by destination [W]
  std::vector<std::int64_t> row_of;    // [W] the current token's first row; -1 = none
  std::vector<std::uint32_t*> lists;   // [W] this rank's list there; null = that rank keeps none
  std::vector<std::uint32_t> kept;     // [E] by physical number

  template <class Visit>
  void for_each_vector(const Config& config, Visit&& visit) {
    const auto ranks = static_cast<std::size_t>(config.ranks);
    const auto experts = static_cast<std::size_t>(config.experts);
    visit(next_row, config.layout.row_per_expert ? experts : ranks);
    visit(row_of, ranks);
    visit(lists, ranks);
    visit(kept, experts);
  }
};

class Numbering {
 public:
  // The values that rows follow from.
  struct Rules {
    const Config& config;
    const RowCodec& codec;
    std::span<const std::int64_t> capacities;  // all ranks', as configured
    std::int64_t alignment;                    // the plan's
  };

  // Begins at the placement's first rows.
  Numbering(const Rules& rules, const Placement& placement, NumberingMemory& memory);

  // From now on the rows that go to `rank` are also written into a list in its memory: their
  // number, then the rows (see ep/plan/plan.h). The operation's done flag says that the list is
  // complete.
  void open_list(int rank, std::uint32_t* list);

  // Numbers all choices: one code for each.
  void number(const Choices& choices, std::uint32_t* codes);

  // The choices of each expert, by physical number [E], that have got a row within the capacity of
  // its rank.
  std::span<const std::uint32_t> kept() const { return memory_.kept; }

 private:
  std::int64_t capacity_of(int rank) const;
  std::uint32_t code_of(std::uint32_t physical_expert);
  RowRef next_row(int physical_expert);
  RowRef next_of_zone(int physical_expert, int rank);

  Rules rules_;
  NumberingMemory& memory_;
};

}  // namespace xd::ep::cpu
