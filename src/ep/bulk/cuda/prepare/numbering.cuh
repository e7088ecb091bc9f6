// Step 4 of prepare: every choice gets its row, and every owner of rows gets its items.
//
//   memory                       written by                       read by
//   codes, in the plan           the warp whose tokens they are   that warp; later operations
//   items[s], lists[s]           s's warps                        the owner, after s's done flag
//   listed[s]                    s's last block with tokens       likewise
//   kept[s], RANK_MAJOR, drops   s's block 0                      likewise
//   surviving                    all blocks (atomics)             block 0, after grid barrier 2
//
// items, lists, listed and kept are group memory of the owner, reached after its record; plain
// stores, which the done flag covers. `surviving` lies in device memory that no peer touches, and
// is cleared before grid barrier 1. It looks at no flag of a peer: it reads only the peers' counts,
// after the wait for them.
#pragma once

#include "ep/bulk/cuda/prepare/zones.cuh"

namespace xd::ep::cuda {

class Numbering {
 public:
  // `base`: prefix sums of all ranks' capacities.
  __device__ Numbering(const PrepareParams& params, Turn& turn, const std::uint32_t* base,
                       const Choices& choices, const Counters& counters, const Exchange& exchange,
                       const Zones& zones)
      : p_(params),
        g_(params.turn.group),
        turn_(turn),
        base_(base),
        choices_(choices),
        counters_(counters),
        exchange_(exchange),
        zones_(zones),
        surviving_(params.scratch + PrepareScratch::make(g_.experts, g_.ranks()).kept),
        codes_(reinterpret_cast<std::uint32_t*>(params.plan + params.map.code)) {}

  // All threads call it, before grid barrier 1.
  __device__ void clear() const;
  // All threads call it, when zones are placed. It passes grid barrier 2 where rows are dropped.
  // False after a fatal error.
  __device__ bool run() const;

 private:
  struct Place {
    bool kept;    // the row lies within the owner's capacity
    bool leader;  // the first kept choice of its token at this owner
    std::uint32_t row;
  };

  __device__ std::uint32_t& code_of(const Pick& c) const {
    return codes_[static_cast<std::uint64_t>(c.token) * p_.topk + (lane_id() - c.first_lane)];
  }
  // This rank's row in an array of the owner that has a row for every source.
  template <class Word>
  __device__ Word* at_owner(int owner, std::uint64_t offset, std::uint64_t words) const {
    return reinterpret_cast<Word*>(turn_.area(owner).base + offset) +
           static_cast<std::uint64_t>(g_.rank()) * words;
  }
  __device__ std::uint32_t pack(const Pick& c, const Place& place) const;
  __device__ Place place_choice(const Pick& c) const;
  __device__ void keep_count(const Pick& c, const Place& place) const;
  __device__ void tell_owner(const Pick& c, const Place& place) const;
  __device__ int lower_ranks(const Pick& c, const Place& place) const;
  __device__ bool recount() const;
  __device__ void tell_again() const;
  __device__ ListedWord told(int owner) const;
  __device__ void tell_lengths() const;
  __device__ void send_kept() const;

