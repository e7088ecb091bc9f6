// The first receiver block's movers write, after the rows that they take: counts and ranges of the
// experts, and the head of the plan.
//
//   memory                         written by    read by
//   counts, source_ranges,         movers        the caller
//   expert_load, row_offsets
//   the plan in front of home[]    movers        combine
#pragma once

#include "ep/slots/cuda/dispatch/list.cuh"

namespace xd::ep::cuda {

// Movers of the block, and the warp that watches for records.
inline constexpr int kLlHeadThreads = kLlMovers + 32;

inline constexpr int kLlHeadWarps = kLlMovers / 32;

struct LlHeadShared {
  // Of each warp of movers: its part of the plan's checksum, and the rows of its experts.
  std::uint64_t sums[kLlHeadWarps];
  int rows[kLlHeadWarps];
  PlanHeader header;
};

template <bool kMany, bool kRows>
class LlHead {
 public:
  __device__ LlHead(const LlDispatchParams& params, const LlDispatchTurn& turn,
                    const LlList<kMany, kRows>& list, const LlListShared& of_list,
                    LlHeadShared& shared)
      : p_(params),
        g_(params.group),
        turn_(turn),
        s_(turn.shared()),
        list_(list),
        of_list_(of_list),
        h_(shared) {}

  // One thread, before the operation: what is known then.
  __device__ void prepare();
  // Movers, when all rows are listed and the verdict is there.
  __device__ void write();
  // The warp that watches meets them when bad ids have been counted, and knows the rest of the
  // header but for what follows from the list.
  __device__ void complete(std::uint64_t epoch);
  // One thread where nothing is delivered: there is no plan then.
  __device__ void write_nothing();

 private:
  __device__ static void meet() { ptx::barrier_sync(kLlHeadBarrier, kLlHeadThreads); }
  __device__ std::uint64_t write_facts();
  __device__ std::int32_t number(int i, int& rows) const;
  __device__ int write_counts(int expert) const;
  __device__ void write_offsets() const;
  __device__ void write_header();

