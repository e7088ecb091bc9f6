// Where rows lie in low latency, as arithmetic that both executors share. This is about groups with
// slots; where rows lie without gaps, row r of [N,H] is slot r of one expert (slot_tensor.h).
//
// A token has a row in a slot of every expert that it has chosen. The slots of an expert are
// numbered from 0 by source rank, then token; row e * S + s is slot s of local expert e. Rows of a
// token that go to one rank cross as one row, and come back as one partial sum.
#pragma once

#include <cstdint>

#include "base/rank_bits.h"
#include "ep/slots/config.h"

namespace xd::ep {

// S, the slots of each expert: one for every token that all ranks may have.
inline std::int64_t slots_per_expert(const LlConfig& config) {
  return std::int64_t{config.ranks} * config.max_tokens;
}

// The rank of the expert with a physical number (ep/plan/expert_map.h), and its number among that
// rank's.
struct ExpertPlace {
  int rank, local;
};
constexpr ExpertPlace place_of(int physical_expert, const ExpertMap& map) {
  const int rank = map.rank_at(physical_expert);
  return {rank, physical_expert - map.first(rank)};
}

// The number of a slot's row, as plans hold it.
constexpr std::int32_t row_of_slot(int local_expert, std::int64_t slot, std::int64_t slots) {
  return static_cast<std::int32_t>(local_expert * slots + slot);
}

// A token's partial sums lie side by side at its source, each in a place of its own. Where lost
// ranks are masked every rank has a place, so that a masked rank that wakes up writes into no other
// one's; else the ranks that hold rows of the token have places by ascending rank.
inline int partial_places(const LlConfig& config) {
  return config.masks_lost_peers ? config.ranks : config.most_cells_per_token();
}
// The place of a rank's partial sum of a token whose rows lie on the ranks `home`.
inline int partial_place(int rank, const RankBits& home, const LlConfig& config) {
  return config.masks_lost_peers ? rank : home.count_below(rank);
}
constexpr std::int64_t partial_of(std::int64_t token, int place, int places) {
  return token * places + place;
}

// An element of source_ranges.
constexpr std::int64_t source_range(std::int64_t first_slot, std::int64_t rows) {
  return first_slot << 32 | rows;
}

}  // namespace xd::ep
