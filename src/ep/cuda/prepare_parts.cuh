// The steps of prepare on the device: see ep/cuda/prepare.cu.
#pragma once

#include "ep/cuda/kernels.h"
#include "ep/cuda/walk.cuh"

namespace xd::ep::cuda {

inline constexpr std::uint32_t kFarRow = 0x7FFFFFFF;  // beyond every capacity

struct PrepareShared {
  std::uint64_t partial[kMostPrepareWarps];
  unsigned long long total[kMaxDeviceRanks];  // padded rows each rank needs
  std::uint32_t bad;                          // ids, of this block
  int overflow_rank, bad_id_rank;
  unsigned long long bad_ids;
  int recount;                               // rows are dropped somewhere: lists are numbered again
  std::uint64_t start[kMaxDeviceRanks + 1];  // padded rows of all lower ranks
  ListedWord told[kMaxDeviceRanks];          // what every source has here
  std::int32_t item_begin[kMaxDeviceRanks + 1];
  std::int32_t row_begin[kMaxDeviceRanks + 1];
  unsigned long long dropped_rows;  // EXPERT_MAJOR: of this rank
  unsigned long long checksum;
};

__device__ inline std::uint32_t saturate(std::uint64_t row) {
  return row < kFarRow ? static_cast<std::uint32_t>(row) : kFarRow;
}

// How many of `count` rows from `first` on lie below `limit`.
__device__ inline std::uint64_t kept_rows(std::uint64_t first, std::uint64_t count,
                                          std::uint64_t limit) {
  return first >= limit ? 0 : min(count, limit - first);
}

class Prepare {
 public:
  __device__ Prepare(const PrepareParams& params, Turn& turn, TurnShared& shared,
                     PrepareShared& state, std::uint32_t* counters)
      : p_(params),
        g_(params.turn.group),
        turn_(turn),
        shared_(shared),
        s_(state),
        counters_(counters),
        columns_(static_cast<int>(counter_columns(g_.experts, g_.ranks()))),
        next_(counters + warps_per_block() * columns_),
        zone_(next_ + columns_),
        scratch_(PrepareScratch::make(g_.experts, g_.ranks())),
        layout_{g_.experts, g_.ranks()} {}

  __device__ void count_choices();
  __device__ bool exchange_counts();
  __device__ void place();
  __device__ bool number_rows();
  __device__ bool wait_for_sources();
  // The plan's head and the outputs: before the sources are done, unless rows are dropped.
  __device__ bool head_can_be_early() const { return s_.recount == 0; }
  // Whether something of the plan is what the sources tell, beyond their counts.
  __device__ bool needs_sources() const { return g_.keeps_items || s_.recount != 0; }
  __device__ void write_head();
  __device__ void finish_plan();

 private:
  // One choice of a step of the warp: lanes are (token, k) in order.
  struct Pick {
    bool active;  // the lane has a choice
    bool good, bad;
    int token;       // of this rank
    int first_lane;  // of the token
    int id, rank;
  };
  struct Place {
    bool kept, leader;
    std::uint32_t row;
  };

  // The last block counts no tokens, if there is another: it writes the plan's head meanwhile.
  __device__ static int counting_blocks() {
    return gridDim.x > 1 ? static_cast<int>(gridDim.x) - 1 : 1;
  }
  __device__ static bool writes_head() { return blockIdx.x == gridDim.x - 1; }
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }
  __device__ int column_of_tokens(int rank) const { return g_.experts + rank; }
  __device__ int column_of_rows(int rank) const { return g_.experts + g_.ranks() + rank; }
  __device__ std::uint32_t* counter(int warp) const { return counters_ + warp * columns_; }
  __device__ std::uint32_t* mine() const { return counter(warp_in_block()); }
  __device__ std::uint32_t* block_counts(int block) const {
    return p_.scratch + scratch_.block_counts + static_cast<std::uint64_t>(block) * (columns_ + 1);
  }
  __device__ std::uint32_t* block_base(int block) const {
    return p_.scratch + scratch_.block_base + static_cast<std::uint64_t>(block) * (columns_ + 1);
  }
  __device__ std::uint64_t* counts_at(int owner, int source) const {
    return turn_.words(owner, g_.counts) +
           (turn_.epoch() % 2 * g_.ranks() + source) * layout_.size();
  }
  // What a source has said, once it has been waited for.
  __device__ std::uint32_t said(int source, std::size_t index) const {
    return count_of(ptx::ld_relaxed_sys(counts_at(g_.rank(), source) + index));
  }
  // The rows that a rank can receive under this plan.
  __device__ std::uint32_t capacity_of(int rank) const {
    const std::uint32_t configured = shared_.base[rank + 1] - shared_.base[rank];
    return static_cast<std::uint32_t>(whole_rows(configured, p_.alignment));
  }
  __device__ std::uint64_t limit_of(int rank) const {
    return g_.drop ? capacity_of(rank) : ~std::uint64_t{0};
  }
  __device__ bool keeps_items(int rank) const {
    return (g_.keeps_items_mask[rank / 64] >> (rank % 64) & 1) != 0;
  }

