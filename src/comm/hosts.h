// The hosts that a communicator's ranks are on: all ranks are on one, as connecting refuses any
// other (docs/internals/communicator.md).
//
// A rank is *near* to this rank if it is on the same host; this rank is near to itself. Near ranks
// share memory, which is mapped into this process. Ranks on other hosts never get an address here.
#pragma once

#include <cstddef>
#include <vector>

#include "base/math.h"

namespace xd {

// The number of a near rank. Only HostMap makes one, and memory is asked for by it
// (comm/near_memory.h), so no code can ask for the address of a rank that has none here.
class NearRank {
 public:
  constexpr operator int() const { return rank_; }

 private:
  friend class HostMap;
  constexpr explicit NearRank(int rank) : rank_(rank) {}

  int rank_;
};
constexpr std::size_t at(NearRank rank) { return at(int{rank}); }

// Near ranks in the order in which one rank goes through them. Loops that touch other ranks' memory
// go over such a set, and so reach exactly its ranks.
using NearRanks = std::vector<NearRank>;

class HostMap {
 public:
  // One host with all ranks.
  HostMap(int rank, int num_ranks) : self_(rank) {
    for (int r = 0; r < num_ranks; ++r) near_.push_back(NearRank(r));
    for (int i = 1; i < num_ranks; ++i) peers_.push_back(NearRank((rank + i) % num_ranks));
  }

  // This rank.
  NearRank self() const { return self_; }
  // By ascending rank, this one among them.
  const NearRanks& near() const { return near_; }
  // All near ranks but this one. The next rank comes first, so that not all ranks begin with the
  // same peer.
  const NearRanks& peers() const { return peers_; }

 private:
  NearRank self_;
  NearRanks near_, peers_;
};

}  // namespace xd
