// Steps 4 and 5 of prepare: the plan except for its codes, the outputs, and the verdict about the
// operation.
//
//   memory                       written by                     read by
//   plan: header and zones       the last block, the "head"     later operations
//   plan: list, start, cell      all blocks                     later operations
//   outputs                      head block; rank_rows: all     the caller, later in the stream
//   Shared, TurnShared::plan     this block                     this block; its report
//   GroupState, Report: totals   the head block                 later operations; the host
//   SlotTableDevice::unplaced    all blocks, as they count      the head, behind their arrival
//   told and its host's copy     the head block                 later operations; the host
//   items, lists, listed, kept   their source                   this rank, after its done flag
//
// The last row is group memory of this rank, and trusted behind Turn::wait_all_done(). Counts,
// zones and overflows are trusted after Zones::place().
#pragma once

#include "ep/bulk/cuda/prepare/zones.cuh"

namespace xd::ep::cuda {

class PlanWriter {
 public:
  struct Shared {
    ListedWord told[kMaxDeviceRanks];  // numbers of items and rows that every source has here
    std::int32_t item_begin[kMaxDeviceRanks + 1];
    std::int32_t row_begin[kMaxDeviceRanks + 1];
    unsigned long long dropped_rows;            // EXPERT_MAJOR: this rank's
    std::uint64_t checksum[kMostPrepareWarps];  // parts of the head's, by warp
    std::uint64_t partial[kMostPrepareWarps];   // for scan_block()
  };

  __device__ PlanWriter(const PrepareParams& params, Turn& turn, TurnShared& turn_shared,
                        const Exchange& exchange, const Zones& zones, Shared& shared)
      : p_(params),
        g_(params.turn.group),
        turn_(turn),
        header_(turn_shared.plan),
        exchange_(exchange),
        zones_(zones),
        s_(shared),
        map_(params.map) {}

  // Makes sure that the plan's bytes are no plan from now on. All threads call it.
  __device__ void invalidate() const;
  // Without drops: writes all that follows from the counts alone. All threads call it, when zones
  // are placed.
  __device__ void write_early() const;
  // True if some rank's plan needs more from the sources than their counts: all ranks say the same.
  __device__ bool needs_sources() const { return g_.some_keep_items() || zones_.drops(); }
  // Writes the rest, when the items of all ranks for this one are there. All threads call it.
  __device__ void finish() const;
  // Comes to the verdict about the operation, which is the same in every block, when zones are
  // placed and this rank has sent all that others need. All threads call it; it ends with a barrier
  // of the block.
  __device__ void judge() const;
  // Tells the host of choices without a slot. All threads may call it, when all blocks have counted
  // theirs.
  __device__ void report_unplaced() const;

 private:
  template <class Word>
  __device__ Word* part(std::uint64_t offset) const {
    return reinterpret_cast<Word*>(p_.plan + offset);
  }
  __device__ int physical_here(int local_expert) const {
    return p_.experts.first(g_.rank()) + local_expert;
  }
  // An array of this rank's group memory that sources have written.
  template <class Word>
  __device__ const Word* told_here(std::uint64_t offset) const {
    return reinterpret_cast<const Word*>(turn_.area(g_.rank()).base + offset);
  }
  __device__ void derive_told() const;
  __device__ void read_told() const;
  __device__ void find_begins() const;
  __device__ void write_head() const;
  __device__ std::uint64_t pairs_of(int local_expert) const;
  __device__ void write_zones() const;
  __device__ PlanHeader make_header() const;
  __device__ void write_bounds() const;
  __device__ void write_small_parts() const;
  __device__ void seal() const;
  __device__ void report_totals() const;
  __device__ void add_loads() const;
  __device__ void copy_items() const;
  __device__ std::uint64_t rows_between(int source, int rank, int lane) const;
  __device__ void write_rank_rows() const;
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
  PlanHeader& header_;  // in shared memory, for the report
  const Exchange& exchange_;
  const Zones& zones_;
  Shared& s_;
  const PlanMap& map_;
};

__device__ inline void PlanWriter::invalidate() const {
  if (blockIdx.x != 0 || threadIdx.x >= sizeof(PlanHeader) / sizeof(std::uint64_t)) return;
  part<std::uint64_t>(0)[threadIdx.x] = 0;
}

__device__ inline void PlanWriter::write_early() const {
  if (zones_.drops()) return;
  if (g_.keeps_items) derive_told();
  if (Choices::is_head()) write_head();
}

__device__ inline void PlanWriter::finish() const {
  if (zones_.drops()) {
    if (g_.keeps_items) read_told();
    if (Choices::is_head()) write_head();
  }
  if (g_.keeps_items) {
    find_begins();
    copy_items();
  }
  write_rank_rows();
}

// Without drops, the numbers of items and rows that every source has here follow from its counts.
__device__ inline void PlanWriter::derive_told() const {
#pragma unroll 1
  for (int s = warp_in_block(); s < g_.ranks(); s += warps_per_block()) {
    std::uint32_t rows = 0;
#pragma unroll 1
    for (int e = lane_id(); e < g_.local_experts; e += 32) {
      rows += exchange_.choices(s, physical_here(e));
    }
    rows = warp_sum(rows);
    if (lane_id() == 0) s_.told[s] = {exchange_.tokens_for(s, g_.rank()), rows};
  }
}

// With drops, the source has told these numbers.
__device__ inline void PlanWriter::read_told() const {
  const int s = thread_in_block();
  if (s >= g_.ranks()) return;
  const std::uint64_t word = ptx::ld_relaxed_sys(told_here<std::uint64_t>(g_.map.listed) + s);
  s_.told[s] = {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)};
}

