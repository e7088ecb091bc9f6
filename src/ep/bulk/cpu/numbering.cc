#include "ep/bulk/cpu/numbering.h"

#include <algorithm>

#include "base/math.h"

namespace xd::ep::cpu {

Numbering::Numbering(const Rules& rules, const Placement& placement, NumberingMemory& memory)
    : rules_(rules), memory_(memory) {
  std::ranges::copy(placement.first_row, memory.next_row.begin());
  std::ranges::fill(memory.lists, nullptr);
  std::ranges::fill(memory.kept, 0);
}

void Numbering::open_list(int rank, std::uint32_t* list) {
  memory_.lists[at(rank)] = list;
  *list = 0;
}

void Numbering::number(const Choices& choices, std::uint32_t* codes) {
  const std::size_t topk = at(choices.topk);
  for (std::size_t token = 0; token < choices.experts.size(); token += topk) {
    std::ranges::fill(memory_.row_of, std::int64_t{-1});
    for (std::size_t i = token; i < token + topk; ++i) codes[i] = code_of(choices.experts[i]);
  }
}

std::uint32_t Numbering::code_of(std::uint32_t physical_expert) {
  if (physical_expert == Choices::kNone) return RowCodec::kNone;
  const RowRef ref = next_row(static_cast<int>(physical_expert));
  if (ref.row >= capacity_of(ref.rank)) return RowCodec::kNone;
  ++memory_.kept[at(physical_expert)];
  return rules_.codec.encode(ref);
}

// The rows that a rank can receive under this plan.
std::int64_t Numbering::capacity_of(int rank) const {
  return whole_rows(rules_.capacities[at(rank)], rules_.alignment);
}

// Where the current token's row for the expert at `physical_expert` goes; it may lie beyond the
// capacity.
RowRef Numbering::next_row(int physical_expert) {
  const Config& config = rules_.config;
  const int rank = config.map().rank_at(physical_expert);
  if (config.layout.row_per_expert) return next_of_zone(physical_expert, rank);
  std::int64_t& row = memory_.row_of[at(rank)];  // one for all of the token's choices there
  if (row < 0) row = memory_.next_row[at(rank)]++;
  return {.rank = rank, .row = row, .expert = physical_expert - config.map().first(rank)};
}

// EXPERT_MAJOR: the next row of the expert's zone.
RowRef Numbering::next_of_zone(int physical_expert, int rank) {
  const std::int64_t row = memory_.next_row[at(physical_expert)]++;
  std::uint32_t* const list = memory_.lists[at(rank)];
  if (list != nullptr && row < capacity_of(rank)) {
    std::int64_t& first = memory_.row_of[at(rank)];
    const auto entry = static_cast<std::uint32_t>(row);
    list[++*list] = first < 0 ? entry | PlanHeader::kFirstOfToken : entry;
    first = row;
  }
  return {.rank = rank, .row = row, .expert = 0};
}

}  // namespace xd::ep::cpu
