// Step 4 of prepare: every choice gets its row, every owner is told its items. Included by
// prepare_parts.cuh.
#pragma once

namespace xd::ep::cuda {

// Numbers for the active lanes of each column, in lane order; the warp's counters move on. All
// lanes.
__device__ inline std::uint32_t Prepare::take(bool active, int column) const {
  const unsigned key = active ? static_cast<unsigned>(column) : 0x80000000u | lane_id();
  const unsigned same = __match_any_sync(kAllLanes, key);
  const unsigned before = same & ((1u << lane_id()) - 1);
  std::uint32_t number = 0;
  if (active) number = mine()[column] + __popc(before);
  __syncwarp();
  if (active && before == 0)
    mine()[column] = saturate(std::uint64_t{mine()[column]} + __popc(same));
  __syncwarp();
  return number;
}

// The choice's row, its code in the plan, and whether it is the token's first that is kept there.
__device__ inline Prepare::Place Prepare::place_choice(const Pick& c) const {
  Place place{false, false, 0};
  const unsigned at_rank =
      c.good ? static_cast<unsigned>(c.first_lane) << 16 | c.rank : 0x80000000u | lane_id();
  if (g_.expert_major) {
    place.row = take(c.good, c.id);
  } else {
    const unsigned same = __match_any_sync(kAllLanes, at_rank);
    const bool first = c.good && (same & ((1u << lane_id()) - 1)) == 0;
    place.row = take(first, column_of_tokens(c.good ? c.rank : 0));
    place.row = __shfl_sync(kAllLanes, place.row, __ffs(static_cast<int>(same)) - 1);
  }
  place.kept = c.good && place.row < capacity_of(c.rank);
  const unsigned key = place.kept ? at_rank : 0x80000000u | lane_id();
  const unsigned kept = __match_any_sync(kAllLanes, key);
  place.leader = place.kept && (kept & ((1u << lane_id()) - 1)) == 0;
  return place;
}

// Of the ranks that hold rows of this lane's token, how many are lower than its own. All lanes.
__device__ inline int Prepare::lower_ranks(const Pick& c, const Place& place) const {
  const int leading = place.leader ? c.rank : INT32_MAX;
  int lower = 0;
  for (int k = 0; k < p_.topk; ++k) {
    const int lane = min(c.first_lane + k, 31);
    lower += __shfl_sync(kAllLanes, leading, lane) < c.rank ? 1 : 0;
  }
  return lower;
}

// This step's items and rows, into the memory of their owners. Covered by the done flag.
__device__ inline void Prepare::tell_owner(const Pick& c, const Place& place) const {
  const int rank = place.kept ? c.rank : 0;
  const int order = lower_ranks(c, place);
  std::uint32_t item = 0, entry = 0;
  if (g_.expert_major) {
    item = take(place.leader, column_of_tokens(rank));
    entry = take(place.kept, column_of_rows(rank));
  } else if (place.leader) {
    item = place.row;
    for (int s = 0; s < g_.rank(); ++s) item -= said(s, layout_.rank(rank));
  }
  if (!place.kept || !keeps_items(rank)) return;
  if (g_.expert_major) {
    auto* list = reinterpret_cast<std::uint32_t*>(g_.area[rank] + g_.lists);
    list[g_.rank() * g_.lists_stride + 1 + entry] = place.row;
  }
  if (!place.leader) return;
  const ItemWord word{entry,
                      static_cast<std::uint32_t>(c.token * g_.slots_per_token(p_.topk) + order)};
  auto* items = reinterpret_cast<std::uint64_t*>(g_.area[rank] + g_.items);
  items[static_cast<std::uint64_t>(g_.rank()) * g_.max_tokens + item] =
      std::uint64_t{word.slot} << 32 | word.start;
}

// DROP with an overflow: what survives, per rank (EXPERT_MAJOR) or per expert (RANK_MAJOR).
__device__ inline void Prepare::keep_count(const Pick& c, const Place& place) const {
  if (g_.expert_major) {
    if (place.leader) atomicAdd(&mine()[column_of_tokens(c.rank)], 1u);
    if (place.kept) atomicAdd(&mine()[column_of_rows(c.rank)], 1u);
  } else if (place.kept) {
    atomicAdd(&p_.scratch[scratch_.kept + c.id], 1u);
  }
}

__device__ inline bool Prepare::number_rows() {
  const bool again = s_.recount != 0 && g_.expert_major;
  if (again) {
    for (int i = g_.experts + lane_id(); i < columns_; i += 32) mine()[i] = 0;
    __syncwarp();
  }
  std::uint32_t* code = codes();
  for_each_step([&](const Pick& c) {
    const Place place = place_choice(c);
    const int k = lane_id() - c.first_lane;
    if (c.active) {
      const std::uint32_t global = shared_.base[place.kept ? c.rank : 0] + place.row;
      code[static_cast<std::uint64_t>(c.token) * p_.topk + k] =
          !place.kept       ? RowCodec::kNone
          : g_.expert_major ? global
                            : global * g_.codec_experts + c.id % g_.local_experts;
    }
    if (s_.recount != 0) keep_count(c, place);
    if (!again) tell_owner(c, place);
  });
  if (s_.recount != 0 && !recount()) return false;
  tell_lengths();
  return true;
}

// False = fatal.
__device__ inline bool Prepare::recount() {
  if (g_.expert_major) sum_block(false);
  if (!turn_.barrier(3)) return false;
  if (!g_.expert_major) {
    send_kept();
    return true;
  }
  for (int c = g_.experts + thread(); c < columns_; c += threads()) {
    std::uint64_t next = 0;
    for (int b = 0; b < static_cast<int>(blockIdx.x); ++b) next += block_counts(b)[c];
    for (int w = 0; w < warps_per_block(); ++w) {
      const std::uint32_t count = counter(w)[c];
      counter(w)[c] = saturate(next);
      next += count;
    }
  }
  __syncthreads();
  tell_again();
  return true;
}

// The lists, from the codes that the warp has written.
__device__ inline void Prepare::tell_again() const {
  const std::uint32_t* code = codes();
  for_each_step([&](const Pick& c) {
    Place place{false, false, 0};
    if (c.good) {
      const int k = lane_id() - c.first_lane;
      const std::uint32_t global = code[static_cast<std::uint64_t>(c.token) * p_.topk + k];
      place.kept = global != RowCodec::kNone;
      if (place.kept) place.row = global - shared_.base[c.rank];
    }
    const unsigned key =
        place.kept ? static_cast<unsigned>(c.first_lane) << 16 | c.rank : 0x80000000u | lane_id();
    const unsigned kept = __match_any_sync(kAllLanes, key);
    place.leader = place.kept && (kept & ((1u << lane_id()) - 1)) == 0;
    tell_owner(c, place);
  });
}

// How much every owner has been told. Block 0.
__device__ inline void Prepare::tell_lengths() const {
  const int d = thread();
  if (blockIdx.x != 0 || d >= g_.ranks()) return;
  ListedWord told{0, 0};
  const int last = counting_blocks() - 1;
  if (!g_.expert_major) {
    std::uint64_t before = 0;
    for (int s = 0; s < g_.rank(); ++s) before += said(s, layout_.rank(d));
    const std::uint64_t kept = kept_rows(before, said(g_.rank(), layout_.rank(d)), capacity_of(d));
    told = {static_cast<std::uint32_t>(kept), static_cast<std::uint32_t>(kept)};
  } else if (s_.recount != 0) {
    for (int b = 0; b <= last; ++b) {
      told.items += block_counts(b)[column_of_tokens(d)];
      told.rows += block_counts(b)[column_of_rows(d)];
    }
  } else {
    told.items = block_base(last)[column_of_tokens(d)] + block_counts(last)[column_of_tokens(d)];
    told.rows = block_base(last)[column_of_rows(d)] + block_counts(last)[column_of_rows(d)];
  }
  auto* to = reinterpret_cast<std::uint64_t*>(g_.area[d] + g_.listed);
  to[g_.rank()] = std::uint64_t{told.rows} << 32 | told.items;
}

// RANK_MAJOR: into each rank that overflows, this rank's surviving choices of its experts. Block 0.
__device__ inline void Prepare::send_kept() const {
  if (blockIdx.x != 0) return;
  for (int e = thread(); e < g_.experts; e += threads()) {
    const int d = e / g_.local_experts;
    if (s_.total[d] <= capacity_of(d)) continue;
    auto* to = reinterpret_cast<std::uint32_t*>(g_.area[d] + g_.kept);
    to[static_cast<std::uint64_t>(g_.rank()) * g_.local_experts + e % g_.local_experts] =
        p_.scratch[scratch_.kept + e];
  }
}

}  // namespace xd::ep::cuda
