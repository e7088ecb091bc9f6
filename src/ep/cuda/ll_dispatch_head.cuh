// What movers of the first receiver block write, behind the rows that they take: counts and ranges
// of the experts, and the head of the plan.
//
//   memory                         written by    read by
//   counts, source_ranges,         movers        the caller
//   expert_load
//   the plan in front of home[]    movers        combine
#pragma once

#include "ep/cuda/ll_dispatch_list.cuh"

namespace xd::ep::cuda {

// Movers of the block, and the warp that watches for records.
inline constexpr int kLlHeadThreads = kLlMovers + 32;

struct LlHeadShared {
  unsigned long long sum;  // of the plan's checksum
  int rows;
  PlanHeader header;
};

template <bool kMany>
class LlHead {
 public:
  __device__ LlHead(const LlDispatchParams& params, const LlDispatchTurn& turn,
                    const LlList<kMany>& list, const LlListShared& of_list, LlHeadShared& shared)
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
  __device__ void write(std::uint64_t epoch);
  // The warp that watches meets them when bad ids have been counted.
  __device__ static void meet() { ptx::barrier_sync(kLlHeadBarrier, kLlHeadThreads); }
  // One thread where nothing is delivered: there is no plan then.
  __device__ void write_nothing();

 private:
  __device__ std::uint64_t zone_word(int i) const;
  __device__ std::int32_t zone_number(int i) const;
  __device__ int write_counts(int expert) const;
  __device__ void complete_header(std::uint64_t epoch);
  __device__ void write_header();

  const LlDispatchParams& p_;
  const LlDevice& g_;
  const LlDispatchTurn& turn_;
  LlShared& s_;
  const LlList<kMany>& list_;
  const LlListShared& of_list_;
  LlHeadShared& h_;
};

#define XD_LL_HEAD(type) \
  template <bool kMany>  \
  __device__ inline type LlHead<kMany>

XD_LL_HEAD(void)::prepare() {
  PlanHeader& h = h_.header;
  h = {};
  h.magic = PlanHeader::kMagic;
  h.version = PlanHeader::kVersion;
  h.rank = g_.rank();
  h.ranks = g_.ranks();
  h.experts = g_.experts;
  h.layout = XD_EP_EXPERT_SLOTS;
  h.alignment = 1;
  h.keeps_items = g_.max_topk;
  h.local_experts = g_.local_experts;
  h.overflow_rank = -1;
  h.capacities = g_.terms.capacities;
  h.expert_ranks = g_.terms.expert_ranks;
  h.capacity = g_.slots_per_expert();
  h.bytes = g_.plan.end;
  h_.sum = 0;
  h_.rows = 0;
}

// Each word of the plan between its header and home[] belongs to one thread, with the part that it
// has in the checksum. What follows from the counts of an expert is written by the same thread.
XD_LL_HEAD(void)::write(std::uint64_t epoch) {
  auto* words = reinterpret_cast<std::uint64_t*>(p_.plan);
  const auto first = static_cast<int>(g_.plan.facts / 8), end = static_cast<int>(g_.plan.home / 8);
  std::uint64_t sum = 0;
  bool has_some = false;
#pragma unroll 1
  for (int i = first + thread_in_block(); i < end; i += kLlMovers) {
    const std::uint64_t word = zone_word(i);
    words[i] = word;
    sum += hash_entry(i, word);
    has_some = true;
  }
  // Mostly a few warps have all of the words.
  if (__any_sync(kAllLanes, has_some) != 0) {
    sum = warp_sum(sum);
    if (lane_id() == 0) atomicAdd(&h_.sum, static_cast<unsigned long long>(sum));
  }
  meet();
  if (warp_in_block() != 0) return;
  if (lane_id() == 0) complete_header(epoch);
  __syncwarp();
  write_header();
}

XD_LL_HEAD(void)::write_nothing() {
  if (p_.plan != nullptr) reinterpret_cast<PlanHeader*>(p_.plan)->magic = 0;
}

XD_LL_HEAD(std::uint64_t)::zone_word(int i) const {
  const int counts = static_cast<int>(g_.plan.count / 8);
  if (i >= counts) {
    const auto low = static_cast<std::uint32_t>(zone_number(2 * (i - counts)));
    const auto high = static_cast<std::uint32_t>(zone_number(2 * (i - counts) + 1));
    return static_cast<std::uint64_t>(high) << 32 | low;
  }
  if (i * 8 != static_cast<int>(g_.plan.facts)) {
    return static_cast<std::uint64_t>(of_list_.total_units - of_list_.own_units);
  }
  return (s_.record[g_.rank()].flags & kHasWeights) != 0 ? 1 : 0;
}

// The int32 numbers behind the plan's facts: count[], tokens[], items_of[], zeros.
XD_LL_HEAD(std::int32_t)::zone_number(int i) const {
  if (i < g_.local_experts) return write_counts(i);
  i -= g_.local_experts;
  if (i < g_.ranks()) return s_.gone[i] != 0 ? -1 : static_cast<std::int32_t>(s_.record[i].tokens);
  i -= g_.ranks();
  return i < g_.ranks() && s_.gone[i] == 0 ? list_.items_of(i) : 0;
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
  atomicAdd(&h_.rows, rows);
  return rows;
}

XD_LL_HEAD(void)::complete_header(std::uint64_t epoch) {
  const LlRecord& own = s_.record[g_.rank()];
  PlanHeader& h = h_.header;
  h.tokens = static_cast<std::int32_t>(own.tokens);
  h.topk = static_cast<std::int32_t>(own.topk);
  h.bad_id_rank = s_.bad_ids != 0 ? s_.bad_id_rank : -1;
  h.list_rows = of_list_.total_units;
  h.recv_rows = h.total_rows = h_.rows;
  h.bad_ids = s_.bad_ids;
  h.fingerprint = ll_fingerprint(g_.nonce, epoch);
  h.epoch = epoch;
}

// The first warp.
XD_LL_HEAD(void)::write_header() {
  constexpr std::uint32_t kWords = sizeof(PlanHeader) / 8;
  constexpr std::uint32_t kChecksum = offsetof(PlanHeader, checksum) / 8;
  const auto lane = static_cast<std::uint32_t>(lane_id());
  const auto* from = reinterpret_cast<const std::uint64_t*>(&h_.header);
  const std::uint64_t word = lane < kWords ? from[lane] : 0;
  const bool counts = lane < kWords && lane != kChecksum;
  const std::uint64_t sum = warp_sum(counts ? hash_entry(lane, word) : 0) + h_.sum;
  if (lane < kWords) {
    reinterpret_cast<std::uint64_t*>(p_.plan)[lane] = lane == kChecksum ? sum : word;
  }
}

#undef XD_LL_HEAD

}  // namespace xd::ep::cuda
