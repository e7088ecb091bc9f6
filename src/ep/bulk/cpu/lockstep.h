// A group's turns on the host (turn/host/turn.h), in group memory, and prepare's exchange of
// counts. Words of ranks on other machines come through RemoteSide (ep/bulk/cpu/remote/relay.h),
// which writes them into the memory of near ranks in those ranks' place.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/math.h"
#include "comm/near_memory.h"
#include "ep/bulk/group.h"
#include "ep/bulk/wire.h"
#include "turn/host/turn.h"
#include "turn/shared_memory.h"

namespace xd::ep::cpu {

class RemoteSide;

// The group memory of the near ranks.
class GroupMemory {
 public:
  // Collective: allocates this rank's and maps the peers'.
  explicit GroupMemory(const Group& group);

  // An array in a rank's group memory: `offset` comes from map_of(rank).
  const GroupMap& map_of(NearRank rank) const { return maps_[at(rank)]; }
  NearMemory area_of(NearRank rank, std::uint64_t offset) const {
    return shared_.area_of(rank, offset);
  }

 protected:
  const turn::SharedMemory& shared() const { return shared_; }

 private:
  std::vector<GroupMap> maps_;  // by rank
  const turn::SharedMemory shared_;
};

class Lockstep : private GroupMemory, public turn::HostTurn<Record> {
 public:
  // Collective.
  explicit Lockstep(const Group& group);
  ~Lockstep();

  using GroupMemory::area_of, GroupMemory::map_of;

  // Collective: from now on the group reaches ranks on other machines, if it has some.
  void reach_machines(const Group& group);
  // nullptr = all ranks are near.
  RemoteSide* remote() const { return remote_.get(); }

  // The words of a rank on another machine, which come here for all near ranks.
  void bring_entry(int source, std::uint64_t epoch, const Record& record) const;
  void bring_counts(int source, std::uint64_t epoch, std::span<const std::uint32_t> counts) const;

  // prepare sends this rank's row of the count table to every peer, and awaits the rows of all.
  void send_counts(std::span<const std::uint32_t> counts);
  void await_counts(std::span<std::uint32_t> table);

  // As turn::SharedMemory has it.
  NearMemory tensor_of(NearRank rank, turn::PeerAddress address, std::uint64_t bytes,
                       std::uint64_t alignment) const {
    return shared().tensor_of(comm_, rank, address, bytes, alignment);
  }

 private:
  void post_counts(NearRank owner, int source, std::uint64_t epoch,
                   std::span<const std::uint32_t> values) const;
  void await_counts_of(int source, const HostWait& site, std::span<std::uint32_t> table);
  std::atomic<std::uint64_t>* counts(NearRank owner, int source, std::uint64_t epoch) const;

  Comm& comm_;
  const CountLayout count_layout_;
  std::unique_ptr<RemoteSide> remote_;
};

}  // namespace xd::ep::cpu
