// The words of turn/entry.h in the memory of near ranks, as the host reads and writes them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "comm/comm.h"
#include "comm/near_memory.h"
#include "turn/entry.h"

namespace xd::turn {

template <class Record>
class HostCells {
 public:
  // `number`: the sequence's number, for error texts. `areas`: the memory that each near rank
  // shares for the sequence. `map` says where in it the words of the turns lie.
  HostCells(Comm& comm, int number, const TurnMap& map, NearTable areas, std::uint64_t stages)
      : comm_(comm),
        number_(number),
        rank_(comm.hosts().self()),
        peers_(comm.hosts().peers()),
        stages_(stages),
        map_(map),
        areas_(std::move(areas)) {}

  // All near ranks that take part, but this one.
  const NearRanks& peers() const { return peers_; }
  void ring_peers() const {
    for (const NearRank peer : peers()) comm_.ring(peer);
  }

 protected:
  // From now on these are all that take part beside this rank.
  void keep_peers(NearRanks&& peers) { peers_ = std::move(peers); }
  // Tells a peer that this rank has entered an operation. A rank that sees the epoch also sees the
  // record, and all that was stored before.
  void post_entry(NearRank peer, std::uint64_t epoch, const Record& record) const {
    post_entry_of(rank_, peer, epoch, record);
  }
  // The same for another rank, which cannot reach the peer's memory. `peer` may be this rank.
  void post_entry_of(int source, NearRank peer, std::uint64_t epoch, const Record& record) const {
    const NearMemory theirs = entry(peer, source, epoch);
    *theirs.array<Record>() = record;
    theirs.from(kEntryEpoch).signal(epoch);
  }
  // The operation that a peer has entered last, of those that share a stage with `epoch`.
  std::uint64_t entered(int peer, std::uint64_t epoch) const {
    return entry(rank_, peer, epoch).from(kEntryEpoch).seen();
  }
  // Its record, once entered() has told that it is there.
  const Record& posted_by(int peer, std::uint64_t epoch) const {
    return *entry(rank_, peer, epoch).template array<Record>();
  }
  // The same with done flags. A rank that sees the epoch also sees all that was written there, and
  // nothing is read there any more.
  void post_done(NearRank peer, std::uint64_t epoch) const {
    done(peer, rank_, epoch).signal(epoch);
  }
  // Frees every stage of this rank for a peer, up to `epoch` and on from it.
  void post_done_all(NearRank peer, std::uint64_t epoch) const {
    for (std::uint64_t stage = 0; stage < stages_; ++stage) done(peer, rank_, stage).signal(epoch);
  }
  std::uint64_t done_by(int peer, std::uint64_t epoch) const {
    return done(rank_, peer, epoch).seen();
  }

  // Whether a rank has left a done flag of the operation in any rank's memory. `bits`: those of the
  // flag that do not count.
  bool has_left(NearRank source, std::uint64_t epoch, std::uint64_t bits) const {
    return std::ranges::any_of(comm_.hosts().near(), [&](NearRank owner) {
      return (done(owner, source, epoch).seen() & ~bits) == epoch;
    });
  }

  // The highest number that a process of this rank has left in its peers' memory.
  std::uint64_t highest_left() const {
    std::uint64_t highest = 0;
    for (const NearRank peer : peers_) {
      for (std::uint64_t stage = 0; stage < stages_; ++stage) {
        highest = std::max({highest, entry(peer, rank_, stage).from(kEntryEpoch).seen(),
                            done(peer, rank_, stage).seen()});
      }
    }
    return highest;
  }

  Comm& comm() const { return comm_; }
  int number() const { return number_; }
  NearRank self() const { return rank_; }
  std::uint64_t stages() const { return stages_; }

 private:
  static constexpr std::uint64_t kEntryEpoch = offsetof(Entry<Record>, epoch);

  // The entry, or done flag, that `source` writes into the owner's memory: cells of
  // [stage][source].
  NearMemory entry(NearRank owner, int source, std::uint64_t epoch) const {
    return areas_.of(owner).from(map_.entry + cell(source, epoch) * sizeof(Entry<Record>));
  }
  NearMemory done(NearRank owner, int source, std::uint64_t epoch) const {
    return areas_.of(owner).from(map_.done + cell(source, epoch) * sizeof(DoneFlag));
  }
  std::uint64_t cell(int source, std::uint64_t epoch) const {
    return cell_of(epoch, source, comm_.num_ranks(), stages_);
  }

  Comm& comm_;
  const int number_;
  const NearRank rank_;
  NearRanks peers_;
  const std::uint64_t stages_;
  const TurnMap map_;
  const NearTable areas_;
};

}  // namespace xd::turn
