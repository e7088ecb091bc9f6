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
#include "comm/near_memory.h"
#include "turn/entry.h"

namespace xd::turn {

template <class Record>
class HostTurn {
 public:
  // `number`: the sequence's number, for error texts. `areas`: the memory that each near rank
  // shares for the sequence. `map` says where in it the words of the turns lie.
  HostTurn(Comm& comm, int number, const TurnMap& map, NearTable areas)
      : comm_(comm),
        number_(number),
        rank_(comm.hosts().self()),
        ranks_(comm.num_ranks()),
        peers_(comm.hosts().peers()),
        map_(map),
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
  const NearRanks& peers() const { return peers_; }
  HostWait site(xd_phase phase) const {
    return {.phase = phase,
            .group = number_,
            .operation = operation_,
            .epoch = epoch_,
            .deadline = comm_.deadline()};
  }
  void ring_peers() const {
    for (const NearRank peer : peers()) comm_.ring(peer);
  }
  // The last operation that a peer has entered, for error texts, out of those that the slots can
  // hold.
  std::uint64_t last_entered(int peer) const {
    const auto at_slot = [&](std::uint64_t epoch) {
      return entry(rank_, peer, epoch).from(kEntryEpoch).seen();
    };
    return std::max(at_slot(epoch_), at_slot(epoch_ - 1));
  }

 private:
  static constexpr std::uint64_t kEntryEpoch = offsetof(Entry<Record>, epoch);

  // The entry, or done flag, that `source` writes into the owner's memory: cells of [slot][source].
  NearMemory entry(NearRank owner, int source, std::uint64_t epoch) const {
    return areas_.of(owner).from(map_.entry + cell(source, epoch) * sizeof(Entry<Record>));
  }
  NearMemory done(NearRank owner, int source, std::uint64_t epoch) const {
    return areas_.of(owner).from(map_.done + cell(source, epoch) * sizeof(DoneFlag));
  }
  std::uint64_t cell(int source, std::uint64_t epoch) const {
    return cell_of(epoch, source, ranks_);
  }

  Comm& comm_;
  const int number_;
  const NearRank rank_;
  const int ranks_;
  const NearRanks peers_;
  const TurnMap map_;
  const NearTable areas_;
  std::vector<Record> records_;  // records of the current operation
  std::int32_t operation_ = 0;
  std::uint64_t epoch_ = 0;
};

template <class Record>
void HostTurn<Record>::enter(const Record& record) {
  records_[at(rank_)] = record;
  for (const NearRank peer : peers()) {
    const NearMemory theirs = entry(peer, rank_, epoch_);
    *theirs.array<Record>() = record;
    // A rank that sees this epoch also sees the record, and staged input.
    theirs.from(kEntryEpoch).signal(epoch_);
  }
  ring_peers();
}

template <class Record>
void HostTurn<Record>::await() {
  const HostWait site = this->site(XD_PHASE_ENTRY);
  for (const NearRank peer : peers()) {
    const NearMemory mine = entry(rank_, peer, epoch_);
    const auto here = [&] { return mine.from(kEntryEpoch).seen() == epoch_; };
    comm_.wait_for(peer, site, here, [&] { return last_entered(peer); });
    records_[at(peer)] = *mine.array<Record>();
  }
}

template <class Record>
void HostTurn<Record>::leave() {
  for (const NearRank peer : peers()) {
    // A rank that sees this epoch also sees all that was written there, and nothing is read there
    // any more.
    done(peer, rank_, epoch_).signal(epoch_);
  }
  ring_peers();
}

template <class Record>
void HostTurn<Record>::end() {
  const HostWait site = this->site(XD_PHASE_DONE);
  for (const NearRank peer : peers()) {
    const auto left_at = [&](std::uint64_t epoch) { return done(rank_, peer, epoch).seen(); };
    comm_.wait_for(
        peer, site, [&] { return left_at(epoch_) == epoch_; },
        [&] { return std::max(left_at(epoch_), left_at(epoch_ - 1)); });
  }
}

}  // namespace xd::turn
