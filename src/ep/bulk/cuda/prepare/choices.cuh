// The choices of this rank's tokens, as prepare's warps walk them: in step 1 to count them, in step
// 4 to number them. Both walks are this one, so a warp meets the same tokens in both.
//
//   memory     written by                      read by
//   topk_idx   the caller, before the launch   the warp whose tokens they are
//   its table  a change (slot_table.cuh)       that warp, where ids name logical experts; it also
//                                              counts in it choices of experts without a slot
//   hints      as topk_idx                     that warp, where experts have replicas
//   ExpertMap  the group's host, when made     all warps, where the caller said who holds which
//
// It looks at no flag.
#pragma once

#include "ep/bulk/cuda/kernels.h"
#include "ep/plan/cuda/slot_table.cuh"
#include "ep/plan/cuda/warp.cuh"

namespace xd::ep::cuda {

// One choice. The lanes of a warp have choices (token, k) in order.
struct Pick {
  bool active;  // the lane has a choice
  bool good, bad;
  bool unplaced;   // of a logical expert that has no slot: it is neither
  int token;       // token of this rank
  int first_lane;  // the token's first lane
  int physical_expert,
      rank;  // the expert's physical number (ExpertMap) and rank; valid for good choices
};

class Choices {
 public:
  // Fetches the ids of the warp's first tokens, which every walk begins with.
  __device__ explicit Choices(const PrepareParams& params)
      : p_(params),
        g_(params.turn.group),
        step_(32 / params.topk),
        of_step_(lane_id() / params.topk),
        begin_(first_token(warp_in_grid())),
        end_(first_token(warp_in_grid() + 1)),
        first_ids_(id_of_step(begin_)) {}

  // The blocks that have tokens. The last block has none, if there is another: it writes the plan's
  // head meanwhile.
  __device__ static int blocks() { return gridDim.x > 1 ? static_cast<int>(gridDim.x) - 1 : 1; }
  // Whether this block does.
  __device__ static bool is_head() { return blockIdx.x == gridDim.x - 1; }

  __device__ void count_unplaced() const { atomicAdd(&g_.slots->unplaced, 1ull); }

  // Calls body(pick) on all lanes for the choices of the warp's tokens, in order, as many tokens at
  // a time as the lanes hold. All lanes call it.
  template <class Body>
  __device__ void for_each(Body&& body) const;
  // The lanes that have those of the token's choices at the same rank for which `counts` is true
  // (only where they are good), as a mask. All lanes call it.
  __device__ unsigned equal_ranks(const Pick& c, bool counts) const {
    return equal_in_group(static_cast<unsigned>(c.rank), counts, c.first_lane, p_.topk);
  }
  // True if this lane's is the first of them.
  __device__ bool is_first_at_rank(const Pick& c, bool counts) const {
    const unsigned same = equal_ranks(c, counts);  // all lanes take part
    return counts && (same & lower_lanes()) == 0;
  }

 private:
  __device__ static int warp_in_grid() {
    return static_cast<int>(blockIdx.x) * warps_per_block() + warp_in_block();
  }
  // Tokens are divided among the warps of blocks().
  __device__ int first_token(int warp) const {
    const int warps = blocks() * warps_per_block();
    const std::int64_t each = (p_.tokens + warps - 1) / warps;
    return static_cast<int>(min(each * warp, std::int64_t{p_.tokens}));
  }
  // Of the tokens that the warp looks at together, this lane has one, or none.
  __device__ bool has_token(int first) const { return of_step_ < step_ && first + of_step_ < end_; }
  __device__ std::int64_t id_of_step(int first) const;
  __device__ Pick pick(int first, std::int64_t id) const;

  const PrepareParams& p_;
  const GroupDevice& g_;
  const int step_, of_step_;  // tokens that a warp looks at together; this lane's among them
  const int begin_, end_;     // the warp's tokens
  const std::int64_t first_ids_;
};

// The next ids are fetched while the body works.
template <class Body>
__device__ void Choices::for_each(Body&& body) const {
  std::int64_t next = first_ids_;
#pragma unroll 1
  for (int t = begin_; t < end_; t += step_) {
    const std::int64_t id = next;
    next = id_of_step(t + step_);
    body(pick(t, id));
  }
}

// The id that this lane's choice names, where the warp looks at the tokens from `first` on; -1 if
// it has none.
__device__ inline std::int64_t Choices::id_of_step(int first) const {
  if (!has_token(first)) return -1;
  return id_at(p_.ids, std::int64_t{first} * p_.topk + lane_id());
}

// A choice is good if its id is an expert's that has a slot, and this row has not named that expert
// before. Other choices than "none" are bad, except duplicates that the group collapses, and those
// of experts without a slot.
__device__ inline Pick Choices::pick(int first, std::int64_t id) const {
  Pick c{has_token(first), false, false, false, first + of_step_, of_step_ * p_.topk, -1, -1};
  const bool inside = id >= 0 && id < p_.ids.experts;
  const unsigned named = equal_in_group(static_cast<unsigned>(id), inside, c.first_lane, p_.topk);
  c.good = inside && (named & lower_lanes()) == 0;
  const bool repeated = inside && !c.good;
  c.bad = c.active && id != -1 && !c.good && !(repeated && g_.collapse);
  if (!c.good) return c;
  const int slot = slot_of(g_.slots, p_.ids, static_cast<int>(id), c.token, g_.rank());
  c.unplaced = slot == SlotTable::kNoSlot;
  c.good = !c.unplaced;
  if (c.good) {
    c.physical_expert = p_.experts.physical_expert_of(slot);
    c.rank = p_.experts.rank_at(c.physical_expert);
  }
  return c;
}

}  // namespace xd::ep::cuda