  const PrepareParams& p_;
  const GroupDevice& g_;
  Turn& turn_;
  const std::uint32_t* base_;
  const Choices& choices_;
  const Counters& counters_;
  const Exchange& exchange_;
  const Zones& zones_;
  std::uint32_t* surviving_;  // [E] by physical number: choices of this rank, RANK_MAJOR with drops
  std::uint32_t* codes_;      // [T][K]
};

__device__ inline void Numbering::clear() const {
  if (blockIdx.x != 0) return;
#pragma unroll 1
  for (int e = thread_in_block(); e < g_.experts; e += threads_per_block()) surviving_[e] = 0;
}

__device__ inline bool Numbering::run() const {
  // EXPERT_MAJOR with drops: items and entries of lists have numbers only when all blocks have
  // counted the survivors. Until then the columns of ranks count these.
  const bool again = zones_.drops() && g_.layout.row_per_expert;
  if (again) counters_.clear_ranks();
  choices_.for_each([&](const Pick& c) {
    const Place place = place_choice(c);
    if (c.active) code_of(c) = pack(c, place);
    if (zones_.drops()) keep_count(c, place);
    if (!again) tell_owner(c, place);
  });
  if (zones_.drops() && !recount()) return false;
  if (g_.some_keep_items()) tell_lengths();
  return true;
}

// See RowCodec.
__device__ inline std::uint32_t Numbering::pack(const Pick& c, const Place& place) const {
  const std::uint32_t global = base_[place.kept ? c.rank : 0] + place.row;
  return !place.kept ? RowCodec::kNone
         : g_.layout.row_per_expert
             ? global
             : global * g_.codec_experts + c.physical_expert - p_.experts.first(c.rank);
}

// The choice's row. All lanes call it.
__device__ inline Numbering::Place Numbering::place_choice(const Pick& c) const {
  Place place{false, false, 0};
  if (g_.layout.row_per_expert) {
    place.row = counters_.take(c.good, c.physical_expert);
  } else {
    const unsigned same = choices_.equal_ranks(c, c.good);
    const bool first = c.good && (same & lower_lanes()) == 0;
    place.row = counters_.take(first, counters_.column_of_tokens(c.good ? c.rank : 0));
    place.row = __shfl_sync(kAllLanes, place.row, __ffs(static_cast<int>(same)) - 1);
  }
  place.kept = c.good && place.row < zones_.capacity_of(c.rank);
  place.leader = choices_.is_first_at_rank(c, place.kept);
  return place;
}

// The number of ranks that hold rows of this lane's token and are lower than its own. All lanes
// call it.
__device__ inline int Numbering::lower_ranks(const Pick& c, const Place& place) const {
  const int leading = place.leader ? c.rank : INT32_MAX;
  int lower = 0;
#pragma unroll 1
  for (int k = 0; k < p_.topk; ++k) {
    const int lane = min(c.first_lane + k, 31);
    lower += __shfl_sync(kAllLanes, leading, lane) < c.rank ? 1 : 0;
  }
  return lower;
}

// Writes the items and rows of these choices into the memory of their owners. All lanes call it.
__device__ inline void Numbering::tell_owner(const Pick& c, const Place& place) const {
  if (!g_.some_keep_items()) return;
  const int rank = place.kept ? c.rank : 0;
  const int order = lower_ranks(c, place);
  std::uint32_t item = 0, entry = 0;
  if (g_.layout.row_per_expert) {
    item = counters_.take(place.leader, counters_.column_of_tokens(rank));
    entry = counters_.take(place.kept, counters_.column_of_choices(rank));
  } else if (place.leader) {
    item = place.row - static_cast<std::uint32_t>(zones_.tokens_before(rank));
  }
  if (!place.kept || !g_.keeps_items_at(rank)) return;
  if (g_.layout.row_per_expert) {
    at_owner<std::uint32_t>(rank, g_.map.lists, g_.lists_stride)[1 + entry] = place.row;
  }
  if (!place.leader) return;
  const ItemWord word{entry,
                      static_cast<std::uint32_t>(c.token * g_.cells_per_token(p_.topk) + order)};
  at_owner<std::uint64_t>(rank, g_.map.items, g_.max_tokens)[item] =
      std::uint64_t{word.cell} << 32 | word.start;
}

// With drops: counts survivors, per rank (EXPERT_MAJOR) or per expert (RANK_MAJOR).
__device__ inline void Numbering::keep_count(const Pick& c, const Place& place) const {
  if (g_.layout.row_per_expert) {
    if (place.leader) counters_.add(counters_.column_of_tokens(c.rank));
    if (place.kept) counters_.add(counters_.column_of_choices(c.rank));
  } else if (place.kept) {
    atomicAdd(&surviving_[c.physical_expert], 1u);
  }
}

// With drops: the survivors of all blocks decide which items owners get. False after a fatal error.
__device__ inline bool Numbering::recount() const {
  const int block = static_cast<int>(blockIdx.x);
  if (g_.layout.row_per_expert) counters_.publish(g_.experts, counters_.survivors_of(block));
  if (!turn_.barrier(2)) return false;
  if (!g_.layout.row_per_expert) {
    send_kept();
    return true;
  }
  counters_.open(g_.experts,
                 [&](int c) { return counters_.sum_of(counters_.survivors_of(0), c, block); });
  tell_again();
  return true;
}

// Writes the lists from the codes that the warp has written.
__device__ inline void Numbering::tell_again() const {
  choices_.for_each([&](const Pick& c) {
    Place place{false, false, 0};
    if (c.good) {
      const std::uint32_t global = code_of(c);
      place.kept = global != RowCodec::kNone;
      if (place.kept) place.row = global - base_[c.rank];
    }
    place.leader = choices_.is_first_at_rank(c, place.kept);
    tell_owner(c, place);
  });
}

// The numbers of items and rows that all blocks have written to an owner. The last block with
// tokens calls it.
__device__ inline ListedWord Numbering::told(int owner) const {
  if (!g_.layout.row_per_expert) {
    const std::uint64_t before = zones_.tokens_before(owner);
    const auto kept = static_cast<std::uint32_t>(
        kept_rows(before, exchange_.tokens_for(g_.rank(), owner), zones_.capacity_of(owner)));
    return {kept, kept};
  }
  const int tokens = counters_.column_of_tokens(owner);
  const int choices = counters_.column_of_choices(owner);
  if (zones_.drops()) {
    const auto* survivors = counters_.survivors_of(0);
    return {counters_.sum_of(survivors, tokens, Choices::blocks()),
            counters_.sum_of(survivors, choices, Choices::blocks())};
  }
  const auto* own = counters_.counts_of(static_cast<int>(blockIdx.x));
  return {counters_.before(tokens) + own[tokens], counters_.before(choices) + own[choices]};
}

__device__ inline void Numbering::tell_lengths() const {
  const int d = thread_in_block();
  if (static_cast<int>(blockIdx.x) != Choices::blocks() - 1 || d >= g_.ranks()) return;
  const ListedWord word = told(d);
  *at_owner<std::uint64_t>(d, g_.map.listed, 1) = std::uint64_t{word.rows} << 32 | word.items;
}

// RANK_MAJOR: writes into each rank that overflows this rank's surviving choices of its experts.
// Block 0 calls it.
__device__ inline void Numbering::send_kept() const {
  if (blockIdx.x != 0) return;
#pragma unroll 1
  for (int physical_expert = thread_in_block(); physical_expert < g_.experts;
       physical_expert += threads_per_block()) {
    const int d = p_.experts.rank_at(physical_expert);
    if (zones_.total(d) <= zones_.capacity_of(d)) continue;
    at_owner<std::uint32_t>(d, g_.map.kept, g_.kept_stride)[physical_expert - p_.experts.first(d)] =
        surviving_[physical_expert];
  }
}

}  // namespace xd::ep::cuda
