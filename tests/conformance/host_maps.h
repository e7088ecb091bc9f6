// Maps of ranks to hosts, for tests of sums by host.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "support/world.h"

namespace xd::test {

// Two hosts of neighbours, hosts that take turns, one of all ranks but the first, and one for each
// rank.
inline std::vector<Hosts> host_maps(int num_ranks) {
  Hosts halves, turns, rest, apart;
  for (int rank = 0; rank < num_ranks; ++rank) {
    halves.push_back(2 * rank < num_ranks ? 1 : 0);  // hosts come by ranks, not by names
    turns.push_back(rank % 2);
    rest.push_back(rank == 0 ? 0 : 1);
    apart.push_back(rank);
  }
  return {halves, turns, rest, apart};
}

// Spreads the first cases over the maps, `most` on each: run(rank, case) gets a rank of a
// communicator whose ranks have named the map's hosts.
template <class Case, class Run>
void spread_over_maps(const Rank& rank, const std::vector<Case>& cases, std::size_t most,
                      Run&& run) {
  const std::vector<Hosts> maps = host_maps(rank.num_ranks);
  for (std::size_t m = 0; m < maps.size(); ++m) {
    const std::string name = "map" + std::to_string(m);
    const Comm comm = rank.comm_on(maps[m], name, World::kHeapBytes);
    Rank there = rank;
    there.comm = comm.get();
    there.hosts = maps[m];
    there.run_name += "." + name;
    for (std::size_t i = m; i < std::min(cases.size(), most * maps.size()); i += maps.size()) {
      SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + name + ", " +
                   cases[i].description());
      run(there, cases[i]);
    }
    ok(xd_comm_barrier(comm.get()));
  }
}

}  // namespace xd::test
