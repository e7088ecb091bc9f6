// The plan: routing of one batch as plain bytes.
//
//   PlanHeader   sizes, results and a checksum over header and zones
//   count[L]     int32: rows per local expert in this rank's receive tensor, without padding, after
//                drops (RANK_MAJOR: pairs)
//   offset[L+1]  int32: first row of each zone, and the end of the last, after drops
//   code[T][K]   uint32: where the row of (token, k) lies, see RowCodec
//   list[]       uint32, EXPERT_MAJOR with staging: the rows received here, by source rank, token
//                and k. A token's first row here has kFirstOfToken set: the others hold the same
//
// Plans of executors that keep items have room for R rows and items, whatever the batch, so that
// every part has its place before the counts are known. An item is a (source rank, token) with rows
// here; items are ordered by source rank and token.
//   tokens[W]       int32: tokens of every rank (after offset[])
//   item_begin[W+1] int32: first item of every source rank, and the end of the last
// Plans with parts:
//   part_end[W][P-1] int32: first row behind each part in each rank's receive tensor, after drops
//                    (behind item_begin[])
// Again of plans with items:
//   start[R+1]      uint32, EXPERT_MAJOR: where an item's rows begin in list[] (no kFirstOfToken)
//   cell[R]         uint32: token * min(K, W) + i at the source rank, if this rank is the i-th, by
//                   ascending rank, of those that hold rows of the token
//
// A plan is bound to its rank, to the sizes and expert map of its group and to the hosts of its
// ranks, and to nothing else: it holds no pointer and no identity of the group. Tokens, top-k and
// alignment are its own, up to the group's bounds. A checksum covers header and zones; codes are
// bounds-checked when they are used.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/hash.h"
#include "base/layout.h"
#include "base/rank_bits.h"
#include "ep/plan/config.h"
#include "ep/plan/parts.h"

namespace xd::ep {

struct PlanHeader {
  static constexpr std::uint64_t kMagic = 0x314E4C5044585858;  // "XXXDPLN1"
  // Raised whenever a plan's bytes change; the fields up to this one never do. 2: `hosts`; 3: plans
  // of low latency have no tokens of other ranks.
  static constexpr std::uint32_t kVersion = 3;
  static constexpr std::uint32_t kHasParts = 1 << 16;  // set in `version` of plans with parts
  static constexpr int kPartsShift = 8;
  static constexpr std::uint32_t kFirstOfToken = 0x80000000;

  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t ranks;
  std::int32_t experts;
  std::int32_t tokens;
  std::int32_t topk;
  std::int32_t layout;  // an xd_ep_layout or ll_layout()
  std::int32_t alignment;
  std::int32_t overflow;    // an xd_ep_overflow
  std::int32_t keeps_list;  // 1 = has a list; with parts: plus P << kPartsShift
  std::int32_t
      keeps_items;  // has room for items: 1; in low latency, for items of that many choices
  std::int32_t bad_id_rank;
  std::int32_t overflow_rank;
  std::int32_t local_experts;      // L of this rank
  std::int64_t list_rows;          // room of the list
  std::int64_t recv_rows;          // min(total_rows, capacity_of())
  std::int64_t total_rows;         // before any drop
  std::int64_t bad_ids;            // over all ranks
  std::int64_t overflow_needed;    // on overflow_rank
  std::int64_t overflow_capacity;  // on overflow_rank
  std::uint64_t capacities;        // hash of all ranks' capacities
  std::uint64_t expert_ranks;      // hash of the expert map
  std::uint64_t hosts;             // HostMap::fingerprint(): sums are made by host
  std::int64_t capacity;           // this rank's, as configured: room of the parts below
  std::uint64_t fingerprint;
  std::uint64_t epoch;
  std::uint64_t bytes;     // bytes of the whole plan
  std::uint64_t checksum;  // checksum of all fields before it, and of the zones
};
static_assert(sizeof(PlanHeader) == 176);

struct PlanMap {
  std::uint64_t count, offset, tokens, item_begin, part_end, zones_end, code, list, start, cell,
      list_end, end;

