// The turn-taking of a group's operations: entry records, done flags, epochs (see ep/wire.h).
//
//   begin()  the next epoch
//   enter()  tells every peer what this rank is about to do; from here on they may touch its memory
//   await()  returns when every peer has entered: from here on this rank may touch theirs
//   leave()  tells every peer that this rank touches its memory no more, and returns when every
//            peer has said so: from here on this rank's memory is its own again
//
// Every operation goes through all four on every rank, also when it has failed or moves nothing, so
// the epochs of all ranks stay together. Nothing can wait in a circle: a rank announces before it
// waits, both times, and what it announces depends on nobody.
#pragma once

#include <memory>
#include <vector>

#include "comm/comm.h"
#include "ep/group.h"
#include "ep/wire.h"

namespace xd::ep::cpu {

class Lockstep {
 public:
  // Collective: allocates this rank's group memory and maps the peers'.
  explicit Lockstep(const Group& group);

  void begin(xd_ep_operation operation);
  void enter(const Record& record);
  void await();
  void leave();

  std::uint64_t epoch() const { return epoch_; }
  std::span<const Record> records() const { return records_; }
  const Record& record_of(int rank) const { return records_[static_cast<std::size_t>(rank)]; }

  // What a rank shares: `offset` comes from map_of(rank).
  const GroupMap& map_of(int rank) const { return maps_[static_cast<std::size_t>(rank)]; }
  std::byte* area_of(int rank, std::uint64_t offset) const {
    return segments_[static_cast<std::size_t>(rank)]->base() + offset;
  }

  // prepare: this rank's row of the count table, sent to every peer; and everybody's, awaited.
  void send_counts(std::span<const std::uint32_t> counts);
  void await_counts(std::span<std::uint32_t> table);

  // Address of `bytes` bytes of a peer's tensor; throws MISMATCH if its record names no memory of
  // its own, or a place that its elements cannot start at.
  std::byte* tensor_of(int rank, TensorPlace place, std::uint64_t bytes,
                       std::uint64_t alignment) const;

 private:
  EntryRecord& entry(int owner, int source, std::uint64_t epoch) const;
  DoneFlag& done(int owner, int source, std::uint64_t epoch) const;
  std::uint64_t last_entered(int peer) const;
  std::atomic<std::uint64_t>* counts(int owner, int source) const;
  WaitSite site(xd_phase phase) const;
  void ring_peers() const;
  template <class Body>
  void for_each_peer(Body&& body) const;

  Comm& comm_;
  const int group_;
  const int rank_;
  const int ranks_;
  const CountLayout count_layout_;
  std::vector<GroupMap> maps_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<Record> records_;  // of the current operation
  xd_ep_operation operation_ = XD_EP_PREPARE;
  std::uint64_t epoch_ = 0;
};

}  // namespace xd::ep::cpu
