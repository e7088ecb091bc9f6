// The connections that a rank has where the ranks of a communicator are on several hosts, and the
// ways that messages take over them. In this room a host is a machine, or a network namespace of
// one; the names that callers give to hosts are no matter here.
//
// Ranks of one host are connected each to each. Between two hosts rank i of one is connected to
// rank k of the other if i = k modulo the number of ranks on the smaller one; i and k count the
// ranks of their host from the lowest. So every rank is connected to at least one rank of every
// other host, and by it hears of every rank there: from a rank that it is not connected to through
// its own host's *relay* for that rank, the lowest that is connected. With N hosts of equal size
// a rank has N - 1 connections to other hosts.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/math.h"

namespace xd {

class Rails {
 public:
  // `host_of`: the hosts of the ranks, by rank, numbered from 0.
  Rails(int rank, std::span<const int> host_of);

  int rank() const { return rank_; }
  int num_ranks() const { return static_cast<int>(host_of_.size()); }
  int num_hosts() const { return static_cast<int>(ranks_of_.size()); }
  int host_of(int rank) const { return host_of_[at(rank)]; }
  const std::vector<int>& host_of() const { return host_of_; }
  // The ranks of a host, ascending.
  std::span<const int> ranks_of(int host) const { return ranks_of_[at(host)]; }

  // On this rank's host.
  bool is_near(int rank) const { return host_of(rank) == host_of(rank_); }
  // Connected to this rank, which is not connected to itself.
  bool is_linked(int rank) const { return rank != rank_ && are_linked(rank, rank_); }
  bool is_rail(int rank) const { return is_linked(rank) && !is_near(rank); }

  // The rank from which this rank gets the messages of `rank`: that rank itself, or a relay.
  int source_of(int rank) const { return source_of_[at(rank)]; }
  // The lowest rank of `host` that is connected to `rank`, which is on another one.
  int relay(int host, int rank) const;
  // The near ranks to which this rank, a relay, passes the messages of `rank` on.
  std::vector<int> followers_of(int rank) const;

 private:
  bool are_linked(int a, int b) const;

  int rank_;
  std::vector<int> host_of_;                // by rank
  std::vector<int> place_;                  // by rank, within its host
  std::vector<std::vector<int>> ranks_of_;  // by host
  std::vector<int> source_of_;              // by rank
};

}  // namespace xd
