// The control warp of a combine that looks at the call's plan, and sends what other ranks are told:
// this rank's record and credit, and the weights of a call that has some.
//
//   memory                                     written by        read by
//   the plan                                   dispatch, before  this warp, up to home[]
//   shared: plan, first_*, area                this warp         the block, behind its barrier
//   entry[stage][rank] and credit[rank] there  the last block    each rank's control warps
#pragma once

#include "ep/slots/cuda/combine/sum.cuh"

namespace xd::ep::cuda {

// The block's first barrier, for all its threads: true if no warp passes false. The findings of
// control warps come with the barrier itself, and so nothing usual has to be read behind it.
__device__ inline bool ll_meet_first(bool good) { return __syncthreads_or(good ? 0 : 1) == 0; }

// A word of the record of a usual launch; the seal lacks the operation's number. All lanes: eight
// have a record's words.
__device__ inline std::uint64_t usual_record_word(const LlCombineParams& p,
                                                  const LlCombineShared& s) {
  static_assert(offsetof(LlRecord, topk) == 12 && offsetof(LlRecord, fingerprint) == 16 &&
                offsetof(LlRecord, tokens) == 24);
  const auto* given = reinterpret_cast<const std::uint64_t*>(&p.record);
  const int at = LlPipeline::word_of_pipeline();
  std::uint64_t word = 0;
  if (at == 0) word = given[0];
  if (at == 1) {
    word = given[1] & 0xFFFFFFFFu | std::uint64_t{static_cast<std::uint32_t>(s.plan.topk)} << 32;
  }
  if (at == 2) word = s.plan.fingerprint;
  if (at == 3) word = static_cast<std::uint32_t>(s.plan.tokens);
  return word;
}

// The fault of a plan, if it has one.
inline __device__ __noinline__ Fault ll_plan_fault(const LlCombineParams& p, const PlanHeader& h,
                                                   std::uint64_t sum) {
  Fault fault = header_fault(h, p.plan_bytes);
  // A head of another length belongs to another group's plan.
  if (!fault && extent_of(h).checked == p.group.plan.home) fault = checksum_fault(h, sum);
  if (!fault) fault = binding_fault(h, p.group.terms);
  return fault;
}

// The control warp that looks at the call's plan and weights. Its findings are behind the block's
// first barrier.
class LlCombineCheck {
 public:
  __device__ LlCombineCheck(const LlCombineParams& params, LlCombineTurn& turn,
                            LlCombineShared& shared, const LlPlanParts& parts)
      : p_(params), g_(params.group), turn_(turn), s_(shared), parts_(parts) {}

  // False: the call has a mistake.
  __device__ bool look();
  // Behind the block's barrier. `usual`: a launch of LlQuickMover sends rows and receives.
  __device__ void run(bool usual);

 private:
  static constexpr int kWords = 4;  // of the plan's head, that a lane loads at once

  // A call that has failed, or whose arguments are bad, may have no plan.
  __device__ bool has_plan() const { return !p_.step.failed && !p_.step.silent; }
  __device__ void load_words(std::uint64_t first, std::uint64_t (&words)[kWords]) const;
  __device__ std::uint64_t hash(std::uint64_t first, const std::uint64_t (&words)[kWords]) const;
  __device__ void look_at_plan();
  __device__ void check(std::uint64_t sum);
  __device__ std::uint64_t expected_word() const;
  __device__ bool is_as_usual(std::uint64_t word, std::uint64_t expected, std::uint64_t sum) const;
  __device__ void refuse(LlFault kind, const Fault& fault, std::int64_t got,
                         std::int64_t expected) {
    s_.turn.findings = {kind, fault, got, expected, 0};
  }
  __device__ void send_weights();
  __device__ std::uint64_t sealed_word(std::uint64_t factor) const;
  __device__ void send_record() const;