  const LlDispatchParams& p_;
  const LlDevice& g_;
  const LlDispatchTurn& turn_;
  LlShared& s_;
  const LlList<kMany, kRows>& list_;
  const LlListShared& of_list_;
  LlHeadShared& h_;
};

#define XD_LL_HEAD(type)            \
  template <bool kMany, bool kRows> \
  __device__ inline type LlHead<kMany, kRows>

XD_LL_HEAD(void)::prepare() {
  PlanHeader& h = h_.header;
  h = {};
  h.magic = PlanHeader::kMagic;
  h.version = PlanHeader::kVersion;
  h.rank = g_.rank();
  h.ranks = g_.ranks();
  h.experts = g_.experts;
  h.layout = kRows ? g_.terms.layout : kSlotsLayout;
  h.alignment = kRows ? static_cast<std::int32_t>(g_.terms.alignment) : 1;
  h.keeps_items = g_.max_topk;
  h.local_experts = g_.local_experts;
  h.overflow_rank = -1;
  h.capacities = g_.terms.capacities;
  h.expert_ranks = g_.terms.expert_ranks;
  h.hosts = g_.terms.hosts;
  h.capacity = g_.slots_per_expert();
  h.bytes = g_.plan.end;
}

// A thread has some of the numbers behind the plan's facts, and what follows from the counts of its
// experts; an even thread makes a word of its number and the next one, with the part that the word
// has in the checksum.
XD_LL_HEAD(void)::write() {
  auto* const words = reinterpret_cast<std::uint64_t*>(p_.plan);
  const auto first = static_cast<int>(g_.plan.count / 8);
  const int numbers = 2 * (static_cast<int>(g_.plan.home / 8) - first);
  std::uint64_t sum = thread_in_block() == 0 ? write_facts() : 0;
  int rows = 0;
#pragma unroll 1
  for (int i = thread_in_block(); i - lane_id() < numbers; i += kLlMovers) {
    const auto low = static_cast<std::uint32_t>(i < numbers ? number(i, rows) : 0);
    const std::uint32_t high = __shfl_down_sync(kAllLanes, low, 1);
    if (i % 2 != 0 || i >= numbers) continue;
    const std::uint64_t word = static_cast<std::uint64_t>(high) << 32 | low;
    words[first + i / 2] = word;
    sum += hash_entry(first + i / 2, word);
  }
  if constexpr (kRows) write_offsets();
  sum = warp_sum(sum);
  rows = __reduce_add_sync(kAllLanes, rows);
  if (lane_id() == 0) {
    h_.sums[warp_in_block()] = sum;
    h_.rows[warp_in_block()] = rows;
  }
  meet();
  if (warp_in_block() == 0) write_header();
}

XD_LL_HEAD(void)::write_nothing() { reinterpret_cast<PlanHeader*>(p_.plan)->magic = 0; }

// The words in front of count[]. Returns their part in the checksum.
XD_LL_HEAD(std::uint64_t)::write_facts() {
  const auto first = static_cast<int>(g_.plan.facts / 8), end = static_cast<int>(g_.plan.count / 8);
  std::uint64_t sum = 0;
#pragma unroll 1
  for (int i = first; i < end; ++i) {
    const bool weights = !kRows && (s_.record[g_.rank()].flags & kWeighted) != 0;
    const std::uint64_t word =
        i == first ? (weights ? 1 : 0) : of_list_.total_units - of_list_.own_units;
    reinterpret_cast<std::uint64_t*>(p_.plan)[i] = word;
    sum += hash_entry(i, word);
  }
  return sum;
}

// The int32 numbers behind the plan's facts: count[], zeros. Adds those of count[] to `rows`.
XD_LL_HEAD(std::int32_t)::number(int i, int& rows) const {
  if (i >= g_.local_experts) return 0;
  const int count = write_counts(i);
  rows += count;
  return count;
}

XD_LL_HEAD(int)::write_counts(int expert) const {
  int rows = 0;
#pragma unroll 1
  for (int s = 0; s < g_.ranks(); ++s) {
    const int count = g_.masks && s_.gone[s] != 0 ? 0 : list_.count(s, expert);
    if (p_.source_ranges != nullptr) {
      p_.source_ranges[expert * g_.ranks() + s] = source_range(rows, count);
    }
    rows += count;
  }
  p_.counts[expert] = rows;
  if (rows == 0) return 0;
  // Nobody else writes there, but an atomic addition waits for no load.
  if (p_.expert_load != nullptr && p_.wide_load) {
    atomicAdd(static_cast<unsigned long long*>(p_.expert_load) + expert,
              static_cast<unsigned long long>(rows));
  } else if (p_.expert_load != nullptr) {
    atomicAdd(static_cast<int*>(p_.expert_load) + expert, rows);
  }
  return rows;
}

XD_LL_HEAD(void)::write_offsets() const {
#pragma unroll 1
  for (int z = thread_in_block(); z <= list_.num_zones(); z += kLlMovers) {
    p_.rows.row_offsets[z] = list_.zone(z);
  }
}

XD_LL_HEAD(void)::complete(std::uint64_t epoch) {
  if (lane_id() == 0) {
    const LlRecord& own = s_.record[g_.rank()];
    PlanHeader& h = h_.header;
    h.tokens = static_cast<std::int32_t>(own.tokens);
    h.topk = static_cast<std::int32_t>(own.topk);
    h.bad_id_rank = s_.bad_ids != 0 ? s_.bad_id_rank : -1;
    h.bad_ids = s_.bad_ids;
    h.fingerprint = ll_fingerprint(g_.nonce, epoch);
    h.epoch = epoch;
  }
  __syncwarp();
  meet();
}

// The first warp.
XD_LL_HEAD(void)::write_header() {
  constexpr int kWords = sizeof(PlanHeader) / 8;
  constexpr int kChecksum = offsetof(PlanHeader, checksum) / 8;
  static_assert(kWords <= 32 && kLlHeadWarps <= 32);
  const int lane = lane_id();
  const bool has_word = lane < kWords, has_part = lane < kLlHeadWarps;
  int rows = __reduce_add_sync(kAllLanes, has_part ? h_.rows[lane] : 0);
  if constexpr (kRows) rows = list_.zone(list_.num_zones());
  std::uint64_t word = has_word ? reinterpret_cast<const std::uint64_t*>(&h_.header)[lane] : 0;
  if (lane == offsetof(PlanHeader, list_rows) / 8) word = of_list_.total_units;
  if (lane == offsetof(PlanHeader, recv_rows) / 8) word = rows;
  if (lane == offsetof(PlanHeader, total_rows) / 8) word = rows;
  std::uint64_t sum = has_part ? h_.sums[lane] : 0;
  if (has_word && lane != kChecksum) sum += hash_entry(lane, word);
  sum = warp_sum(sum);
  if (has_word) {
    reinterpret_cast<std::uint64_t*>(p_.plan)[lane] = lane == kChecksum ? sum : word;
  }
}

#undef XD_LL_HEAD

}  // namespace xd::ep::cuda