// Computes where every source's items and rows begin, in plans that keep them.
__device__ inline void PlanWriter::find_begins() const {
  __syncthreads();
  if (thread_in_block() == 0) {
    std::int64_t items = 0, rows = 0;
#pragma unroll 1
    for (int s = 0; s <= g_.ranks(); ++s) {
      s_.item_begin[s] = static_cast<std::int32_t>(items);
      s_.row_begin[s] = static_cast<std::int32_t>(rows);
      if (s == g_.ranks()) continue;
      items = min(items + s_.told[s].items, g_.capacity);
      rows = min(rows + s_.told[s].rows, g_.capacity);
    }
  }
  __syncthreads();
}

// ---- The head block ----------------------------------------------------------------------------

__device__ inline void PlanWriter::write_head() const {
  if (thread_in_block() == 0) s_.dropped_rows = 0;  // behind the barriers of scan_block()
  if (g_.keeps_items) find_begins();
  // Its long computation goes on beside the others of this block.
  if (thread_in_block() == threads_per_block() - 1) header_ = make_header();
  write_zones();
  write_small_parts();
  seal();
  report_totals();
  if (g_.slots != nullptr) add_loads();
}

// RANK_MAJOR: the pairs of a local expert, after drops.
__device__ inline std::uint64_t PlanWriter::pairs_of(int local_expert) const {
  if (!zones_.drops() || zones_.total(g_.rank()) <= zones_.capacity_of(g_.rank())) {
    return exchange_.expert_total(physical_here(local_expert));
  }
  const auto* kept = told_here<std::uint32_t>(g_.map.kept);
  std::uint64_t pairs = 0;
#pragma unroll 1
  for (int s = 0; s < g_.ranks(); ++s) {
    pairs +=
        ptx::ld_relaxed_sys(kept + static_cast<std::uint64_t>(s) * g_.kept_stride + local_expert);
  }
  return pairs;
}

