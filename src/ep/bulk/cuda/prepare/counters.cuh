// The counters of prepare: the numbers of choices and tokens per destination, and later the next
// number of each.
//
//   memory                        written by                      read by
//   columns [warps][C], bad ids   this block                      this block, after its barriers
//   before [C]                    this block, add_up_before()     likewise
//   counts_of(block)              that block, in step 1           all blocks, after a grid barrier
//   survivors_of(block)           that block, in step 4           likewise
//
// The first rows lie in shared memory, the others in device memory that no peer touches. A warp
// adds to its own row of columns alone; only open() writes other warps' rows, between barriers of
// the block. It looks at no flag: the caller raises the grid barriers.
//
// C columns: one for each expert, by physical number (ExpertMap), its choices; then one for each
// rank, the tokens that go there; then one for each rank, the choices.
#pragma once

#include "ep/bulk/cuda/prepare/choices.cuh"

namespace xd::ep::cuda {

inline constexpr std::uint32_t kRemoteRow = 0x7FFFFFFF;  // beyond every capacity

__device__ inline std::uint32_t saturate(std::uint64_t row) {
  return row < kRemoteRow ? static_cast<std::uint32_t>(row) : kRemoteRow;
}

class Counters {
 public:
  struct Shared {
    std::uint32_t bad_ids;  // bad ids of this block's tokens
  };

  __device__ Counters(const PrepareParams& params, Shared& shared, std::uint32_t* columns)
      : s_(shared),
        values_(columns),
        experts_(params.turn.group.experts),
        ranks_(params.turn.group.ranks()),
        columns_(static_cast<int>(counter_columns(experts_, ranks_))),
        before_(of_warp(warps_per_block())),
        scratch_(params.scratch),
        map_(PrepareScratch::make(experts_, ranks_)) {}

  __device__ int column_of_tokens(int rank) const { return experts_ + rank; }
  __device__ int column_of_choices(int rank) const { return experts_ + ranks_ + rank; }
  __device__ int column_of_bad_ids() const { return columns_; }  // in counts_of() alone
  // Shared memory behind the columns.
  __device__ std::uint32_t* end() const { return before_ + columns_; }

  // The counts of a block, by column; and those of its choices that are not dropped.
  __device__ std::uint32_t* counts_of(int block) const { return row_of(map_.block_counts, block); }
  __device__ std::uint32_t* survivors_of(int block) const {
    return row_of(map_.block_survivors, block);
  }
  // The sum of a column over the first blocks of such a table, after its grid barrier.
  __device__ std::uint32_t sum_of(const std::uint32_t* first_block, int column, int blocks) const;

  // Counts this block's choices and publishes their sums. All threads call it.
  __device__ void count(const Choices& choices);
  // Adds up the counts of the blocks before this one, after the grid barrier. All threads call it.
  __device__ void add_up_before() const;
  // These sums, behind the block's next barrier.
  __device__ std::uint32_t before(int column) const { return before_[column]; }

  // Adds one to a column of this warp. Single lanes call it.
  __device__ void add(int column) const { atomicAdd(&mine()[column], 1u); }
  // Sets the columns of ranks back to 0, for this warp. All lanes call it.
  __device__ void clear_ranks() const;
  // Publishes the block's sums of the columns from `from` on, for all blocks. All threads call it;
  // it begins with a barrier of the block. `to`: this block's row of a table.
  __device__ void publish(int from, std::uint32_t* to) const;
  // Turns counts into numbers: in the columns from `from` on, each warp's counter becomes the
  // number that its first choice or token gets, where first(column) is the block's first number.
  // All threads call it; it ends with a barrier of the block.
  template <class First>
  __device__ void open(int from, First&& first) const;
  // Takes numbers for the active lanes of each column, in lane order, and moves the warp's counters
  // on. All lanes call it.
  __device__ std::uint32_t take(bool active, int column) const;

 private:
  __device__ std::uint32_t* of_warp(int warp) const { return values_ + warp * columns_; }
  __device__ std::uint32_t* mine() const { return of_warp(warp_in_block()); }
  __device__ std::uint32_t* row_of(std::uint64_t table, int block) const {
    return scratch_ + table + static_cast<std::uint64_t>(block) * (columns_ + 1);
  }

