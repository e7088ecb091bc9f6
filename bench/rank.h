// One rank of a measurement: the means by which it measures, and its ways to the other ranks.
#pragma once

#include <span>
#include <vector>

#include "device.h"
#include "ranks.h"
#include "stopwatch.h"

namespace bench {

struct Rank {
  int rank, ranks;
  xd_comm* comm;
  const ComputeDevice& device;
  Stopwatch& watch;

  // All that follows is collective.
  void barrier() const { ok(xd_comm_barrier(comm)); }
  // Waits for what is enqueued, and for the other ranks.
  void settle(const char* what) const {
    device.wait(what);
    barrier();
  }
  // [rank][element]
  template <class T>
  std::vector<std::vector<T>> gather(const std::vector<T>& mine) const {
    std::vector<T> all(static_cast<std::size_t>(ranks) * mine.size());
    ok(xd_comm_all_gather(comm, mine.data(), all.data(), mine.size() * sizeof(T)));
    std::vector<std::vector<T>> of_rank;
    for (auto at = all.begin(); at != all.end(); at += std::ssize(mine))
      of_rank.emplace_back(at, at + std::ssize(mine));
    return of_rank;
  }
  // Copies rank 0's bytes to every rank.
  void broadcast(std::span<std::byte> bytes) const;
  // The maximum over the ranks of every element, on rank 0; empty on the others.
  std::vector<double> slowest(const std::vector<double>& mine) const;
  // Times an operation: seconds of each iteration, the maximum over the ranks, on rank 0.
  std::vector<double> time(Iterations iterations, const std::function<void(int)>& body) const {
    return slowest(watch.measure(iterations, body));
  }
  bool all(bool mine) const;
};

}  // namespace bench
