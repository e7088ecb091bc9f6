// Turns on the host: the five verbs of turn/entry.h, for operations that run on the caller's
// thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/math.h"
#include "comm/comm.h"
#include "comm/rank_set.h"
#include "turn/entry.h"

namespace xd::turn {

template <class Record>
class HostTurn {
 public:
  // The turn's part of a rank's shared memory, as addresses in this process.
  struct Area {
    Entry<Record>* entries;  // [kSlots][ranks]
    DoneFlag* done;          // [kSlots][ranks]
  };

  // `number` is the sequence's, for error texts. `areas` has an entry per rank.
  HostTurn(Comm& comm, int number, std::vector<Area> areas)
      : comm_(comm),
        number_(number),
        rank_(comm.rank()),
        ranks_(comm.num_ranks()),
        peers_(RankSet::peers_of(rank_, ranks_)),
        areas_(std::move(areas)),
        records_(at(ranks_)) {}

  void begin(std::int32_t operation) {
    operation_ = operation;
    ++epoch_;
  }
  void enter(const Record& record);
  void await();
  void leave();
  void end();

  std::uint64_t epoch() const { return epoch_; }
  // The records of all ranks, after await(); this rank's own, after enter().
  std::span<const Record> records() const { return records_; }
  const Record& record_of(int rank) const { return records_[at(rank)]; }

  // ---- For what a family makes its ranks wait for inside an operation ----

  // The peers that this rank takes turns with.
  const RankSet& peers() const { return peers_; }
  WaitSite site(xd_phase phase) const {
    return {.phase = phase,
            .group = number_,
            .operation = operation_,
            .epoch = epoch_,
            .deadline = comm_.deadline()};
  }
  void ring_peers() const {
    for (const int peer : peers()) comm_.ring(peer);
  }
  // The last operation that a peer has entered, for error texts, out of those that the slots can
  // hold.
  std::uint64_t last_entered(int peer) const {
    const auto at_slot = [&](std::uint64_t epoch) {
      return entry(rank_, peer, epoch).epoch.load(std::memory_order_acquire);
    };
    return std::max(at_slot(epoch_), at_slot(epoch_ - 1));
  }

 private:
  Entry<Record>& entry(int owner, int source, std::uint64_t epoch) const {
    return areas_[at(owner)].entries[cell_of(epoch, source, ranks_)];
  }
  DoneFlag& done(int owner, int source, std::uint64_t epoch) const {
    return areas_[at(owner)].done[cell_of(epoch, source, ranks_)];
  }

  Comm& comm_;
  const int number_;
  const int rank_;
  const int ranks_;
  const RankSet peers_;
  const std::vector<Area> areas_;
  std::vector<Record> records_;  // records of the current operation
  std::int32_t operation_ = 0;
  std::uint64_t epoch_ = 0;
};

template <class Record>
void HostTurn<Record>::enter(const Record& record) {
  records_[at(rank_)] = record;
  for (const int peer : peers()) {
    Entry<Record>& theirs = entry(peer, rank_, epoch_);
    theirs.record = record;
    // Release: a rank that sees this epoch also sees the record, and staged input.
    theirs.epoch.store(epoch_, std::memory_order_release);
  }
  ring_peers();
}

template <class Record>
void HostTurn<Record>::await() {
  const WaitSite site = this->site(XD_PHASE_ENTRY);
  for (const int peer : peers()) {
    const Entry<Record>& mine = entry(rank_, peer, epoch_);
    const auto here = [&] { return mine.epoch.load(std::memory_order_acquire) == epoch_; };
    comm_.wait_for(peer, site, here, [&] { return last_entered(peer); });
    records_[at(peer)] = mine.record;
  }
}

template <class Record>
void HostTurn<Record>::leave() {
  for (const int peer : peers()) {
    // Release: a rank that sees this epoch also sees all that was written there, and nothing is
    // read there any more.
    done(peer, rank_, epoch_).epoch.store(epoch_, std::memory_order_release);
  }
  ring_peers();
}

template <class Record>
void HostTurn<Record>::end() {
  const WaitSite site = this->site(XD_PHASE_DONE);
  for (const int peer : peers()) {
    const auto left_at = [&](std::uint64_t epoch) {
      return done(rank_, peer, epoch).epoch.load(std::memory_order_acquire);
    };
    comm_.wait_for(
        peer, site, [&] { return left_at(epoch_) == epoch_; },
        [&] { return std::max(left_at(epoch_), left_at(epoch_ - 1)); });
  }
}

}  // namespace xd::turn
