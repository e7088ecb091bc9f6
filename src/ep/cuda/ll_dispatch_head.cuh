// What the first receiver block writes beside rows, in the warps that move none: counts and ranges
// of the experts, and the head of the plan.
//
//   memory                         written by    read by
//   counts, source_ranges,         these warps   the caller
//   expert_load
//   the plan in front of home[]    these warps   combine
#pragma once

#include "ep/cuda/ll_dispatch_list.cuh"

namespace xd::ep::cuda {

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
        h_(shared),
        thread_(thread_in_block() - kLlMovers) {}

  // All threads that move no rows: what is known before the operation is.
  __device__ void prepare();
  // The same threads, when all rows are listed.
  __device__ void write(std::uint64_t epoch);
  // The same where nothing is delivered: there is no plan then.
  __device__ void write_nothing();

 private:
  __device__ void write_counts();
  __device__ void write_load(int expert, int rows) const;
  __device__ void write_zones();
  __device__ std::int32_t zone_number(int i) const;
  __device__ void complete_header(std::uint64_t epoch);
  __device__ void write_header();
  __device__ void meet() const { ptx::barrier_sync(kLlTellBarrier, kLlTellers); }

  const LlDispatchParams& p_;
  const LlDevice& g_;
  const LlDispatchTurn& turn_;
  LlShared& s_;
  const LlList<kMany>& list_;
  const LlListShared& of_list_;
  LlHeadShared& h_;
  const int thread_;
};

#define XD_LL_HEAD(type) \
  template <bool kMany>  \
  __device__ inline type LlHead<kMany>

XD_LL_HEAD(void)::prepare() {
  if (thread_ != 0) return;
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

XD_LL_HEAD(void)::write(std::uint64_t epoch) {
  write_counts();
  write_zones();
  meet();
  if (thread_ >= 32) return;
  if (thread_ == 0) complete_header(epoch);
  __syncwarp();
  write_header();
}

XD_LL_HEAD(void)::write_nothing() {
  if (thread_ == 0 && p_.plan != nullptr) reinterpret_cast<PlanHeader*>(p_.plan)->magic = 0;
}

XD_LL_HEAD(void)::write_counts() {
  int all = 0;
#pragma unroll 1
  for (int e = thread_; e < g_.local_experts; e += kLlTellers) {
    int rows = 0;
#pragma unroll 1
    for (int s = 0; s < g_.ranks(); ++s) {
      const int count = s_.gone[s] == 0 ? list_.count(s, e) : 0;
      if (p_.source_ranges != nullptr) {
        p_.source_ranges[e * g_.ranks() + s] = source_range(rows, count);
      }
      rows += count;
    }
    p_.counts[e] = rows;
    write_load(e, rows);
    all += rows;
  }
  if (all != 0) atomicAdd(&h_.rows, all);
}

XD_LL_HEAD(void)::write_load(int expert, int rows) const {
  if (p_.expert_load == nullptr) return;
  if (p_.wide_load) {
    static_cast<std::int64_t*>(p_.expert_load)[expert] += rows;
  } else {
    static_cast<std::int32_t*>(p_.expert_load)[expert] += rows;
  }
}

// The int32 numbers behind the plan's facts: count[], tokens[], items_of[], zeros.
XD_LL_HEAD(std::int32_t)::zone_number(int i) const {
  const int local = g_.local_experts, ranks = g_.ranks();
  if (i < local) {
    int rows = 0;
#pragma unroll 1
    for (int s = 0; s < ranks; ++s) rows += s_.gone[s] == 0 ? list_.count(s, i) : 0;
    return rows;
  }
  if (i < local + ranks) {
    const int r = i - local;
    return s_.gone[r] != 0 ? -1 : static_cast<std::int32_t>(s_.record[r].tokens);
  }
  const int r = i - local - ranks;
  return r < ranks && s_.gone[r] == 0 ? list_.items_of(r) : 0;
}

// Each word's part of the checksum is its writer's.
XD_LL_HEAD(void)::write_zones() {
  const LlPlanMap& map = g_.plan;
  auto* words = reinterpret_cast<std::uint64_t*>(p_.plan);
  std::uint64_t sum = 0;
#pragma unroll 1
  for (std::uint64_t i = map.facts / 8 + thread_; i < map.home / 8; i += kLlTellers) {
    std::uint64_t word = 0;
    if (i * 8 < map.count) {
      const bool remote = i * 8 != map.facts;
      word = remote ? static_cast<std::uint64_t>(of_list_.total_units - of_list_.own_units)
             : (s_.record[g_.rank()].flags & kHasWeights) != 0 ? 1
                                                               : 0;
    } else {
      const auto first = static_cast<int>((i * 8 - map.count) / 4);
      word = static_cast<std::uint64_t>(static_cast<std::uint32_t>(zone_number(first + 1))) << 32 |
             static_cast<std::uint32_t>(zone_number(first));
    }
    words[i] = word;
    sum += hash_entry(i, word);
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) atomicAdd(&h_.sum, static_cast<unsigned long long>(sum));
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