  const LlCombineParams& p_;
  const LlDevice& g_;
  LlCombineTurn& turn_;
  LlCombineShared& s_;
  const LlPlanParts& parts_;
  std::uint64_t word_ = 0;  // this lane's word of the record
};

__device__ inline bool LlCombineCheck::look() {
  HeapRange area{};
  if (lane_id() < g_.ranks()) area = g_.areas[lane_id()];
  if (lane_id() == 0) s_.turn.findings = {};
  if (has_plan()) look_at_plan();
  if (lane_id() < g_.ranks()) s_.turn.area[lane_id()] = area;
#pragma unroll 1
  for (int r = lane_id() + 32; r < g_.ranks(); r += 32) s_.turn.area[r] = g_.areas[r];
  __syncwarp();
  if (turn_.is_last_block() && p_.route.quick) {
    word_ = sealed_word(turn::seal_factor(LlPipeline::word_of_pipeline()));
  }
  return s_.turn.findings.kind == LlFault::none;
}

// All lanes: is this a plan of this group, and do the tensors fit it? Mistakes are findings.
__device__ inline void LlCombineCheck::look_at_plan() {
  // All loads come first, and without branches: the compiler would wait for some between others.
  const int token = min(static_cast<int>(blockIdx.x), g_.max_tokens - 1);
  std::uint64_t words[kWords];
  load_words(0, words);
  const RankBits home = parts_.home(token);
  const LlChoice own = parts_.own_choice(token);
  const std::uint64_t expected = expected_word();
  if (lane_id() * 8 < sizeof(PlanHeader)) {
    reinterpret_cast<std::uint64_t*>(&s_.plan)[lane_id()] = words[0];
  }
  const std::uint64_t head = words[0];
  std::uint64_t sum = hash(0, words);
#pragma unroll 1
  for (std::uint64_t first = 32 * kWords; first < g_.plan.home / 8; first += 32 * kWords) {
    load_words(first, words);
    sum += hash(first, words);
  }
  sum = warp_sum(sum);
  s_.first_own[lane_id()] = own;
  if (lane_id() == 0) s_.first_home = home;
  __syncwarp();
  if (!is_as_usual(head, expected, sum) && lane_id() == 0) check(sum);
}

__device__ inline void LlCombineCheck::load_words(std::uint64_t first,
                                                  std::uint64_t (&words)[kWords]) const {
  const auto* at = reinterpret_cast<const std::uint64_t*>(p_.plan) + first + lane_id();
  const std::uint64_t end = g_.plan.home / 8 - first;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    words[j] = static_cast<std::uint64_t>(lane_id() + j * 32) < end ? at[j * 32] : 0;
  }
}

__device__ inline std::uint64_t LlCombineCheck::hash(std::uint64_t first,
                                                     const std::uint64_t (&words)[kWords]) const {
  constexpr std::uint64_t kChecksum = offsetof(PlanHeader, checksum) / 8;
  std::uint64_t sum = 0;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const std::uint64_t i = first + static_cast<std::uint64_t>(lane_id() + j * 32);
    const std::uint64_t part = hash_entry(i, words[j]);
    sum += i < g_.plan.home / 8 && i != kChecksum ? part : 0;
  }
  return sum;
}

// One thread, where is_as_usual() does not hold.
__device__ inline void LlCombineCheck::check(std::uint64_t sum) {
  const PlanHeader& h = s_.plan;
  const Fault fault = ll_plan_fault(p_, h, sum);
  if (fault) return refuse(LlFault::plan, fault, 0, 0);
  if (h.recv_rows > p_.most_rows) return refuse(LlFault::rows, {}, p_.most_rows, h.recv_rows);
  if (p_.step.receive && p_.out_rows != h.tokens) {
    return refuse(LlFault::tokens, {}, p_.out_rows, h.tokens);
  }
  if (!has_weights(p_)) return;
  if (p_.weight_rows != h.tokens) return refuse(LlFault::tokens, {}, p_.weight_rows, h.tokens);
  if (p_.weight_cols != h.topk) return refuse(LlFault::topk, {}, p_.weight_cols, h.topk);
}

// This lane's word of the head of this group's plans. It is chosen, not indexed: an index that
// differs from lane to lane makes a read of parameters slow.
__device__ inline std::uint64_t LlCombineCheck::expected_word() const {
  std::uint64_t word = 0;
#pragma unroll
  for (std::uint32_t w = 0; w < LlPlanHead::kWords; ++w) {
    if (LlPlanHead::mask(w) != 0 && lane_id() == static_cast<int>(w)) word = p_.head.word[w];
  }
  return word;
}