// Writes counts and offsets of this rank's zones, in the plan and in the outputs.
__device__ inline void PlanWriter::write_zones() const {
  auto* counts = part<std::int32_t>(map_.count);
  auto* offsets = part<std::int32_t>(map_.offset);
  const std::uint64_t limit =
      g_.layout.row_per_expert ? zones_.limit_of(g_.rank()) : ~std::uint64_t{0};
  const auto rows = [&](int e) -> std::uint64_t {
    return g_.layout.row_per_expert ? exchange_.expert_total(physical_here(e)) : pairs_of(e);
  };
  const auto padded = [&](int e) { return zones_.padded(rows(e)); };
  std::uint64_t dropped = 0;  // of the experts that this thread looks at
  const auto write_zone = [&](int e, std::uint64_t zone) {
    const std::uint64_t offset = min(zone, limit);
    offsets[e] = static_cast<std::int32_t>(min(offset, std::uint64_t{INT32_MAX}));
    write_number(p_.offsets, e, static_cast<std::int64_t>(offset));
    if (e == g_.local_experts) return;
    const std::uint64_t kept = kept_rows(zone, rows(e), limit);
    counts[e] = static_cast<std::int32_t>(min(kept, std::uint64_t{INT32_MAX}));
    write_number(p_.counts, e, static_cast<std::int64_t>(kept));
    write_number(p_.padded_counts, e,
                 static_cast<std::int64_t>(min(zone + padded(e), limit) - offset));
    dropped += rows(e) - kept;
  };
  const std::uint64_t end = zones_.end_of_zones(g_.rank());
  if (zones_.drops() || end >= kRemoteRow) {
    scan_block(s_.partial, g_.local_experts, padded, write_zone);
    add_of_warp(&s_.dropped_rows, dropped);
  } else {
#pragma unroll 1
    for (int e = thread_in_block(); e <= g_.local_experts; e += threads_per_block()) {
      write_zone(e, e < g_.local_experts ? zones_.first_row(physical_here(e)) : end);
    }
  }
  if (thread_in_block() == 0) {
    write_number(p_.total, 0, static_cast<std::int64_t>(zones_.total(g_.rank())));
  }
}

__device__ inline PlanHeader PlanWriter::make_header() const {
  const std::uint64_t total = zones_.total(g_.rank());
  const std::int64_t capacity = zones_.capacity_of(g_.rank());
  const int overflow = zones_.overflow_rank();
  const bool has = overflow >= 0;
  return {.magic = PlanHeader::kMagic,
          .version = PlanHeader::kVersion | (p_.parts > 1 ? PlanHeader::kHasParts : 0),
          .rank = g_.rank(),
          .ranks = g_.ranks(),
          .experts = g_.experts,
          .tokens = p_.tokens,
          .topk = p_.topk,
          .layout = g_.layout.id,
          .alignment = p_.alignment,
          .overflow = g_.drop ? XD_EP_OVERFLOW_DROP : XD_EP_OVERFLOW_ERROR,
          .keeps_list = (g_.layout.row_per_expert ? 1 : 0) |
                        (p_.parts > 1 ? p_.parts << PlanHeader::kPartsShift : 0),
          .keeps_items = g_.keeps_items ? 1 : 0,
          .bad_id_rank = zones_.bad_id_rank(),
          .overflow_rank = overflow,
          .local_experts = g_.local_experts,
          .list_rows = g_.layout.row_per_expert ? g_.capacity : 0,
          .recv_rows = min(static_cast<std::int64_t>(total), capacity),
          .total_rows = static_cast<std::int64_t>(total),
          .bad_ids = static_cast<std::int64_t>(zones_.bad_ids()),
          .overflow_needed = has ? static_cast<std::int64_t>(zones_.total(overflow)) : 0,
          .overflow_capacity = has ? zones_.capacity_of(overflow) : 0,
          .capacities = g_.capacities_hash,
          .expert_ranks = g_.terms.expert_ranks,
          .hosts = g_.terms.hosts,
          .capacity = g_.capacity,
          .fingerprint = plan_fingerprint({.counts = exchange_.hash(),
                                           .capacities = g_.capacities_hash,
                                           .hosts = g_.terms.hosts,
                                           .topk = p_.topk,
                                           .alignment = p_.alignment,
                                           .group = g_.number,
                                           .epoch = turn_.epoch(),
                                           .parts = p_.parts}),
          .epoch = turn_.epoch(),
          .bytes = map_.end,
          .checksum = 0};
}

// Writes where each part of each rank's zones ends: the first row of the next part, after drops.
__device__ inline void PlanWriter::write_bounds() const {
  auto* bounds = part<std::int32_t>(map_.part_end);
  const int each = p_.parts - 1;
#pragma unroll 1
  for (int i = thread_in_block(); i < g_.ranks() * each; i += threads_per_block()) {
    const int d = i / each, first = p_.experts.first(d);
    const int expert =
        first + first_expert_of_part(i % each + 2, p_.parts, p_.experts.first(d + 1) - first);
    const std::uint64_t row = min(std::uint64_t{zones_.first_row(expert)}, zones_.limit_of(d));
    bounds[i] = static_cast<std::int32_t>(row);
  }
}