  Shared& s_;
  std::uint32_t* values_;  // [warps][columns_]
  const int experts_, ranks_, columns_;
  std::uint32_t* before_;  // [columns_]
  std::uint32_t* scratch_;
  const PrepareScratch map_;
};

__device__ inline void Counters::count(const Choices& choices) {
#pragma unroll 1
  for (int i = thread_in_block(); i < warps_per_block() * columns_; i += threads_per_block()) {
    values_[i] = 0;
  }
  if (thread_in_block() == 0) s_.bad_ids = 0;
  __syncthreads();
  choices.for_each([&](const Pick& c) {
    const bool first_there = choices.is_first_at_rank(c, c.good);
    if (c.good) {
      add(c.physical_expert);
      add(column_of_choices(c.rank));
      if (first_there) add(column_of_tokens(c.rank));
    }
    const unsigned bad = __ballot_sync(kAllLanes, c.bad);
    if (lane_id() == 0 && bad != 0) {
      atomicAdd(&s_.bad_ids, static_cast<unsigned>(__popc(bad)));
    }
    if (c.unplaced) choices.count_unplaced();
  });
  std::uint32_t* const counts = counts_of(static_cast<int>(blockIdx.x));
  publish(0, counts);
  if (thread_in_block() == 0) counts[column_of_bad_ids()] = s_.bad_ids;
}

__device__ inline std::uint32_t Counters::sum_of(const std::uint32_t* first_block, int column,
                                                 int blocks) const {
  constexpr int kAtOnce = 32;
  const std::uint32_t* from = first_block + column;
  std::uint32_t sum = 0;
#pragma unroll 1
  for (int first = 0; first < blocks; first += kAtOnce) {
    std::uint32_t counts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      counts[i] = first + i < blocks ? from[static_cast<std::uint64_t>(i) * (columns_ + 1)] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += counts[i];
    from += static_cast<std::uint64_t>(kAtOnce) * (columns_ + 1);
  }
  return sum;
}

__device__ inline void Counters::add_up_before() const {
  const int blocks = static_cast<int>(blockIdx.x);
  if (blocks == Choices::blocks()) return;  // it has no choices to number
#pragma unroll 1
  for (int c = thread_in_block(); c < columns_; c += threads_per_block()) {
    before_[c] = sum_of(counts_of(0), c, blocks);
  }
}

__device__ inline void Counters::clear_ranks() const {
#pragma unroll 1
  for (int c = experts_ + lane_id(); c < columns_; c += 32) mine()[c] = 0;
  __syncwarp();
}

__device__ inline void Counters::publish(int from, std::uint32_t* to) const {
  __syncthreads();
#pragma unroll 1
  for (int c = thread_in_block() + from; c < columns_; c += threads_per_block()) {
    std::uint32_t sum = 0;
#pragma unroll 8
    for (int w = 0; w < warps_per_block(); ++w) sum += of_warp(w)[c];
    to[c] = sum;
  }
}

template <class First>
__device__ void Counters::open(int from, First&& first) const {
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int c = thread_in_block() + from; c < columns_; c += threads_per_block()) {
    std::uint64_t next = first(c);
#pragma unroll 1
    for (int first_warp = 0; first_warp < warps_per_block(); first_warp += kAtOnce) {
      std::uint32_t count[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        count[i] = of_warp(min(first_warp + i, warps_per_block() - 1))[c];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first_warp + i < warps_per_block()) of_warp(first_warp + i)[c] = saturate(next);
        next += count[i];
      }
    }
  }
  __syncthreads();
}

__device__ inline std::uint32_t Counters::take(bool active, int column) const {
  const unsigned same = equal_lanes(static_cast<unsigned>(column), active);
  const unsigned before = same & lower_lanes();
  std::uint32_t number = 0;
  if (active) number = mine()[column] + __popc(before);
  __syncwarp();
  if (active && before == 0) {
    mine()[column] = saturate(std::uint64_t{mine()[column]} + __popc(same));
  }
  __syncwarp();
  return number;
}

}  // namespace xd::ep::cuda
