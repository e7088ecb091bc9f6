// One rank of a case: the parts that all its measurements share.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "../ranks.h"
#include "../routing.h"
#include "../workload.h"
#include "device.h"
#include "stopwatch.h"

namespace bench::gpu {

// The facts about the batch that every rank of this process needs; computed once.
struct Batch {
  explicit Batch(const Workload& w)
      : workload(w), routing(make_routing(w)), rows(count_rows(w, routing)) {}

  Workload workload;
  std::vector<Choices> routing;
  std::vector<std::vector<std::int64_t>> rows;  // [source][destination]
};

// The ranks' results meet here. Its calls are collective.
class RankResults {
 public:
  RankResults(xd_comm* comm, int rank, int ranks) : comm_(comm), rank_(rank), ranks_(ranks) {}

  // The maximum over the ranks of every element, on rank 0; empty on the others.
  std::vector<double> slowest(const std::vector<double>& mine) const;

  // Copies rank 0's bytes to every rank.
  void broadcast(std::span<std::byte> bytes) const;

 private:
  xd_comm* comm_;
  int rank_, ranks_;
};

struct RankContext {
  int rank;
  int device;
  xd_comm* comm;
  const Stream& stream;
  const Batch& batch;
  RankResults& rank_results;
  Stopwatch& watch;

  const Workload& workload() const { return batch.workload; }
  int ranks() const { return batch.workload.ranks; }
  Iterations iterations() const { return {batch.workload.warmup, batch.workload.iters}; }
  void barrier() const { bench::ok(xd_comm_barrier(comm)); }
  // Enqueues, waits, and waits for the other ranks.
  void settle(const char* what) const {
    stream.wait(what);
    barrier();
  }
};

// The number of copies of `bytes` bytes with which an iteration finds none of its inputs in the L2
// cache; no more than there are iterations.
int copies_against_cache(const Workload& w, std::size_t bytes, int device);

// Overwrites the L2 cache of this device.
void flush_cache(const Stream& stream, int device);

}  // namespace bench::gpu