// Writes the parts that are not large. It ends with a barrier of the block.
__device__ inline void PlanWriter::write_small_parts() const {
  if (p_.parts > 1) write_bounds();
  if (g_.keeps_items) {
    auto* tokens = part<std::int32_t>(map_.tokens);
    auto* begin = part<std::int32_t>(map_.item_begin);
#pragma unroll 1
    for (int s = thread_in_block(); s <= g_.ranks(); s += threads_per_block()) {
      begin[s] = s_.item_begin[s];
      if (s < g_.ranks()) tokens[s] = static_cast<std::int32_t>(exchange_.tokens(s));
    }
  }
  // Zeroes the gap before the codes, so that equal plans have equal checksums.
#pragma unroll 1
  for (std::uint64_t i = map_.zones_end + threadIdx.x; i < map_.code; i += threads_per_block()) {
    p_.plan[i] = std::byte{0};
  }
  __syncthreads();
}

__device__ inline void PlanWriter::seal() const {
  constexpr std::uint64_t kHeaderWords = sizeof(PlanHeader) / sizeof(std::uint64_t);
  constexpr std::uint64_t kChecksumWord = offsetof(PlanHeader, checksum) / sizeof(std::uint64_t);
  const auto* header = reinterpret_cast<const std::uint64_t*>(&header_);
  auto* words = part<std::uint64_t>(0);
  std::uint64_t sum = 0;
#pragma unroll 1
  for (std::uint64_t i = threadIdx.x; i < map_.code / sizeof(std::uint64_t);
       i += threads_per_block()) {
    if (i < kHeaderWords) words[i] = header[i];
    if (i != kChecksumWord) sum += hash_entry(i, i < kHeaderWords ? header[i] : words[i]);
  }
  keep_sum_of_warp(s_.checksum, sum);
  __syncthreads();
  if (thread_in_block() == 0) words[kChecksumWord] = sum_over_warps(s_.checksum);
}

// Writes the group's totals, which its host reads. It writes only totals that have changed: the
// host's memory is reached over PCIe, and done flags wait for earlier stores.
__device__ inline void PlanWriter::report_totals() const {
  if (thread_in_block() != 0) return;
  const std::uint64_t total = zones_.total(g_.rank());
  const std::uint64_t capacity = zones_.capacity_of(g_.rank());
  const std::uint64_t dropped = !g_.drop                   ? 0
                                : g_.layout.row_per_expert ? s_.dropped_rows
                                : total > capacity         ? total - capacity
                                                           : 0;
  report_unplaced();
  if (zones_.bad_ids() == 0 && dropped == 0) return;
  g_.control->bad_ids += zones_.bad_ids();
  g_.control->dropped_rows += dropped;
  g_.report->total_bad_ids = g_.control->bad_ids;
  g_.report->total_dropped_rows = g_.control->dropped_rows;
}

// Also of a batch that comes to nothing. All blocks have arrived with their counts.
__device__ inline void PlanWriter::report_unplaced() const {
  if (g_.slots == nullptr || !Choices::is_head() || thread_in_block() != 0) return;
  tell_unplaced(*g_.slots);
}

// All ranks add the same numbers.
__device__ inline void PlanWriter::add_loads() const {
  const SlotTableDevice& table = *g_.slots;
  const int all = g_.ranks() * g_.experts;
#pragma unroll 1
  for (int i = thread_in_block(); i < all; i += threads_per_block()) {
    const int source = i / g_.experts, slot = i - source * g_.experts;
    const std::int32_t expert = table.experts[slot];
    const std::uint32_t choices = exchange_.choices(source, slot);
    if (expert < 0 || choices == 0) continue;
    // Nobody waits for the addition. Only the kernel that tells the loads may run beside it.
    atomicAdd(table.loads + std::int64_t{source} * table.logical_experts + expert, choices);
  }
}

// ---- All blocks --------------------------------------------------------------------------------

