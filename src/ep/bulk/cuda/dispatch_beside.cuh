// The weights and choices that dispatch stores beside a token's rows. Its source calls it, and its
// relays for the ranks of other machines.
#pragma once

#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/walk.cuh"

namespace xd::ep::cuda {

// Calls body(rank, row, whether this lane's choice is at that rank) for every rank of the token.
template <class Body>
__device__ void for_each_leader(const Choice& c, Body&& body) {
  unsigned leaders = __ballot_sync(kAllLanes, c.leader);
#pragma unroll 1
  while (leaders != 0) {
    const int lane = __ffs(static_cast<int>(leaders)) - 1;
    leaders &= leaders - 1;
    const int rank = __shfl_sync(kAllLanes, c.rank, lane);
    const std::uint32_t row = __shfl_sync(kAllLanes, c.row, lane);
    body(rank, row, c.valid && c.rank == rank);
  }
}

// EXPERT_MAJOR: stores one weight per row.
template <class Weights>
__device__ void store_weights(const DispatchParams& p, const Turn& turn, const Choice& c,
                              Weights&& weights, int token) {
  if (!p.weighs || !c.valid) return;
  const std::uint64_t at = static_cast<std::uint64_t>(token) * turn.plan().topk + lane_id();
  reinterpret_cast<float*>(turn.peer(c.rank).weights)[c.row] = weights()[at];
}

// RANK_MAJOR: stores, per row, local expert and weight of each k that the row's rank holds.
template <class Weights>
__device__ void store_choices(const DispatchParams& p, const Turn& turn, const Choice& c,
                              Weights&& weights, int token) {
  if (!p.weighs && !p.indices) return;
  const int topk = turn.plan().topk;
  const int k = lane_id();
  float weight = 0.0f;
  if (p.weighs && k < topk) {
    weight = weights()[static_cast<std::uint64_t>(token) * topk + k];
  }
  for_each_leader(c, [&](int rank, std::uint32_t row, bool here) {
    if (k >= topk) return;
    const PeerTensors& peer = turn.peer(rank);
    const std::uint64_t at = std::uint64_t{row} * topk + k;
    if (p.weighs) {
      reinterpret_cast<float*>(peer.weights)[at] = here ? weight : 0.0f;
    }
    if (!p.indices) return;
    const int expert = here ? c.expert : -1;
    if (peer.wide_indices) {
      reinterpret_cast<std::int64_t*>(peer.extra)[at] = expert;
    } else {
      reinterpret_cast<std::int32_t*>(peer.extra)[at] = expert;
    }
  });
}

// `weights()`: those of tokens' choices, if the operation has some; `token` is the one of these
// tokens that is meant. All lanes call it.
template <class Weights>
__device__ void store_beside(const DispatchParams& p, const Turn& turn, const Choice& c,
                             Weights&& weights, int token) {
  if (turn.group().layout.choices_beside_rows) {
    store_choices(p, turn, c, weights, token);
  } else {
    store_weights(p, turn, c, weights, token);
  }
}

}  // namespace xd::ep::cuda
