// A group's turns on the host (turn/host_turn.h), in group memory: the areas of all ranks at this
// process' addresses, and prepare's exchange of counts.
#pragma once

#include <memory>
#include <vector>

#include "ep/group.h"
#include "ep/wire.h"
#include "turn/host_turn.h"

namespace xd::ep::cpu {

// The group memory of all ranks.
class GroupMemory {
 public:
  // Collective: allocates this rank's and maps the peers'.
  explicit GroupMemory(const Group& group);

  // An array in a rank's shared memory: `offset` comes from map_of(rank).
  const GroupMap& map_of(int rank) const { return maps_[static_cast<std::size_t>(rank)]; }
  std::byte* area_of(int rank, std::uint64_t offset) const {
    return segments_[static_cast<std::size_t>(rank)]->base() + offset;
  }
  std::uint64_t bytes_of(int rank) const {
    return segments_[static_cast<std::size_t>(rank)]->bytes();
  }

 private:
  std::vector<GroupMap> maps_;
  std::vector<std::shared_ptr<Segment>> segments_;
};

class Lockstep : private GroupMemory, public turn::HostTurn<Record> {
 public:
  // Collective.
  explicit Lockstep(const Group& group);

  using GroupMemory::area_of, GroupMemory::map_of;

  // prepare sends this rank's row of the count table to every peer, and awaits the rows of all.
  void send_counts(std::span<const std::uint32_t> counts);
  void await_counts(std::span<std::uint32_t> table);

  // The address of `bytes` bytes of a peer's tensor. Throws MISMATCH if its record names no memory
  // of its own, or a place at which its elements cannot start.
  std::byte* tensor_of(int rank, turn::RemoteAddress address, std::uint64_t bytes,
                       std::uint64_t alignment) const;

 private:
  static std::vector<Area> turn_areas(const GroupMemory& memory, int ranks);
  std::atomic<std::uint64_t>* counts(int owner, int source) const;

  Comm& comm_;
  const CountLayout count_layout_;
};

}  // namespace xd::ep::cpu
