// The hosts that ranks declare, and the ranks whose memory a rank can reach. They are not the same.
//
// *Hosts* are named by ranks (xd_comm_config.host); without names all ranks are on one. Sums over
// ranks are made by host (docs/ep-semantics.md), so the names decide their bits.
//
// A rank is *near* to this rank if the two share memory, which is mapped into this process; this
// rank is near to itself. All ranks of a communicator are near, whatever hosts they name, as
// connecting refuses any other (docs/internals/communicator.md). Ranks that are not near never get
// an address here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
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
  HostMap(int rank, int num_ranks) : HostMap(rank, std::vector<int>(at(num_ranks), 0)) {}
  // `names` are those of the ranks' hosts, by rank; with no names all ranks are on one host.
  static HostMap of_names(int rank, int num_ranks, std::span<const std::string> names) {
    return names.empty() ? HostMap(rank, num_ranks) : HostMap(rank, number_hosts(names));
  }

  int num_hosts() const { return num_hosts_; }
  // The host of a rank, 0 <= host < num_hosts(). Hosts are numbered by their lowest ranks.
  int host_of(int rank) const { return host_of_[at(rank)]; }
  // By rank.
  std::span<const int> host_of() const { return host_of_; }
  // This rank's host.
  int host() const { return host_of(self_); }

  // This rank.
  NearRank self() const { return self_; }
  // By ascending rank, this one among them.
  const NearRanks& near() const { return near_; }
  // All near ranks but this one. The next rank comes first, so that not all ranks begin with the
  // same peer.
  const NearRanks& peers() const { return peers_; }

 private:
  // `host_of` numbers hosts by their lowest ranks.
  HostMap(int rank, std::vector<int> host_of)
      : num_hosts_(*std::ranges::max_element(host_of) + 1),
        host_of_(std::move(host_of)),
        self_(rank) {
    const int num_ranks = static_cast<int>(host_of_.size());
    for (int r = 0; r < num_ranks; ++r) near_.push_back(NearRank(r));
    for (int i = 1; i < num_ranks; ++i) peers_.push_back(NearRank((rank + i) % num_ranks));
  }

  static std::vector<int> number_hosts(std::span<const std::string> names) {
    std::vector<int> host_of;
    std::unordered_map<std::string_view, int> numbers;
    for (const std::string& name : names) {
      host_of.push_back(numbers.emplace(name, static_cast<int>(numbers.size())).first->second);
    }
    return host_of;
  }

  int num_hosts_;
  std::vector<int> host_of_;
  NearRank self_;
  NearRanks near_, peers_;
};

}  // namespace xd
