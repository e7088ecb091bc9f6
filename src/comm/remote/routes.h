// The ways that a rank's bytes take to ranks on other machines: over one *gateway* on each of those
// machines, which does there what this rank would do if it had their memory. A rank's *partners*
// are the ranks that it sends to or that send to it: its gateways, and the ranks whose gateway it
// is. All of them are connected to it along rails (meet/rails.h), so that each watches the other.
#pragma once

#include <algorithm>
#include <vector>

#include "base/math.h"
#include "meet/rails.h"

namespace xd {

class FarRoutes {
 public:
  explicit FarRoutes(const Rails& machines)
      : machine_of_(machines.host_of()), gateways_(at(machines.num_hosts()), -1) {
    const int self = machines.rank(), home = machines.host_of(self);
    for (int m = 0; m < machines.num_hosts(); ++m) {
      if (m == home) continue;
      far_machines_.push_back(m);
      partners_.push_back(machines.gateway(m, self));
    }
    for (int r = 0; r < machines.num_ranks(); ++r) {
      if (machines.is_near(r)) continue;
      far_ranks_.push_back(r);
      if (machines.gateway(home, r) == self) partners_.push_back(r);
    }
    std::ranges::sort(partners_);
    partners_.erase(std::ranges::unique(partners_).begin(), partners_.end());
    for (const int m : far_machines_) gateways_[at(m)] = place_of(machines.gateway(m, self));
    for (const int p : partners_)
      if (machines.gateway(home, p) == self) sources_.push_back(place_of(p));
  }

  int machine_of(int rank) const { return machine_of_[at(rank)]; }
  // All machines but this one, ascending.
  const std::vector<int>& far_machines() const { return far_machines_; }
  // All ranks that are not near, ascending.
  const std::vector<int>& far_ranks() const { return far_ranks_; }

  // Ranks, ascending; code names a partner by its place in this list.
  const std::vector<int>& partners() const { return partners_; }
  // The partner that is this rank's gateway on another machine.
  int gateway(int far_machine) const { return gateways_[at(far_machine)]; }
  // The partners whose gateway this rank is.
  const std::vector<int>& sources() const { return sources_; }

 private:
  int place_of(int rank) const {
    return static_cast<int>(std::ranges::find(partners_, rank) - partners_.begin());
  }

  std::vector<int> machine_of_;  // by rank
  std::vector<int> far_machines_, far_ranks_, partners_;
  std::vector<int> gateways_;  // by machine
  std::vector<int> sources_;
};

}  // namespace xd
