// Step 3 of prepare: it computes from all ranks' counts the zones of all experts, the overflow of
// every rank, and the first numbers of this block. Each block computes all of it for itself.
//
//   memory                 written by                   read by
//   Shared, first rows,    this block, in place()       this block, after place()
//   block's first numbers
//
// All of it is shared memory. The results of the exchange are trusted after its receive() and a
// barrier of the block; no flag is looked at. Every block of every rank computes the same zones and
// overflows, since all have the same counts.
#pragma once

#include "ep/bulk/cuda/prepare/exchange.cuh"
#include "ep/bulk/cuda/scan.cuh"

namespace xd::ep::cuda {

class Zones {
 public:
  struct Shared {
    std::uint64_t partial[kMostPrepareWarps];   // for scan_block()
    unsigned long long total[kMaxDeviceRanks];  // padded rows each rank needs
    std::uint64_t start[kMaxDeviceRanks + 1];   // padded rows of all lower ranks
    int overflow_rank;                          // the lowest; INT32_MAX = none
    int drops;
  };

  // `base`: prefix sums of all ranks' capacities. Takes the shared memory behind the exchange's.
  __device__ Zones(const PrepareParams& params, const std::uint32_t* base, const Counters& counters,
                   const Exchange& exchange, Shared& shared)
      : p_(params),
        g_(params.turn.group),
        base_(base),
        counters_(counters),
        exchange_(exchange),
        s_(shared),
        first_row_(exchange.end()) {}

  // Places everything and, in blocks with tokens, opens the counters: from now on take() gives rows
  // and numbers of items. All threads call it.
  __device__ void place() const;

  // True if rows are dropped somewhere, so that survivors must be counted again.
  __device__ bool drops() const { return s_.drops != 0; }
  // Padded rows that a rank needs.
  __device__ std::uint64_t total(int rank) const { return s_.total[rank]; }
  // First row of an expert's zone, on its rank; kRemoteRow in all zones of a rank that end there or
  // beyond.
  __device__ std::uint32_t first_row(int physical_expert) const {
    return first_row_[physical_expert];
  }
  __device__ std::uint64_t end_of_zones(int rank) const {
    return s_.start[rank + 1] - s_.start[rank];
  }
  // The lowest such rank; -1 = none.
  __device__ int overflow_rank() const { return or_none(s_.overflow_rank); }
  __device__ int bad_id_rank() const { return or_none(exchange_.bad_id_rank()); }
  __device__ std::uint64_t bad_ids() const { return exchange_.all_bad_ids(); }
  // Tokens that the ranks before this one have for a rank: in RANK_MAJOR the first row there.
  __device__ std::uint64_t tokens_before(int rank) const { return exchange_.rank_base(rank); }

  // The rows that a rank can receive under this plan.
  __device__ std::uint32_t capacity_of(int rank) const {
    return static_cast<std::uint32_t>(whole_rows(base_[rank + 1] - base_[rank], p_.alignment));
  }
  // The first row that is dropped.
  __device__ std::uint64_t limit_of(int rank) const {
    return g_.drop ? capacity_of(rank) : ~std::uint64_t{0};
  }
  __device__ std::uint64_t padded(std::uint64_t rows) const {
    const auto below = static_cast<std::uint64_t>(p_.alignment) - 1;  // of a power of two
    return (rows + below) & ~below;
  }

 private:
  __device__ static int or_none(int rank) { return rank == INT32_MAX ? -1 : rank; }
  __device__ void lay_out() const;
  __device__ void find_overflow() const;
  __device__ void open_counters() const;

  const PrepareParams& p_;
  const GroupDevice& g_;
  const std::uint32_t* base_;
  const Counters& counters_;
  const Exchange& exchange_;
  Shared& s_;
  std::uint32_t* first_row_;  // [E] by physical number
};

__device__ inline void Zones::place() const {
  lay_out();
  find_overflow();
  if (static_cast<int>(blockIdx.x) < Choices::blocks()) open_counters();
}

// Turns totals into first rows.
__device__ inline void Zones::lay_out() const {
  if (thread_in_block() == 0) s_.overflow_rank = INT32_MAX;  // behind scan_block()'s barriers
  // The zones of all ranks form one sequence, in which rank d begins at start[d]. Ranks that hold
  // no expert begin where the next rank does.
  scan_block(
      s_.partial, g_.experts,
      [&](int physical_expert) { return padded(exchange_.expert_total(physical_expert)); },
      [&](int physical_expert, std::uint64_t sum) {
#pragma unroll 1
        for (int d = p_.experts.rank_at(physical_expert);
             d >= 0 && p_.experts.first(d) == physical_expert; --d) {
          s_.start[d] = sum;
        }
        if (physical_expert < g_.experts)
          first_row_[physical_expert] = static_cast<std::uint32_t>(sum);
      });
#pragma unroll 1
  for (int physical_expert = thread_in_block(); physical_expert < g_.experts;
       physical_expert += threads_per_block()) {
    const int d = p_.experts.rank_at(physical_expert);
    const bool remote = end_of_zones(d) >= kRemoteRow;
    first_row_[physical_expert] =
        remote ? kRemoteRow : first_row_[physical_expert] - static_cast<std::uint32_t>(s_.start[d]);
  }
  __syncthreads();
}

__device__ inline void Zones::find_overflow() const {
  const int d = thread_in_block();
  if (d < g_.ranks()) {
    s_.total[d] = g_.layout.row_per_expert ? end_of_zones(d) : exchange_.rank_total(d);
    if (s_.total[d] > capacity_of(d)) atomicMin(&s_.overflow_rank, d);
  }
  __syncthreads();
  if (thread_in_block() == 0) s_.drops = g_.drop && s_.overflow_rank != INT32_MAX ? 1 : 0;
  __syncthreads();
}

__device__ inline void Zones::open_counters() const {
  counters_.open(0, [&](int c) {
    std::uint64_t first = counters_.before(c);
    if (c < g_.experts) {
      first += std::uint64_t{exchange_.expert_base(c)} + first_row_[c];
    } else if (!g_.layout.row_per_expert && c < g_.experts + g_.ranks()) {
      first += tokens_before(c - g_.experts);
    }
    return first;
  });
}

}  // namespace xd::ep::cuda