// All lanes, each with its word of the plan's head. True only where check() finds nothing. It asks
// for more than that, in fewer instructions: what the size of a plan follows from is the group's,
// so its size is the group's, too.
__device__ inline bool LlCombineCheck::is_as_usual(std::uint64_t word, std::uint64_t expected,
                                                   std::uint64_t sum) const {
  const auto lane = static_cast<std::uint32_t>(lane_id());
  bool good = true;
  if (lane < LlPlanHead::kWords) {
    good = ((word ^ expected) & LlPlanHead::mask(lane)) == 0;
  }
  const auto low = static_cast<int>(word), high = static_cast<int>(word >> 32);
  if (lane == offsetof(PlanHeader, tokens) / 8) {
    good = low >= 0 && low <= g_.max_tokens && high > 0 && high <= g_.max_topk;
    good &= !p_.step.receive || p_.out_rows == low;
    good &= !has_weights(p_) || (p_.weight_rows == low && p_.weight_cols == high);
  }
  if (lane == offsetof(PlanHeader, list_rows) / 8) good = word <= INT32_MAX;
  if (lane == offsetof(PlanHeader, recv_rows) / 8) {
    good = word <= static_cast<std::uint64_t>(p_.most_rows);
  }
  if (lane == offsetof(PlanHeader, checksum) / 8) good = word == sum;
  return __all_sync(kAllLanes, good) != 0;
}

__device__ inline std::uint64_t LlCombineCheck::sealed_word(std::uint64_t factor) const {
  const std::uint64_t word = usual_record_word(p_, s_);
  std::uint64_t hash = word * factor;
#pragma unroll
  for (int step = LlPipeline::kWords / 2; step > 0; step /= 2) {
    hash += __shfl_xor_sync(kAllLanes, hash, step);
  }
  return LlPipeline::word_of_pipeline() == turn::kRecordWords ? 0 - hash : word;
}

// To every rank: four at a time.
__device__ inline void LlCombineCheck::send_record() const {
  const int at = LlPipeline::word_of_pipeline();
  const std::uint64_t epoch = s_.turn.course.send_epoch;
  const std::uint64_t word = at == turn::kRecordWords ? word_ + epoch : word_;
#pragma unroll 1
  for (int r = lane_id() / LlPipeline::kWords; r < g_.ranks(); r += LlPipeline::kTogether) {
    turn_.pipeline().send_word(r, epoch, at, word);
  }
}

__device__ inline void LlCombineCheck::run(bool usual) {
  const LlCourse& c = s_.turn.course;
  if (turn_.is_last_block() && usual) send_record();
  if (c.rows && has_weights(p_)) send_weights();
  if (turn_.is_last_block()) turn_.give_credit();
  if (lane_id() == 0) turn_.end();
  // The whole block meets at the verdict.
  if (c.receives && !c.leaves) ll_meet_verdict(true);
  if (turn_.is_last_block()) turn_.free_left();
}

// Each token's weights go to all other ranks with rows of it.
__device__ inline void LlCombineCheck::send_weights() {
  const std::uint64_t epoch = s_.turn.course.send_epoch;
  RankBits home = s_.first_home;
  float weight = s_.first_own[lane_id()].weight;
#pragma unroll 1
  for (int t = static_cast<int>(blockIdx.x); t < s_.plan.tokens;) {
    const std::uint64_t offset = ll_weight_offset(g_, turn_.stage(epoch), g_.rank(), t);
    const std::uint64_t word = count_word(__float_as_uint(weight), epoch);
#pragma unroll 1
    for (int r = 0; r < g_.ranks(); ++r) {
      if (!home.has(r) || r == g_.rank() || turn_.leaves_out(r)) continue;
      if (lane_id() >= p_.weight_cols) continue;
      auto* to = reinterpret_cast<std::uint64_t*>(s_.turn.area[r].base + offset) + lane_id();
      ptx::st_relaxed_sys(to, word);
    }
    t += static_cast<int>(gridDim.x);
    if (t >= s_.plan.tokens) return;
    home = parts_.home(t);
    weight = parts_.own_choice(t).weight;
  }
}

}  // namespace xd::ep::cuda