  struct Sizes {
    int local_experts = 1, tokens = 0, topk = 1;
    std::int64_t list_rows = 0;  // 0 = no list
    std::int64_t items = 0;      // room; 0 = the executor keeps none
    int ranks = 1;
    int parts = 1;
  };
  static constexpr PlanMap make(const Sizes& sizes) {
    const auto local_experts = sizes.local_experts;
    const std::uint64_t ranks = sizes.items > 0 ? static_cast<std::uint64_t>(sizes.ranks) : 0;
    const auto items = static_cast<std::uint64_t>(sizes.items);
    const auto list_rows = static_cast<std::uint64_t>(sizes.list_rows);
    LayoutCursor cursor;
    PlanMap map{};
    cursor.add<PlanHeader>(1);
    map.count = cursor.add<std::int32_t>(static_cast<std::uint64_t>(local_experts));
    map.offset = cursor.add<std::int32_t>(static_cast<std::uint64_t>(local_experts) + 1);
    map.tokens = cursor.add<std::int32_t>(ranks);
    map.item_begin = cursor.add<std::int32_t>(ranks > 0 ? ranks + 1 : 0);
    map.part_end = cursor.at;
    if (sizes.parts > 1) {
      map.part_end = cursor.add<std::int32_t>(static_cast<std::uint64_t>(sizes.ranks) *
                                              static_cast<std::uint64_t>(sizes.parts - 1));
    }
    map.zones_end = cursor.at;
    map.code = cursor.add<std::uint32_t>(
        static_cast<std::uint64_t>(sizes.tokens) * static_cast<std::uint64_t>(sizes.topk), 16);
    map.list = cursor.add<std::uint32_t>(list_rows);
    map.start = cursor.add<std::uint32_t>(items > 0 && list_rows > 0 ? items + 1 : 0);
    map.cell = cursor.add<std::uint32_t>(items);
    map.list_end = cursor.at;
    map.end = cursor.add<std::byte>(0, 16);
    return map;
  }
};

// P.
constexpr int parts_of(const PlanHeader& h) {
  return (h.version & PlanHeader::kHasParts) != 0 ? h.keeps_list >> PlanHeader::kPartsShift : 1;
}
constexpr bool keeps_list(const PlanHeader& h) {
  return (h.keeps_list & ((1 << PlanHeader::kPartsShift) - 1)) != 0;
}

// True if the sizes are safe to compute a PlanMap with.
constexpr bool plausible(const PlanHeader& h) {
  return h.ranks >= 1 && h.ranks <= kMaxRanks && h.experts >= 1 && h.experts <= kMaxExperts &&
         h.local_experts >= 0 && h.local_experts <= h.experts && h.tokens >= 0 &&
         h.tokens <= XD_EP_MAX_TOKENS && h.topk >= 1 && h.topk <= kMaxTopk && h.alignment >= 1 &&
         (h.alignment & (h.alignment - 1)) == 0 && h.keeps_items >= 0 &&
         h.keeps_items <= kMaxTopk && h.list_rows >= 0 && h.list_rows <= INT32_MAX &&
         h.capacity >= 0 && h.capacity <= INT32_MAX;
}

// The rows that a receive tensor of the plan can have.
constexpr std::int64_t capacity_of(const PlanHeader& h) {
  return whole_rows(h.capacity, h.alignment);
}

// `parts` is parts_of(h), or 1 for the places of what lies in front of `part_end`.
constexpr PlanMap map_of(const PlanHeader& h, int parts = 1) {
  return PlanMap::make({.local_experts = h.local_experts,
                        .tokens = h.tokens,
                        .topk = h.topk,
                        .list_rows = h.list_rows,
                        .items = h.keeps_items != 0 ? h.capacity : 0,
                        .ranks = h.ranks,
                        .parts = parts});
}

// The part of low-latency plans behind the header: ep/slots/plan.h describes the parts.
struct LlPlanFacts {
  std::int64_t weighted;    // 1 = items have the weights that dispatch was given
  std::int64_t peer_items;  // plans with room: items of other ranks' tokens
};
constexpr std::uint64_t ll_item_bytes(int topk) {
  return (8 + 8 * static_cast<std::uint64_t>(topk) + 15) / 16 * 16;
}
struct LlPlanMap {
  std::uint64_t facts, count, count_end, home, items, end;