  template <class Body>
  __device__ void for_each_step(Body&& body) const;
  __device__ std::int64_t id_at(std::int64_t token, std::int64_t end) const;
  __device__ Pick pick(std::int64_t token, bool active, std::int64_t id) const;
  __device__ void sum_block(bool experts);
  template <class Body>
  __device__ bool for_each_count(std::size_t index, std::uint32_t own, Body&& body) const;
  __device__ bool wait_count(int source, std::size_t index, std::uint64_t& word) const;
  __device__ std::uint32_t sum_column(int column) const;
  __device__ bool exchange_column(int column, std::uint64_t& hash);
  template <class Value, class Store>
  __device__ void scan(int count, Value&& value, Store&& store);
  __device__ void count_items();
  __device__ void find_overflow();
  __device__ void open_counters();
  __device__ std::uint32_t next(int column, unsigned lanes) const;
  __device__ std::uint32_t take(bool active, int column) const;
  __device__ Place place_choice(const Pick& c) const;
  __device__ void keep_count(const Pick& c, const Place& place) const;
  __device__ void tell_owner(const Pick& c, const Place& place) const;
  __device__ int lower_ranks(const Pick& c, const Place& place) const;
  __device__ bool recount();
  __device__ void tell_again() const;
  __device__ void tell_lengths() const;
  __device__ void send_kept() const;

  __device__ std::byte* plan_part(std::uint64_t offset) const { return p_.plan + offset; }
  __device__ PlanMap plan_map() const {
    return PlanMap::make({.local_experts = g_.local_experts,
                          .tokens = p_.tokens,
                          .topk = p_.topk,
                          .list_rows = g_.expert_major ? g_.capacity : 0,
                          .items = g_.keeps_items ? g_.capacity : 0,
                          .ranks = g_.ranks()});
  }
  __device__ std::uint32_t* codes() const {
    return reinterpret_cast<std::uint32_t*>(plan_part(plan_map().code));
  }
  __device__ void read_told();
  __device__ void find_begins();
  __device__ void judge();
  __device__ void copy_items() const;
  __device__ void write_zones();
  __device__ std::uint64_t pairs_of(int local_expert) const;
  __device__ void write_header();
  __device__ void seal();
  __device__ void write_rank_rows() const;
  __device__ std::uint64_t rows_between(int source, int rank, int lane) const;
  __device__ void report_totals() const;
  __device__ static void write_number(const PrepareParams::Output& out, std::int64_t at,
                                      std::int64_t value) {
    if (out.data == nullptr) return;
    if (out.wide) {
      static_cast<std::int64_t*>(out.data)[at] = value;
    } else {
      static_cast<std::int32_t*>(out.data)[at] =
          static_cast<std::int32_t>(min(value, std::int64_t{INT32_MAX}));
    }
  }

  const PrepareParams& p_;
  const GroupDevice& g_;
  Turn& turn_;
  TurnShared& shared_;
  PrepareShared& s_;
  std::uint32_t* counters_;  // [warps][columns_]
  const int columns_;
  std::uint32_t* next_;  // [columns_] what this block's counters begin with, but for zones
  std::uint32_t* zone_;  // [E] first row of every expert's zone
  const PrepareScratch scratch_;
  const CountLayout layout_;
};

}  // namespace xd::ep::cuda

#include "ep/cuda/prepare_count.cuh"
#include "ep/cuda/prepare_number.cuh"
#include "ep/cuda/prepare_plan.cuh"