// Copies items and rows of all sources, one source after another.
__device__ inline void PlanWriter::copy_items() const {
  auto* list = part<std::uint32_t>(map_.list);
  auto* start = part<std::uint32_t>(map_.start);
  auto* cell = part<std::uint32_t>(map_.cell);
  const auto* items = told_here<std::uint64_t>(g_.map.items);
  const auto* lists = told_here<std::uint32_t>(g_.map.lists);
  const int first = static_cast<int>(blockIdx.x) * threads_per_block() + thread_in_block();
  const int stride = static_cast<int>(gridDim.x) * threads_per_block();
#pragma unroll 1
  for (int s = 0; s < g_.ranks(); ++s) {
    const int count = min(s_.item_begin[s + 1] - s_.item_begin[s], g_.max_tokens);
#pragma unroll 1
    for (int i = first; i < count; i += stride) {
      const std::uint64_t word =
          ptx::ld_relaxed_sys(items + static_cast<std::uint64_t>(s) * g_.max_tokens + i);
      cell[s_.item_begin[s] + i] = static_cast<std::uint32_t>(word >> 32);
      if (g_.layout.row_per_expert) {
        start[s_.item_begin[s] + i] = s_.row_begin[s] + static_cast<std::uint32_t>(word);
      }
    }
    if (!g_.layout.row_per_expert) continue;
    const int rows = s_.row_begin[s + 1] - s_.row_begin[s];
#pragma unroll 1
    for (int i = first; i < rows; i += stride) {
      list[s_.row_begin[s] + i] = ptx::ld_relaxed_sys(lists + s * g_.lists_stride + 1 + i);
    }
  }
  if (g_.layout.row_per_expert && first == 0) {
    start[s_.item_begin[g_.ranks()]] = static_cast<std::uint32_t>(s_.row_begin[g_.ranks()]);
  }
}

// This lane's part of the sum of rows that `source` puts into `rank`'s receive tensor.
__device__ inline std::uint64_t PlanWriter::rows_between(int source, int rank, int lane) const {
  const std::uint64_t limit = zones_.limit_of(rank);
  if (!g_.layout.row_per_expert) {
    if (lane != 0) return 0;
    return kept_rows(exchange_.tokens_before(source, rank), exchange_.tokens_for(source, rank),
                     limit);
  }
  std::uint64_t rows = 0;
  const int end = p_.experts.first(rank + 1);
#pragma unroll 1
  for (int physical_expert = p_.experts.first(rank) + lane; physical_expert < end;
       physical_expert += 32) {
    std::uint64_t first = zones_.first_row(physical_expert);
#pragma unroll 1
    for (int s = 0; s < source; ++s) first += exchange_.choices(s, physical_expert);
    rows += kept_rows(first, exchange_.choices(source, physical_expert), limit);
  }
  return rows;
}

// Writes rank_rows, with a warp per number.
__device__ inline void PlanWriter::write_rank_rows() const {
  if (p_.rank_rows.data == nullptr) return;
  const int warps = static_cast<int>(gridDim.x) * warps_per_block();
  const int ranks = g_.ranks();
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) * warps_per_block() + warp_in_block();
       i < ranks * ranks; i += warps) {
    const std::uint64_t rows = warp_sum(rows_between(i / ranks, i % ranks, lane_id()));
    if (lane_id() == 0) write_number(p_.rank_rows, i, static_cast<std::int64_t>(rows));
  }
}

__device__ inline void PlanWriter::judge() const {
  if (thread_in_block() == 0) {
    header_.bad_ids = static_cast<std::int64_t>(zones_.bad_ids());
    header_.bad_id_rank = zones_.bad_id_rank();
    header_.overflow_rank = zones_.overflow_rank();
    if (header_.overflow_rank >= 0) {
      header_.overflow_needed = static_cast<std::int64_t>(zones_.total(header_.overflow_rank));
      header_.overflow_capacity = zones_.capacity_of(header_.overflow_rank);
    }
    if (header_.overflow_rank >= 0 && !g_.drop) {
      turn_.set_operation_error(XD_ERROR_OVERFLOW);
    } else if (header_.bad_ids > 0) {
      turn_.set_operation_error(XD_ERROR_INVALID_ARGUMENT);
    }
  }
  __syncthreads();
}

}  // namespace xd::ep::cuda
