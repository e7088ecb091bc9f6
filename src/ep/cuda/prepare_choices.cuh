// The choices of this rank's tokens, as prepare's warps walk them: in step 1 to count them, in step
// 4 to number them. Both walks are this one, so a warp meets the same tokens in both.
//
//   memory     written by                      read by
//   topk_idx   the caller, before the launch   the warp whose tokens they are
//   ExpertMap  the group's host, when made     all warps, where the caller said who holds which
//
// It looks at no flag.
#pragma once

#include "ep/cuda/kernels.h"
#include "ep/cuda/warp.cuh"

namespace xd::ep::cuda {

// One choice. The lanes of a warp have choices (token, k) in order.
struct Pick {
  bool active;  // the lane has a choice
  bool good, bad;
  int token;       // token of this rank
  int first_lane;  // the token's first lane
  int seat, rank;  // the expert's seat (ExpertMap) and its rank; valid for good choices
};

class Choices {
 public:
  __device__ explicit Choices(const PrepareParams& params) : p_(params), g_(params.turn.group) {}

  // The blocks that have tokens. The last block has none, if there is another: it writes the plan's
  // head meanwhile.
  __device__ static int blocks() { return gridDim.x > 1 ? static_cast<int>(gridDim.x) - 1 : 1; }

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
  __device__ std::int64_t id_at(std::int64_t token, std::int64_t end) const;
  __device__ Pick pick(std::int64_t token, bool active, std::int64_t id) const;

  const PrepareParams& p_;
  const GroupDevice& g_;
};

// The next ids are fetched while the body works.
template <class Body>
__device__ void Choices::for_each(Body&& body) const {
  const int warps = blocks() * warps_per_block();
  const int each = (p_.tokens + warps - 1) / warps;
  const int warp = static_cast<int>(blockIdx.x) * warps_per_block() + warp_in_block();
  if (warp >= warps) return;
  const std::int64_t begin = std::int64_t{warp} * each;
  const std::int64_t end = min(begin + each, std::int64_t{p_.tokens});
  const int step = 32 / p_.topk;
  const int of_step = lane_id() / p_.topk;
  std::int64_t next = of_step < step ? id_at(begin + of_step, end) : -1;
#pragma unroll 1
  for (std::int64_t t = begin; t < end; t += step) {
    const std::int64_t id = next;
    if (of_step < step) next = id_at(t + step + of_step, end);
    body(pick(t + of_step, of_step < step && t + of_step < end, id));
  }
}

// The id that this lane's choice of a token names; -1 from `end` on.
__device__ inline std::int64_t Choices::id_at(std::int64_t token, std::int64_t end) const {
  if (token >= end) return -1;
  const std::int64_t at = token * p_.topk + lane_id() % p_.topk;
  return p_.wide_ids ? static_cast<const std::int64_t*>(p_.topk_idx)[at]
                     : static_cast<const std::int32_t*>(p_.topk_idx)[at];
}

// A choice is good if its id is an expert's and this row has not named that expert before. Other
// choices than "none" are bad, except duplicates that the group collapses.
__device__ inline Pick Choices::pick(std::int64_t token, bool active, std::int64_t id) const {
  const int of_step = lane_id() / p_.topk;
  Pick c{active, false, false, static_cast<int>(token), of_step * p_.topk, -1, -1};
  const bool inside = id >= 0 && id < g_.experts;
  const unsigned named = equal_in_group(static_cast<unsigned>(id), inside, c.first_lane, p_.topk);
  c.good = inside && (named & lower_lanes()) == 0;
  const bool repeated = inside && !c.good;
  c.bad = active && id != -1 && !c.good && !(repeated && g_.collapse);
  if (c.good) {
    c.seat = p_.experts.seat_of(static_cast<int>(id));
    c.rank = p_.experts.rank_at(c.seat);
  }
  return c;
}

}  // namespace xd::ep::cuda
