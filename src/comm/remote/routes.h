// The ways that a rank's bytes take to ranks on other machines: over one *relay* on each of those
// machines, which does there what this rank would do if it had their memory. A rank's *neighbours*
// are the ranks that it sends to or that send to it: its relays, and the ranks whose relay it
// is. All of them are connected to it along rails (meet/rails.h), so that each watches the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "base/math.h"
#include "meet/rails.h"

namespace xd {

class RemoteRoutes {
 public:
  explicit RemoteRoutes(const Rails& machines)
      : machine_of_(machines.host_of()), relays_(at(machines.num_hosts()), -1) {
    const int self = machines.rank(), home = machines.host_of(self);
    for (int m = 0; m < machines.num_hosts(); ++m) {
      if (m == home) continue;
      remote_machines_.push_back(m);
      neighbours_.push_back(machines.relay(m, self));
    }
    for (int r = 0; r < machines.num_ranks(); ++r) {
      if (machines.is_near(r)) continue;
      remote_ranks_.push_back(r);
      if (machines.relay(home, r) == self) neighbours_.push_back(r);
    }
    std::ranges::sort(neighbours_);
    neighbours_.erase(std::ranges::unique(neighbours_).begin(), neighbours_.end());
    for (const int m : remote_machines_) relays_[at(m)] = place_of(machines.relay(m, self));
    for (const int p : neighbours_)
      if (machines.relay(home, p) == self) sources_.push_back(place_of(p));
  }

  int machine_of(int rank) const { return machine_of_[at(rank)]; }
  // All machines but this one, ascending.
  const std::vector<int>& remote_machines() const { return remote_machines_; }
  // All ranks that are not near, ascending.
  const std::vector<int>& remote_ranks() const { return remote_ranks_; }

  // Ranks, ascending; code names a neighbour by its place in this list.
  const std::vector<int>& neighbours() const { return neighbours_; }
  // The neighbour that is this rank's relay on another machine.
  int relay(int remote_machine) const { return relays_[at(remote_machine)]; }
  // The neighbours whose relay this rank is.
  const std::vector<int>& sources() const { return sources_; }

 private:
  int place_of(int rank) const {
    return static_cast<int>(std::ranges::find(neighbours_, rank) - neighbours_.begin());
  }

  std::vector<int> machine_of_;  // by rank
  std::vector<int> remote_machines_, remote_ranks_, neighbours_;
  std::vector<int> relays_;  // by machine
  std::vector<int> sources_;
};

// The most neighbours that any rank has, equal on all ranks. Where a machine has fewer ranks than
// another one, its ranks are relays of several there.
inline int most_neighbours(const Rails& machines) {
  std::ptrdiff_t most = 0;
  std::vector<int> ranks(at(machines.num_ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  for (const int a : ranks) {
    most = std::max(most, std::ranges::count_if(ranks, [&](int b) {
                      const int here = machines.host_of(a), there = machines.host_of(b);
                      if (here == there) return false;
                      return machines.relay(there, a) == b || machines.relay(here, b) == a;
                    }));
  }
  return static_cast<int>(most);
}

}  // namespace xd