  struct Sizes {
    int local_experts = 1, tokens = 0, topk = 1;
    std::int64_t items = 0;
  };
  static constexpr LlPlanMap make(const Sizes& sizes) {
    LayoutCursor cursor;
    LlPlanMap map{};
    cursor.add<PlanHeader>(1);
    map.facts = cursor.add<LlPlanFacts>(1);
    map.count = cursor.add<std::int32_t>(static_cast<std::uint64_t>(sizes.local_experts));
    map.count_end = cursor.at;
    map.home = cursor.add<RankBits>(static_cast<std::uint64_t>(sizes.tokens), 16);
    map.items = cursor.add<std::byte>(
        static_cast<std::uint64_t>(sizes.items) * ll_item_bytes(sizes.topk), 16);
    map.end = cursor.at;
    return map;
  }
};
constexpr LlPlanMap ll_map_of(const PlanHeader& h) {
  // Plans that keep items have room for all that their group may bring, so that every part has its
  // place before the batch is known.
  if (h.keeps_items != 0) {
    return LlPlanMap::make({.local_experts = h.local_experts,
                            .tokens = static_cast<int>(h.capacity / h.ranks),
                            .topk = h.keeps_items,
                            .items = h.capacity});
  }
  return LlPlanMap::make(
      {.local_experts = h.local_experts, .tokens = h.tokens, .topk = h.topk, .items = h.list_rows});
}

// The bytes of a plan, and how many of them the checksum covers: whole words, zeros between parts
// included. `parts` as for map_of().
struct PlanExtent {
  std::uint64_t checked, end;
};
constexpr PlanExtent extent_of(const PlanHeader& h, int parts = 1) {
  if (is_ll_layout(h.layout)) {
    const LlPlanMap map = ll_map_of(h);
    return {map.home, map.end};
  }
  const PlanMap map = map_of(h, parts);
  return {map.code, map.end};
}

// True for an overflow under XD_EP_OVERFLOW_ERROR: the plan moves nothing, and its zones are whole
// and go beyond any tensor's end. Every other plan's zones lie within its receive rows.
constexpr bool refused(const PlanHeader& h) {
  return h.overflow_rank >= 0 && h.overflow == XD_EP_OVERFLOW_ERROR;
}

// The meaning of a code: the row's place, and in RANK_MAJOR the local expert of this choice there.
struct RowRef {
  int rank;
  std::int64_t row;
  int expert;
};

// Packs rank, row and (RANK_MAJOR) local expert of one choice into 32 bits. All ranks' receive
// capacities laid end to end give every row a number of its own; RANK_MAJOR multiplies it by the
// largest L of all ranks and adds the local expert. Throws INVALID_ARGUMENT if that does not fit.
class RowCodec {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  RowCodec(std::span<const std::int64_t> capacities, const Layout& layout, int most_local_experts);

  std::uint32_t encode(RowRef ref) const {
    const auto global =
        base_[static_cast<std::size_t>(ref.rank)] + static_cast<std::uint64_t>(ref.row);
    return static_cast<std::uint32_t>(global * experts_ + static_cast<std::uint64_t>(ref.expert));
  }

