// Which experts of a group hold which logical expert, where a router's ids name logical ones. The
// group's experts are then slots. A rank's table is its own: only a token's source looks into it.
#pragma once

#include <crossdock/placement.h>

#include <cstdint>
#include <vector>

#include "ep/plan/config.h"

namespace xd::ep {

class SlotTable {
 public:
  static constexpr int kNoSlot = -1;

  // Groups without logical experts have an empty one.
  SlotTable() = default;
  // The table of a new group: logical expert e is in slot e.
  static SlotTable first(const CommonConfig& config, int rank);
  // Throws INVALID_ARGUMENT naming the entry that is bad. The config has logical experts.
  static SlotTable read(const xd_ep_placement* user, const CommonConfig& config, int rank);

  // The slot, by its physical number (ep/plan/expert_map.h), that this rank sends a token's choice
  // to; kNoSlot where the expert has none. `hint`: the token's number, or the caller's instead.
  int physical_slot_of(int logical_expert, std::uint64_t hint) const {
    const std::uint32_t* const first = &first_[static_cast<std::size_t>(logical_expert)];
    const std::uint32_t count = first[1] - first[0];
    if (count == 0) return kNoSlot;
    return static_cast<int>(slots_[first[0] + entry_of(hint, rank_, count)]);
  }
  // The entry of a list of so many slots that a token of the rank takes, on host and device.
  static constexpr std::uint64_t entry_of(std::uint64_t hint, std::uint64_t rank,
                                          std::uint32_t count) {
    return (hint + rank) % count;
  }
  // The lists of this rank's tokens, for an executor that looks into them itself: logical expert e
  // has slots()[firsts()[e]] up to, without, slots()[firsts()[e + 1]], by their physical numbers.
  const std::vector<std::uint32_t>& firsts() const { return first_; }
  const std::vector<std::uint32_t>& slots() const { return slots_; }
  // Logical experts by the physical numbers of their slots [E]; -1 = empty.
  const std::vector<std::int32_t>& experts() const { return experts_; }
  // Equal for equal tables.
  std::uint64_t hash() const { return hash_; }

 private:
  class Reader;

  std::uint64_t rank_ = 0;
  std::vector<std::uint32_t> first_;  // [N+1]
  std::vector<std::uint32_t> slots_;  // physical numbers, expert by expert
  std::vector<std::int32_t> experts_;
  std::uint64_t hash_ = 0;
};

// Reads the optional replica_hint of a batch of so many tokens. Throws INVALID_ARGUMENT.
Tensor read_replica_hint(const DLTensor* hint, std::int64_t tokens, const CommonConfig& config,
                         DLDevice device);

}  // namespace xd::ep
