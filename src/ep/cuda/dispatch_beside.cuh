// The weights and choices that dispatch stores beside a token's rows. Its source calls it, and its
// gateways for the ranks of other machines.
#pragma once

#include "ep/cuda/kernels.h"
#include "ep/cuda/walk.cuh"

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

// The weights of tokens' choices, and the one of the tokens that is meant. nullptr = an operation
// without weights.
struct TokenWeights {
  const float* of_tokens;
  int token;
};

// EXPERT_MAJOR: stores one weight per row.
__device__ inline void store_weights(const Turn& turn, const Choice& c,
                                     const TokenWeights& weights) {
  if (weights.of_tokens == nullptr || !c.valid) return;
  const std::uint64_t at = static_cast<std::uint64_t>(weights.token) * turn.plan().topk + lane_id();
  reinterpret_cast<float*>(turn.peer(c.rank).weights)[c.row] = weights.of_tokens[at];
}

// RANK_MAJOR: stores, per row, local expert and weight of each k that the row's rank holds.
__device__ inline void store_choices(const DispatchParams& p, const Turn& turn, const Choice& c,
                                     const TokenWeights& weights) {
  if (weights.of_tokens == nullptr && !p.indices) return;
  const int topk = turn.plan().topk;
  const int k = lane_id();
  float weight = 0.0f;
  if (weights.of_tokens != nullptr && k < topk) {
    weight = weights.of_tokens[static_cast<std::uint64_t>(weights.token) * topk + k];
  }
  for_each_leader(c, [&](int rank, std::uint32_t row, bool here) {
    if (k >= topk) return;
    const PeerTensors& peer = turn.peer(rank);
    const std::uint64_t at = std::uint64_t{row} * topk + k;
    if (weights.of_tokens != nullptr) {
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

// All lanes call it.
__device__ inline void store_beside(const DispatchParams& p, const Turn& turn, const Choice& c,
                                    const TokenWeights& weights) {
  if (turn.group().layout.choices_beside_rows) {
    store_choices(p, turn, c, weights);
  } else {
    store_weights(turn, c, weights);
  }
}

}  // namespace xd::ep::cuda