  // Returns false for kNone and for every number that is no row, so damaged plans stay inside the
  // tensors.
  bool decode(std::uint32_t code, RowRef& ref) const {
    const std::uint64_t global = code / experts_;
    if (global >= base_.back()) return false;
    const auto next = std::upper_bound(base_.begin(), base_.end(), global);
    ref.rank = static_cast<int>(next - base_.begin()) - 1;
    ref.row = static_cast<std::int64_t>(global - *(next - 1));
    ref.expert = static_cast<int>(code % experts_);
    return true;
  }

 private:
  std::vector<std::uint64_t> base_;  // [W+1] prefix sums of the capacities
  std::uint32_t experts_;            // the largest L in RANK_MAJOR, else 1
};

// The group that a plan is used in, which the plan must agree with.
struct PlanBinding {
  int rank;
  const Config* config;
  std::uint64_t capacities;
  std::uint64_t hosts = 0;  // HostMap::fingerprint()
};

// The header of a plan of either kind of groups. Throws INVALID_ARGUMENT unless the bytes are a
// whole plan of this library version whose checksum is right.
PlanHeader open_plan_header(const void* plan, std::size_t bytes);

// A checked plan of prepare in the caller's memory.
class PlanView {
 public:
  // Throws INVALID_ARGUMENT unless the bytes are a whole, undamaged plan of this library version;
  // see ep/plan/plan_check.h.
  static PlanView open(const void* plan, std::size_t bytes);

  // Throws INVALID_ARGUMENT unless the plan belongs to this rank and to a group of these sizes, and
  // is within its bounds.
  void require_binding(const PlanBinding& binding) const;

  const PlanHeader& header() const { return header_; }
  int parts() const { return parts_of(header_); }
  bool refused() const { return ep::refused(header_); }
  std::int32_t count(int e) const { return counts_[e]; }
  std::int32_t offset(int e) const { return offsets_[e]; }
  const std::uint32_t* codes(std::int64_t token) const { return codes_ + token * header_.topk; }
  int part_of(int rank, std::int64_t row) const {
    return part_of_row(row, part_ends_ + static_cast<std::ptrdiff_t>(rank) * (parts() - 1),
                       parts());
  }
  std::span<const std::uint32_t> list() const {
    return {list_, static_cast<std::size_t>(header_.list_rows)};
  }

 private:
  PlanHeader header_{};
  const std::int32_t* counts_ = nullptr;
  const std::int32_t* offsets_ = nullptr;
  const std::int32_t* part_ends_ = nullptr;
  const std::uint32_t* codes_ = nullptr;
  const std::uint32_t* list_ = nullptr;
};

// Fills in magic, version, size and checksum of a plan whose other fields and zones are written.
void seal_plan(std::byte* plan);
// Does the same for a plan of low latency.
void seal_ll_plan(std::byte* plan);

struct Batch {
  std::uint64_t counts;      // sum of hash_entry() over the count table [W][CountLayout]
  std::uint64_t capacities;  // hash of all ranks' capacities
  std::uint64_t hosts;       // HostMap::fingerprint()
  int topk, alignment, group;
  std::uint64_t epoch;  // number of its prepare
  int parts = 1;
};
// The fingerprint is equal on all ranks, and differs from that of every other batch of this group:
// the epoch tells apart batches whose counts happen to be equal, and the number tells apart groups
// of equal sizes.
constexpr std::uint64_t plan_fingerprint(const Batch& batch) {
  std::uint64_t hash = hash_combine(batch.counts, batch.capacities);
  hash = hash_combine(hash, batch.hosts);
  hash = hash_combine(hash, static_cast<std::uint64_t>(batch.topk));
  hash = hash_combine(hash, static_cast<std::uint64_t>(batch.alignment));
  hash = hash_combine(hash, static_cast<std::uint64_t>(batch.group));
  hash = hash_combine(hash, batch.epoch);
  return batch.parts > 1 ? hash & ~kPartBits : hash;
}

std::size_t plan_size(const Config& config);
std::uint64_t hash_capacities(std::span<const std::int64_t> capacities);

}  // namespace xd::ep
