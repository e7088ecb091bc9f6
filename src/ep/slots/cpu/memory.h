// The memory that a group of low latency shares, as ep/slots/map.h lays it out, at this process'
// addresses; and what this rank keeps beside it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/math.h"
#include "base/rank_bits.h"
#include "comm/near_memory.h"
#include "ep/plan/cpu/choices.h"
#include "ep/slots/group.h"
#include "ep/slots/map.h"
#include "ep/slots/plan.h"
#include "turn/shared_memory.h"

namespace xd::ep::cpu {

class LlMemory {
 public:
  // Collective: allocates this rank's and maps the peers'.
  explicit LlMemory(const LlGroup& group)
      : config_(group.config()), map_(LlMap::make(config_)), shared_(share(group)) {}

  const LlMap& map() const { return map_; }
  const NearTable& areas() const { return shared_.areas(); }
  const Segments& segments() const { return shared_.segments(); }

  // The bytes that `source` writes into the owner's memory in the operation `epoch`.
  struct Cell {
    NearRank owner;
    int source;
    std::uint64_t epoch;
  };
  std::uint64_t& listed(const Cell& cell) const {
    return array<std::uint64_t>(cell.owner, map_.listed)[index(cell)];
  }
  LlItem& item(const Cell& cell, std::uint64_t number, int topk) const {
    const std::uint64_t room = tokens() * ll_item_bytes(config_.max_topk);
    return *array<LlItem>(cell.owner,
                          map_.items + index(cell) * room + number * ll_item_bytes(topk));
  }
  // The row of the owner's token.
  std::byte* row(NearRank owner, std::uint64_t epoch, std::int64_t token) const {
    const std::uint64_t number = stage(epoch) * tokens() + at(token);
    return array<std::byte>(owner, map_.rows + number * config_.max_row_bytes);
  }
  float* weights(const Cell& cell, std::int64_t token, int topk) const {
    const std::uint64_t room = tokens() * at(config_.max_topk);
    return array<float>(cell.owner, map_.weights) + index(cell) * room + at(token) * at(topk);
  }
  NearMemory landed(const Cell& cell) const {
    return shared_.area_of(cell.owner, map_.landed + index(cell) * sizeof(turn::DoneFlag));
  }
  // A partial sum of the owner's token; place < partial_places().
  std::byte* partial(NearRank owner, std::uint64_t epoch, std::int64_t token, int place) const {
    const int places = partial_places(config_);
    const std::uint64_t number =
        stage(epoch) * tokens() * at(places) + at(partial_of(token, place, places));
    return array<std::byte>(owner, map_.partials + number * config_.max_wire_bytes());
  }

 private:
  std::uint64_t tokens() const { return at(config_.max_tokens); }
  std::uint64_t stage(std::uint64_t epoch) const {
    return turn::stage_of(epoch, at(config_.in_flight));
  }
  std::uint64_t index(const Cell& cell) const {
    return turn::cell_of(cell.epoch, cell.source, config_.ranks, at(config_.in_flight));
  }
  template <class T>
  T* array(NearRank owner, std::uint64_t offset) const {
    return shared_.area_of(owner, offset).array<T>();
  }

  Segments share(const LlGroup& group) const {
    Segments segments = group.comm().share(LlFamily::kCreate, map_.end);
    for (const NearRank r : group.near()) require_size(segments[at(r)], map_.end, r);
    return segments;
  }

  const LlConfig& config_;
  const LlMap map_;
  const turn::SharedMemory shared_;
};

// Working memory of a group; all of it is allocated when the group is made.
struct LlScratch {
  ChoicesMemory choices;
  std::vector<RankBits> home;         // [in_flight][T] of each own token between the halves
  std::vector<std::uint64_t> listed;  // [W] items that this rank has sent to, or read of, each rank
  std::vector<std::byte*> bodies;     // [W] of the message to each remote rank
  std::vector<std::int64_t> counts;   // [L] rows
  std::vector<std::int64_t> next;     // [L] the next free slot, or row
  std::vector<std::int64_t> first;    // [L] the first slot of the current source
  std::vector<std::byte> row;         // a row and its scales

  // Calls visit(vector, size) for every vector, including those of the members.
  template <class Visit>
  void for_each_vector(const LlConfig& config, Visit&& visit) {
    choices.for_each_vector(config, visit);
    visit(home, at(config.in_flight) * at(config.max_tokens));
    visit(listed, at(config.ranks));
    visit(bodies, at(config.ranks));
    visit(counts, at(config.local_experts));
    visit(next, at(config.local_experts));
    visit(first, at(config.local_experts));
    visit(row, config.max_row_bytes);
  }
  void reserve(const LlConfig& config) {
    for_each_vector(config, [](auto& vector, std::size_t size) { vector.resize(size); });
  }
  static std::size_t bytes(const LlConfig& config) {
    std::size_t bytes = 0;
    LlScratch{}.for_each_vector(
        config, [&](auto& vector, std::size_t size) { bytes += size * sizeof(vector[0]); });
    return bytes;
  }
  RankBits* home_of(std::uint64_t epoch, const LlConfig& config) {
    return home.data() + turn::stage_of(epoch, at(config.in_flight)) * at(config.max_tokens);
  }
};

}  // namespace xd::ep::cpu
