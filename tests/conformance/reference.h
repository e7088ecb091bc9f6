// The definition of expert parallelism, written as plainly as possible and sharing no code with the
// library: where every row goes, and what every element of every output must be.
#pragma once

#include <crossdock/ep.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "conformance/numeric.h"
#include "conformance/routing.h"
#include "support/hosts.h"

namespace xd::test {

struct Placement {
  int num_ranks = 1;
  int local_experts = 1;  // experts of every rank, in order, where expert_ranks is empty
  xd_ep_layout layout = XD_EP_EXPERT_MAJOR;
  int alignment = 1;
  std::vector<std::int64_t> capacity;  // capacity of each rank, as configured
  xd_ep_overflow overflow = XD_EP_OVERFLOW_ERROR;
  xd_ep_duplicate_ids duplicates = XD_EP_DUPLICATE_IDS_ERROR;
  std::vector<std::int32_t> expert_ranks = {};  // rank of each expert

  std::int64_t num_experts() const;
  int owner(std::int64_t expert) const;
  // The experts of a rank, ascending: a local expert is an index into them.
  std::vector<std::int64_t> experts_of(int rank) const;
  int local_experts_of(int rank) const { return static_cast<int>(experts_of(rank).size()); }

  // The rows that a rank can receive: its capacity in whole multiples of the alignment.
  std::int64_t whole_capacity(int rank) const {
    const std::int64_t rows = capacity[static_cast<std::size_t>(rank)];
    return rows - rows % alignment;
  }
};

// A row of a receive tensor.
struct Row {
  int source = -1;  // -1 = padding
  int token = -1;
  int k = -1;  // its choice; RANK_MAJOR: -1, for all choices that this rank holds
  bool padding() const { return source < 0; }
};

// The rows that one rank receives.
struct Received {
  std::vector<Row> rows;  // after drops
  std::vector<std::int64_t> counts, padded, offsets;
  std::int64_t total = 0;    // rows before drops, padding included
  std::int64_t dropped = 0;  // rows, padding not counted
};

class Routed {
 public:
  // Ids that are out of range or repeated in a row count as -1. Ids out of range are bad, and so
  // are repeated ones where they are not collapsed.
  Routed(Placement placement, std::vector<Choices> choices);

  const Placement& placement() const { return placement_; }
  const Choices& choices(int rank) const { return choices_[static_cast<std::size_t>(rank)]; }
  const Received& received(int rank) const { return received_[static_cast<std::size_t>(rank)]; }
  // Row of a token's choice k in the receive tensor of its expert's rank; none for -1 and dropped.
  std::optional<std::int64_t> row_of(int source, int token, int k) const;
  int owner(std::int64_t expert) const { return placement_.owner(expert); }
  std::int64_t local_expert(std::int64_t expert) const;
  // Rows that `source` puts into the receive tensor of `destination`.
  std::int64_t rows_between(int source, int destination) const;

  std::int64_t bad_ids() const { return bad_ids_; }
  int bad_id_rank() const { return bad_id_rank_; }      // lowest; -1 = none
  int overflow_rank() const { return overflow_rank_; }  // lowest; -1 = none
  // True if the plan's operations move nothing.
  bool refused() const {
    return overflow_rank_ >= 0 && placement_.overflow == XD_EP_OVERFLOW_ERROR;
  }

 private:
  void remove_bad_ids();
  Received receive_expert_major(int rank) const;
  Received receive_rank_major(int rank) const;
  void cut(Received& received, int rank) const;
  void describe(Received& received, int rank) const;
  void index_rows(int rank);

  Placement placement_;
  std::vector<Choices> choices_;
  std::vector<Received> received_;
  std::vector<std::vector<std::int64_t>> row_of_;  // [source][token * topk + k], -1 = none
  std::int64_t bad_ids_ = 0;
  int bad_id_rank_ = -1;
  int overflow_rank_ = -1;
};

// Content of a receive tensor of any rank: the element at (rank, row, column), as float32.
using ElementAt = std::function<float(int rank, std::int64_t row, std::int64_t column)>;
using WeightAt = std::function<float(int rank, std::int64_t row)>;

struct TokenOf {
  int source;
  int token;
};

// One element of combine (and, without weights, of dispatch_bwd's grad_tokens): the sum over the
// rows of a token, rounded on each rank, for each host where there are several, and once more at
// its source. A code of `format`.
std::uint32_t combined(const Routed& routed, const HostRanks& hosts, const TokenOf& of,
                       std::int64_t column, Format format, const ElementAt& element,
                       const WeightAt* weight);

// A rank's partial sum of a row in float32; empty where it has no rows of the token.
using PartialSum = std::function<std::vector<float>(int rank)>;

// A row of combine under a wire that is not SAME, out of the ranks' partial sums.
std::vector<std::uint32_t> combined_under(xd_ep_wire wire, const HostRanks& hosts,
                                          std::int64_t columns, Format format,
                                          const PartialSum& sum_of_rank);
// Partial sums of a token's rows.
std::vector<float> partial_sum(const Routed& routed, const TokenOf& of, int rank,
                               std::int64_t columns, const ElementAt& element,
                               const WeightAt* weight);

}  // namespace xd::test
