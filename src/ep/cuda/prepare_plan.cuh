// Step 5 of prepare: the plan and the outputs. Included by prepare_parts.cuh.
#pragma once

namespace xd::ep::cuda {

// Every block: what all ranks have told this one is there. False = fatal.
__device__ inline bool Prepare::wait_for_sources() {
  bool good = true;
  std::uint64_t flag = 0;  // no tensors: nothing is ever missing
  for (int s = thread(); s < g_.ranks() && good; s += threads()) good = turn_.wait_done(s, flag);
  return good;
}

// With drops: how many items and rows every source has here, as it has told.
__device__ inline void Prepare::read_told() {
  const int s = thread();
  if (g_.keeps_items && s < g_.ranks()) {
    const std::uint64_t told = ptx::ld_relaxed_sys(turn_.words(g_.rank(), g_.listed) + s);
    s_.told[s] = {static_cast<std::uint32_t>(told), static_cast<std::uint32_t>(told >> 32)};
  }
  __syncthreads();
}

__device__ inline void Prepare::find_begins() {
  __syncthreads();
  if (thread() == 0) {
    std::int64_t items = 0, rows = 0;
    for (int s = 0; s <= g_.ranks(); ++s) {
      s_.item_begin[s] = static_cast<std::int32_t>(items);
      s_.row_begin[s] = static_cast<std::int32_t>(rows);
      if (s == g_.ranks() || !g_.keeps_items) continue;
      items = min(items + s_.told[s].items, g_.capacity);
      rows = min(rows + s_.told[s].rows, g_.capacity);
    }
  }
  __syncthreads();
}

// The head block.
__device__ inline void Prepare::write_head() {
  if (!writes_head()) return;
  find_begins();
  write_zones();
  write_header();
  seal();
  report_totals();
}

// All blocks, when the sources are done.
__device__ inline void Prepare::finish_plan() {
  if (!head_can_be_early()) {
    read_told();
    write_head();
  }
  find_begins();
  if (g_.keeps_items) copy_items();
  write_rank_rows();
  judge();
}

// What becomes of the operation; every block says the same.
__device__ inline void Prepare::judge() {
  __syncthreads();
  if (thread() == 0) {
    PlanHeader& h = shared_.plan;  // what a report says
    h.bad_ids = static_cast<std::int64_t>(s_.bad_ids);
    h.bad_id_rank = s_.bad_id_rank == INT32_MAX ? -1 : s_.bad_id_rank;
    h.overflow_rank = s_.overflow_rank == INT32_MAX ? -1 : s_.overflow_rank;
    if (h.overflow_rank >= 0) {
      h.overflow_needed = static_cast<std::int64_t>(s_.total[h.overflow_rank]);
      h.overflow_capacity = capacity_of(h.overflow_rank);
    }
    if (h.overflow_rank >= 0 && !g_.drop) {
      turn_.set_setback(XD_ERROR_OVERFLOW);
    } else if (h.bad_ids > 0) {
      turn_.set_setback(XD_ERROR_INVALID_ARGUMENT);
    }
  }
  __syncthreads();
}

// All blocks: items and rows of all sources, one source after another.
__device__ inline void Prepare::copy_items() const {
  const PlanMap map = plan_map();
  auto* list = reinterpret_cast<std::uint32_t*>(plan_part(map.list));
  auto* start = reinterpret_cast<std::uint32_t*>(plan_part(map.start));
  auto* slot = reinterpret_cast<std::uint32_t*>(plan_part(map.slot));
  const auto* items = turn_.words(g_.rank(), g_.items);
  const auto* lists = reinterpret_cast<const std::uint32_t*>(g_.area[g_.rank()] + g_.lists);
  const int first = static_cast<int>(blockIdx.x) * threads() + thread();
  const int stride = static_cast<int>(gridDim.x) * threads();
  for (int s = 0; s < g_.ranks(); ++s) {
    const int count = min(s_.item_begin[s + 1] - s_.item_begin[s], g_.max_tokens);
    for (int i = first; i < count; i += stride) {
      const std::uint64_t word =
          ptx::ld_relaxed_sys(items + static_cast<std::uint64_t>(s) * g_.max_tokens + i);
      slot[s_.item_begin[s] + i] = static_cast<std::uint32_t>(word >> 32);
      if (g_.expert_major) {
        start[s_.item_begin[s] + i] = s_.row_begin[s] + static_cast<std::uint32_t>(word);
      }
    }
    if (!g_.expert_major) continue;
    const int rows = s_.row_begin[s + 1] - s_.row_begin[s];
    for (int i = first; i < rows; i += stride) {
      list[s_.row_begin[s] + i] = ptx::ld_relaxed_sys(lists + s * g_.lists_stride + 1 + i);
    }
  }
  if (g_.expert_major && first == 0) {
    start[s_.item_begin[g_.ranks()]] = static_cast<std::uint32_t>(s_.row_begin[g_.ranks()]);
  }
}

// RANK_MAJOR: pairs of a local expert, after drops.
__device__ inline std::uint64_t Prepare::pairs_of(int local_expert) const {
  const int expert = g_.rank() * g_.local_experts + local_expert;
  if (s_.recount == 0 || s_.total[g_.rank()] <= capacity_of(g_.rank())) {
    return p_.scratch[scratch_.expert_total + expert];
  }
  const auto* kept = reinterpret_cast<const std::uint32_t*>(g_.area[g_.rank()] + g_.kept);
  std::uint64_t pairs = 0;
  for (int s = 0; s < g_.ranks(); ++s) {
    pairs +=
        ptx::ld_relaxed_sys(kept + static_cast<std::uint64_t>(s) * g_.local_experts + local_expert);
  }
  return pairs;
}

// The head block: counts and offsets of this rank's zones, in the plan and in the outputs.
__device__ inline void Prepare::write_zones() {
  const PlanMap map = plan_map();
  auto* counts = reinterpret_cast<std::int32_t*>(plan_part(map.count));
  auto* offsets = reinterpret_cast<std::int32_t*>(plan_part(map.offset));
  const auto alignment = static_cast<std::uint64_t>(p_.alignment);
  const std::uint64_t limit = g_.expert_major ? limit_of(g_.rank()) : ~std::uint64_t{0};
  const std::uint32_t* totals = p_.scratch + scratch_.expert_total + g_.rank() * g_.local_experts;
  const auto rows = [&](int e) -> std::uint64_t {
    return g_.expert_major ? totals[e] : pairs_of(e);
  };
  const auto padded = [&](int e) { return (rows(e) + alignment - 1) / alignment * alignment; };
  scan(g_.local_experts, padded, [&](int e, std::uint64_t zone) {
    const std::uint64_t offset = min(zone, limit);
    offsets[e] = static_cast<std::int32_t>(min(offset, std::uint64_t{INT32_MAX}));
    write_number(p_.offsets, e, static_cast<std::int64_t>(offset));
    if (e == g_.local_experts) return;
    const std::uint64_t kept = kept_rows(zone, rows(e), limit);
    counts[e] = static_cast<std::int32_t>(min(kept, std::uint64_t{INT32_MAX}));
    write_number(p_.counts, e, static_cast<std::int64_t>(kept));
    write_number(p_.padded_counts, e,
                 static_cast<std::int64_t>(min(zone + padded(e), limit) - offset));
    atomicAdd(&s_.dropped_rows, static_cast<unsigned long long>(rows(e) - kept));
  });
  if (thread() == 0) {
    write_number(p_.total, 0, static_cast<std::int64_t>(s_.total[g_.rank()]));
  }
}

// The head block: the header, and the parts that are not large.
__device__ inline void Prepare::write_header() {
  const PlanMap map = plan_map();
  if (g_.keeps_items) {
    auto* tokens = reinterpret_cast<std::int32_t*>(plan_part(map.tokens));
    auto* begin = reinterpret_cast<std::int32_t*>(plan_part(map.item_begin));
    for (int s = thread(); s <= g_.ranks(); s += threads()) {
      begin[s] = s_.item_begin[s];
      if (s < g_.ranks()) tokens[s] = static_cast<std::int32_t>(said(s, layout_.tokens()));
    }
  }
  // The gap before the codes, so that equal plans have equal checksums.
  for (std::uint64_t i = map.zones_end + threadIdx.x; i < map.code; i += threads()) {
    p_.plan[i] = std::byte{0};
  }
  if (thread() == 0) {
    const std::uint64_t total = s_.total[g_.rank()];
    const int overflow = s_.overflow_rank == INT32_MAX ? -1 : s_.overflow_rank;
    const bool has = overflow >= 0;
    shared_.plan = {
        .magic = PlanHeader::kMagic,
        .version = PlanHeader::kVersion,
        .rank = g_.rank(),
        .ranks = g_.ranks(),
        .experts = g_.experts,
        .tokens = p_.tokens,
        .topk = p_.topk,
        .layout = g_.expert_major ? XD_EP_EXPERT_MAJOR : XD_EP_RANK_MAJOR,
        .alignment = p_.alignment,
        .overflow = g_.drop ? XD_EP_OVERFLOW_DROP : XD_EP_OVERFLOW_ERROR,
        .keeps_list = g_.expert_major ? 1 : 0,
        .keeps_items = g_.keeps_items ? 1 : 0,
        .bad_id_rank = s_.bad_id_rank == INT32_MAX ? -1 : s_.bad_id_rank,
        .overflow_rank = overflow,
        .reserved = 0,
        .list_rows = g_.expert_major ? g_.capacity : 0,
        .recv_rows = static_cast<std::int64_t>(min(total, std::uint64_t{capacity_of(g_.rank())})),
        .total_rows = static_cast<std::int64_t>(total),
        .bad_ids = static_cast<std::int64_t>(s_.bad_ids),
        .overflow_needed = has ? static_cast<std::int64_t>(s_.total[overflow]) : 0,
        .overflow_capacity = has ? capacity_of(overflow) : 0,
        .capacities = g_.capacities_hash,
        .capacity = g_.capacity,
        .fingerprint = plan_fingerprint({.counts = g_.control->counts_hash,
                                         .capacities = g_.capacities_hash,
                                         .topk = p_.topk,
                                         .alignment = p_.alignment,
                                         .group = g_.number,
                                         .epoch = turn_.epoch()}),
        .epoch = turn_.epoch(),
        .bytes = map.end,
        .checksum = 0};
  }
  __syncthreads();
}

// The head block.
__device__ inline void Prepare::seal() {
  constexpr std::uint64_t kHeaderWords = sizeof(PlanHeader) / sizeof(std::uint64_t);
  constexpr std::uint64_t kChecksumWord = offsetof(PlanHeader, checksum) / sizeof(std::uint64_t);
  const auto* header = reinterpret_cast<const std::uint64_t*>(&shared_.plan);
  auto* words = reinterpret_cast<std::uint64_t*>(p_.plan);
  std::uint64_t sum = 0;
  for (std::uint64_t i = threadIdx.x; i < plan_map().code / sizeof(std::uint64_t); i += threads()) {
    if (i < kHeaderWords) words[i] = header[i];
    if (i != kChecksumWord) sum += hash_entry(i, i < kHeaderWords ? header[i] : words[i]);
  }
  atomicAdd(&s_.checksum, static_cast<unsigned long long>(sum));
  __syncthreads();
  if (thread() == 0) words[kChecksumWord] = s_.checksum;
}

// Rows that `source` puts into `rank`'s receive tensor: this lane's part of them.
__device__ inline std::uint64_t Prepare::rows_between(int source, int rank, int lane) const {
  const std::uint64_t limit = limit_of(rank);
  if (!g_.expert_major) {
    if (lane != 0) return 0;
    std::uint64_t first = 0;
    for (int s = 0; s < source; ++s) first += said(s, layout_.rank(rank));
    return kept_rows(first, said(source, layout_.rank(rank)), limit);
  }
  std::uint64_t rows = 0;
  for (int i = lane; i < g_.local_experts; i += 32) {
    const int e = rank * g_.local_experts + i;
    std::uint64_t first = zone_[e];
    for (int s = 0; s < source; ++s) first += said(s, layout_.expert(e));
    rows += kept_rows(first, said(source, layout_.expert(e)), limit);
  }
  return rows;
}

// All blocks: a warp per number.
__device__ inline void Prepare::write_rank_rows() const {
  if (p_.rank_rows.data == nullptr) return;
  const int warps = static_cast<int>(gridDim.x) * warps_per_block();
  const int ranks = g_.ranks();
  for (int i = static_cast<int>(blockIdx.x) * warps_per_block() + warp_in_block();
       i < ranks * ranks; i += warps) {
    std::uint64_t rows = rows_between(i / ranks, i % ranks, lane_id());
    for (int step = 16; step > 0; step /= 2) rows += __shfl_xor_sync(kAllLanes, rows, step);
    if (lane_id() == 0) write_number(p_.rank_rows, i, static_cast<std::int64_t>(rows));
  }
}

// The head block: the group's totals, which its host reads. Only what has changed: its memory is
// far, and done flags wait for what has been stored.
__device__ inline void Prepare::report_totals() const {
  if (thread() != 0) return;
  const std::uint64_t total = s_.total[g_.rank()];
  const std::uint64_t capacity = capacity_of(g_.rank());
  const std::uint64_t dropped = !g_.drop           ? 0
                                : g_.expert_major  ? s_.dropped_rows
                                : total > capacity ? total - capacity
                                                   : 0;
  if (s_.bad_ids == 0 && dropped == 0) return;
  g_.control->bad_ids += s_.bad_ids;
  g_.control->dropped_rows += dropped;
  g_.report->total_bad_ids = g_.control->bad_ids;
  g_.report->total_dropped_rows = g_.control->dropped_rows;
}

}  // namespace xd::ep::cuda
