// The experts that the tokens of every rank choose, and the places where their rows go.
#pragma once

#include <cstdint>
#include <vector>

#include "workload.h"

namespace bench {

// splitmix64: the same numbers from every compiler and standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t x = state_ += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  // Uniform in (0, 1).
  double unit() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1.0p-53; }

 private:
  std::uint64_t state_;
};

// Choices of one rank, [tokens, topk]: distinct experts per token.
using Choices = std::vector<std::int32_t>;

// result[r] = choices of rank r.
std::vector<Choices> make_routing(const Workload& workload);

// Rows between all ranks: result[source][destination], unique (token, rank) pairs.
std::vector<std::vector<std::int64_t>> count_rows(const Workload& workload,
                                                  const std::vector<Choices>& routing);

// One token of one source that comes to this rank, and the rows of the receive tensor that it
// fills: ascending by its k in the expert layout, exactly one in the rank layout.
struct Arrival {
  int source;
  int token;
  int rows_begin;  // into Placement::rows
  int rows_end;
};

// The rows that one rank receives, in the order (source, token).
struct Placement {
  std::vector<Arrival> arrivals;
  std::vector<std::int32_t> rows;
  std::vector<std::int32_t> padding_rows;  // rows inside zones that belong to no token
  std::int64_t total = 0;                  // rows of the receive tensor in use, padding included
};
Placement place(const Workload& workload, const std::vector<Choices>& routing, int rank);

// The amounts that one rank sends and receives.
struct Traffic {
  Choices choices;
  std::int64_t recv_rows = 0;      // used rows of the receive tensor
  std::int64_t recv_capacity = 0;  // recv_rows rounded up to whole alignments, at least one
  std::int64_t sent_rows = 0;      // to other ranks
};
Traffic traffic_of(const Workload& workload, const std::vector<Choices>& routing, int rank);

}  // namespace bench
