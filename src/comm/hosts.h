// The hosts that ranks declare, and the ranks whose memory a rank can reach. They are not the same.
//
// *Hosts* are named by ranks (xd_comm_config.host); without names each machine, or network
// namespace of one, is a host. Sums over ranks are made by host (docs/ep-semantics.md), so the
// names decide their bits.
//
// A rank is *near* to this rank if the two share memory, which is mapped into this process; this
// rank is near to itself. All ranks of one machine are near, whatever hosts they name
// (docs/internals/communicator.md). Ranks that are not near never get an address here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/math.h"
#include "meet/rails.h"

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
  HostMap(int rank, int num_ranks) : HostMap(Rails(rank, std::vector<int>(at(num_ranks), 0))) {}
  // `names` are those of the ranks' hosts, by rank; with no names each machine is one.
  explicit HostMap(const Rails& machines, std::span<const std::string> names = {})
      : host_of_(names.empty() ? machines.host_of() : number_hosts(names)),
        num_hosts_(std::ranges::max(host_of_) + 1),
        self_(machines.rank()) {
    const int num_ranks = machines.num_ranks();
    for (int r = 0; r < num_ranks; ++r)
      if (machines.is_near(r)) near_.push_back(NearRank(r));
    for (int i = 1; i < num_ranks; ++i) {
      const int peer = (machines.rank() + i) % num_ranks;
      if (machines.is_near(peer)) peers_.push_back(NearRank(peer));
    }
    place_.resize(at(num_ranks));
    for (std::size_t i = 0; i < near_.size(); ++i) place_[at(near_[i])] = i + 1;
    by_host_.resize(at(num_ranks));
    std::iota(by_host_.begin(), by_host_.end(), 0);
    std::ranges::stable_sort(by_host_, {}, [&](int r) { return host_of_[at(r)]; });
  }
  static HostMap of_names(int rank, int num_ranks, std::span<const std::string> names) {
    return HostMap(Rails(rank, std::vector<int>(at(num_ranks), 0)), names);
  }

  int num_hosts() const { return num_hosts_; }
  // The host of a rank, 0 <= host < num_hosts(). Hosts are numbered by their lowest ranks.
  int host_of(int rank) const { return host_of_[at(rank)]; }
  // By rank.
  std::span<const int> host_of() const { return host_of_; }
  // All ranks, also far ones, by ascending host, and on each host by ascending rank: the order of
  // sums.
  std::span<const int> by_host() const { return by_host_; }
  // This rank's host.
  int host() const { return host_of(self_); }
  // Tells this map from others; 0 = one host.
  std::uint64_t fingerprint() const {
    if (num_hosts_ == 1) return 0;
    return hash_bytes(at(num_hosts_), host_of_.data(), host_of_.size() * sizeof(host_of_[0]));
  }

  bool is_near(int rank) const { return place_[at(rank)] != 0; }
  // None where the rank is remote.
  std::optional<NearRank> find_near(int rank) const {
    const std::size_t place = place_[at(rank)];
    return place != 0 ? std::optional(near_[place - 1]) : std::nullopt;
  }
  bool all_are_near() const { return near_.size() == host_of_.size(); }

  // This rank.
  NearRank self() const { return self_; }
  // By ascending rank, this one among them.
  const NearRanks& near() const { return near_; }
  // All near ranks but this one. The next rank comes first, so that not all ranks begin with the
  // same peer.
  const NearRanks& peers() const { return peers_; }

 private:
  static std::vector<int> number_hosts(std::span<const std::string> names) {
    std::vector<int> host_of;
    std::unordered_map<std::string_view, int> numbers;
    for (const std::string& name : names) {
      host_of.push_back(numbers.emplace(name, static_cast<int>(numbers.size())).first->second);
    }
    return host_of;
  }

  std::vector<int> host_of_;  // by rank
  int num_hosts_;
  NearRank self_;
  NearRanks near_, peers_;
  std::vector<std::size_t> place_;  // by rank: in near_, counted from 1; 0 = the rank is remote
  std::vector<int> by_host_;
};

}  // namespace xd
