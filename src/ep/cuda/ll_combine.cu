// xd_ep_ll_combine: rows of the experts back to their tokens.
//
// All blocks push, then sum. In each, 28 warps move rows, and two control: one begins the turn,
// waits for records and judges; the other checks the plan at the start and sends weights. In the
// launch's last block the first also sends this rank's record, and the other its credit. See
// docs/internals/low_latency.md.
//
// With few tokens the time of an operation is that of its longest chain of loads and instructions.
// So all that is loaded once is loaded before the block's first barrier, each by a warp that has
// nothing else to do, and what needs many instructions is done only where something is unusual.
#include "ep/cuda/launch.cuh"
#include "ep/cuda/ll_combine_push.cuh"
#include "ep/cuda/ll_combine_sum.cuh"
#include "ep/cuda/ll_kernels.h"

namespace xd::ep::cuda {
namespace {

// Numbers of named barriers, beside kLlSumBarrier.
constexpr int kLlNextBarrier = 2, kLlControlBarrier = 3;

// The control warp that takes the block's turn.
class CombineControl {
 public:
  __device__ CombineControl(const LlCombineParams& params, LlCombineTurn& turn,
                            LlCombineShared& shared)
      : p_(params), g_(params.group), turn_(turn), s_(shared) {}

  __device__ void begin() {
    if (lane_id() == 0) {
      s_.decided = 0;
      s_.drained = 0;
      s_.turn.verdict = static_cast<int>(LlVerdict::drain);
    }
    turn_.begin();
    ptx::barrier_sync(kLlControlBarrier, kLlCombineControls);
    if (lane_id() == 0) take_look();
  }
  // Behind the block's barrier.
  __device__ void run();

 private:
  __device__ void take_look();
  __device__ void send_record();
  __device__ void wait(std::uint64_t epoch, bool drains);
  __device__ bool fits_what_was_sent();

  const LlCombineParams& p_;
  const LlDevice& g_;
  LlCombineTurn& turn_;
  LlCombineShared& s_;
};

// The control warp that looks at the call's plan and weights. What it finds is behind the block's
// first barrier, and its mistakes also behind that of the control warps.
class CombineCheck {
 public:
  __device__ CombineCheck(const LlCombineParams& params, LlCombineTurn& turn,
                          LlCombineShared& shared, const LlPlanParts& parts)
      : p_(params), g_(params.group), turn_(turn), s_(shared), parts_(parts) {}

  __device__ void look();
  // Behind the block's barrier.
  __device__ void run();

 private:
  static constexpr int kWords = 4;  // of the plan's head, that a lane loads at once

  // A call that has failed, or whose arguments are bad, may have no plan.
  __device__ bool has_plan() const { return !p_.step.failed && !p_.step.silent; }
  __device__ void load_words(std::uint64_t first, std::uint64_t (&words)[kWords]) const;
  __device__ std::uint64_t hash(std::uint64_t first, const std::uint64_t (&words)[kWords]) const;
  __device__ void look_at_plan();
  __device__ void check(std::uint64_t sum);
  __device__ bool is_as_usual(std::uint64_t sum) const;
  __device__ void refuse(LlFault kind, const Fault& fault, std::int64_t got,
                         std::int64_t expected) {
    s_.turn.findings = {kind, fault, got, expected, 0};
  }
  __device__ void send_weights();

  const LlCombineParams& p_;
  const LlDevice& g_;
  LlCombineTurn& turn_;
  LlCombineShared& s_;
  const LlPlanParts& parts_;
};

// What an operation has met, which is mostly nothing. One thread of the block.
__device__ __noinline__ void tell(const LlCombineParams& p, LlCombineShared& shared,
                                  std::uint64_t epoch) {
  LlCombineTurn(p, shared.turn, kLlCombine).tell(epoch);
}

// What is wrong with a plan, if it has a fault.
__device__ __noinline__ Fault fault_of(const LlCombineParams& p, const PlanHeader& h,
                                       std::uint64_t sum) {
  Fault fault = header_fault(h, p.plan_bytes);
  // A head of another length belongs to another group's plan.
  if (!fault && extent_of(h).checked == p.group.plan.home) fault = checksum_fault(h, sum);
  if (!fault) fault = binding_fault(h, p.group.terms);
  return fault;
}

// ---- The plan ----------------------------------------------------------------------------------

__device__ inline void CombineCheck::look() {
  HeapRange area{};
  if (lane_id() < g_.ranks()) area = g_.areas[lane_id()];
  if (lane_id() == 0) s_.turn.findings = {};
  if (has_plan()) look_at_plan();
  if (lane_id() < g_.ranks()) s_.turn.area[lane_id()] = area;
#pragma unroll 1
  for (int r = lane_id() + 32; r < g_.ranks(); r += 32) s_.turn.area[r] = g_.areas[r];
  __syncwarp();
  ptx::barrier_sync(kLlControlBarrier, kLlCombineControls);
}

// All lanes: is this a plan of this group, and do the tensors fit it? Mistakes are findings.
__device__ inline void CombineCheck::look_at_plan() {
  // All loads come first, and without branches: the compiler would wait for some between others.
  const int token = min(static_cast<int>(blockIdx.x), g_.max_tokens - 1);
  std::uint64_t words[kWords];
  load_words(0, words);
  int items = 0;
  if (lane_id() < g_.ranks()) items = parts_.items_of(lane_id());
  const RankBits home = parts_.home(token);
  const LlChoice own = parts_.own_choice(token);
  if (lane_id() * 8 < sizeof(PlanHeader)) {
    reinterpret_cast<std::uint64_t*>(&s_.plan)[lane_id()] = words[0];
  }
  std::uint64_t sum = hash(0, words);
#pragma unroll 1
  for (std::uint64_t first = 32 * kWords; first < g_.plan.home / 8; first += 32 * kWords) {
    load_words(first, words);
    sum += hash(first, words);
  }
  sum = warp_sum(sum);
  s_.first_own[lane_id()] = own;
  if (lane_id() < g_.ranks()) s_.items_of[lane_id()] = items;
#pragma unroll 1
  for (int r = lane_id() + 32; r < g_.ranks(); r += 32) s_.items_of[r] = parts_.items_of(r);
  __syncwarp();
  if (lane_id() != 0) return;
  s_.first_home = home;
  check(sum);
}

__device__ inline void CombineCheck::load_words(std::uint64_t first,
                                                std::uint64_t (&words)[kWords]) const {
  const auto* at = reinterpret_cast<const std::uint64_t*>(p_.plan) + first + lane_id();
  const std::uint64_t end = g_.plan.home / 8 - first;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    words[j] = static_cast<std::uint64_t>(lane_id() + j * 32) < end ? at[j * 32] : 0;
  }
}

__device__ inline std::uint64_t CombineCheck::hash(std::uint64_t first,
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

// One thread.
__device__ inline void CombineCheck::check(std::uint64_t sum) {
  const PlanHeader& h = s_.plan;
  if (!is_as_usual(sum)) {
    const Fault fault = fault_of(p_, h, sum);
    if (fault) return refuse(LlFault::plan, fault, 0, 0);
  }
  if (p_.step.receive && p_.out_rows != h.tokens) {
    return refuse(LlFault::tokens, {}, p_.out_rows, h.tokens);
  }
  if (!has_weights(p_)) return;
  if (p_.weight_rows != h.tokens) return refuse(LlFault::tokens, {}, p_.weight_rows, h.tokens);
  if (p_.weight_cols != h.topk) return refuse(LlFault::topk, {}, p_.weight_cols, h.topk);
}

// True only for plans that have no fault_of(). It asks for more than that, in fewer instructions:
// what the size of a plan follows from is the group's, so its size is the group's, too.
__device__ inline bool CombineCheck::is_as_usual(std::uint64_t sum) const {
  const PlanHeader& h = s_.plan;
  const PlanTerms& t = g_.terms;
  bool same = h.magic == PlanHeader::kMagic;
  same &= h.version == PlanHeader::kVersion;
  same &= h.rank == t.rank;
  same &= h.ranks == t.ranks;
  same &= h.experts == t.experts;
  same &= h.local_experts == t.local_experts;
  same &= h.layout == t.layout;
  same &= h.alignment == 1;
  same &= h.overflow == t.overflow;
  same &= h.keeps_list == t.keeps_list;
  same &= h.keeps_items == t.keeps_items;
  same &= h.capacities == t.capacities;
  same &= h.expert_ranks == t.expert_ranks;
  same &= h.capacity == t.capacity;
  same &= h.bytes == g_.plan.end;
  same &= p_.plan_bytes >= g_.plan.end;
  same &= h.checksum == sum;
  same &= static_cast<std::uint32_t>(h.tokens) <= static_cast<std::uint32_t>(t.max_tokens);
  same &= static_cast<std::uint32_t>(h.topk - 1) < static_cast<std::uint32_t>(t.max_topk);
  same &= static_cast<std::uint64_t>(h.list_rows) <= INT32_MAX;
  return same;
}

__device__ inline void CombineCheck::run() {
  const LlCourse& c = s_.turn.course;
  if (c.rows && has_weights(p_)) send_weights();
  if (turn_.is_last_block()) turn_.give_credit();
  if (lane_id() == 0) turn_.end();
}

// Each token's weights go to all other ranks with rows of it.
__device__ inline void CombineCheck::send_weights() {
  const std::uint64_t epoch = s_.turn.course.send_epoch;
  RankBits home = s_.first_home;
  float weight = s_.first_own[lane_id()].weight;
#pragma unroll 1
  for (int t = static_cast<int>(blockIdx.x); t < s_.plan.tokens;) {
    const std::uint64_t offset = ll_weight_offset(g_, turn_.slot(epoch), g_.rank(), t);
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

// ---- The turn ----------------------------------------------------------------------------------

// A call with a mistake fails: nothing is sent but its record. A receive half takes its turn and
// delivers nothing. One thread.
__device__ inline void CombineControl::take_look() {
  if (s_.turn.findings.kind == LlFault::none) return;
  LlCourse& c = s_.turn.course;
  // A call that takes no turn tells why, and nothing else.
  if (c.fatal || c.status != XD_SUCCESS) {
    s_.turn.findings.kind = LlFault::none;
    return;
  }
  c.status = XD_ERROR_INVALID_ARGUMENT;
  c.rows = false;
  c.drains = true;
  if (c.sends) c.receives = s_.turn.before.sent == s_.turn.before.taken;
}

__device__ inline void CombineControl::run() {
  const LlCourse& c = s_.turn.course;
  if (turn_.is_last_block() && c.sends) {
    send_record();
    if (lane_id() == 0 && !c.rows && !c.receives) turn_.note_failed_send();
  }
  if (!c.receives) return;
    // Operations whose send halves have failed come behind it.
#pragma unroll 1
  for (std::uint64_t i = 0;; ++i) {
    wait(c.take_epoch + i, c.drains || i != 0);
    if (i == static_cast<std::uint64_t>(turn_.taken_besides())) return;
    ptx::barrier_sync(kLlNextBarrier, kLlCombineMovers + 32);
    if (lane_id() == 0) {
      tell(p_, s_, c.take_epoch + i);
      s_.drained = 0;
    }
    __syncwarp();
  }
}

__device__ inline void CombineControl::send_record() {
  const LlCourse& c = s_.turn.course;
  LlRecord record = p_.record;
  if (c.rows) {
    record.fingerprint = s_.plan.fingerprint;
    record.topk = static_cast<std::uint32_t>(s_.plan.topk);
    record.tokens = static_cast<std::uint32_t>(s_.plan.tokens);
  }
  turn_.send_record(record, [&](int r, LlRecord& told) {
    const bool crosses = c.rows && !turn_.leaves_out(r) && (r != g_.rank() || !c.receives);
    told.partials = crosses ? static_cast<std::uint64_t>(s_.items_of[r]) : 0;
  });
}

__device__ inline void CombineControl::wait(std::uint64_t epoch, bool drains) {
  const bool times = p_.wait_ns != nullptr && blockIdx.x == 0;
  const std::uint64_t began = times ? ptx::global_timer_ns() : 0;
  turn_.clear_sources();
  for (int r = lane_id(); r < g_.ranks(); r += 32) {
    if (s_.turn.gone[r] != 0) continue;
    turn::LongWait wait;
    const bool here =
        turn_.take_record(r, epoch, [&] { return turn_.goes_on(XD_PHASE_ENTRY, epoch, r, wait); });
    if (here && times) turn_.add_wait(r, began);
    if (!here && s_.turn.failed == 0) s_.turn.gone[r] = 1;
  }
  __syncwarp();
  turn_.judge(lane_id() == 0 && (drains || !fits_what_was_sent()));
  if (lane_id() == 0) {
    // Ranks that have become known as lost are absent for the sums.
    s_.turn.masked.word[0] |= s_.turn.lost[0];
    s_.turn.masked.word[1] |= s_.turn.lost[1];
    *static_cast<volatile std::uint64_t*>(&s_.decided) = said_by(epoch, s_.turn.verdict);
  }
  __syncwarp();
  ptx::barrier_sync(kLlVerdictBarrier, kLlCombineMovers + 32);
}

__device__ inline bool CombineControl::fits_what_was_sent() {
  const LlRecord& own = s_.turn.record[g_.rank()];
  const LlCourse& c = s_.turn.course;
  if (c.rows || c.drains || s_.turn.failed != 0 || own.call.status != XD_SUCCESS) return true;
  if (own.row_bytes == p_.row_bytes && own.dtype == p_.type &&
      own.fingerprint == s_.plan.fingerprint) {
    return true;
  }
  s_.turn.findings.kind = LlFault::not_as_sent;
  s_.turn.findings.got = p_.row_bytes;
  s_.turn.findings.expected = own.row_bytes;
  return false;
}

// One thread of the block.
__device__ __noinline__ void finish_block(const LlCombineParams& p, LlCombineShared& shared) {
  LlCombineTurn launch(p, shared.turn, kLlCombine);
  LlShared& turn = shared.turn;
  const LlCourse& c = turn.course;
  if (c.fatal) return;
  const bool mistake = p.step.failed || p.step.silent;  // which the host has told
  if (mistake && blockIdx.x == 0) launch.count_mistake();
  if (!c.sends && !c.receives) {
    if (!mistake && blockIdx.x == 0) launch.tell_refusal();
    return;
  }
  if (turn.findings.kind != LlFault::none) {
    turn.status = XD_ERROR_INVALID_ARGUMENT;
    turn.status_rank = launch.rank();
  }
  tell(p, shared,
       c.receives ? c.take_epoch + static_cast<std::uint64_t>(launch.taken_besides())
                  : c.send_epoch);
}

// True if finish_block() has nothing to do. One thread.
__device__ inline bool is_quiet(const LlCombineParams& p, const LlShared& turn) {
  const LlCourse& c = turn.course;
  bool quiet = !c.fatal && !p.step.failed && !p.step.silent && (c.sends || c.receives);
  quiet &= turn.findings.kind == LlFault::none && turn.status == XD_SUCCESS && turn.failed == 0;
  return quiet && (turn.lost[0] | turn.lost[1]) == 0;
}

// ---- The kernel --------------------------------------------------------------------------------

template <class T>
class CombineBlock {
 public:
  __device__ CombineBlock(const LlCombineParams& params, LlCombineShared& shared)
      : p_(params), s_(shared), turn_(params, shared.turn, kLlCombine), parts_(params) {}

  __device__ void run() {
    const int warp = warp_in_block();
    if (warp == kLlCombineMovers / 32) {
      CombineControl control(p_, turn_, s_);
      control.begin();
      __syncthreads();
      if (is_on()) control.run();
    } else if (warp > kLlCombineMovers / 32) {
      CombineCheck check(p_, turn_, s_, parts_);
      check.look();
      __syncthreads();
      if (is_on()) check.run();
    } else {
      move();
    }
    __syncthreads();
    if (threadIdx.x == 0 && !is_quiet(p_, s_.turn)) finish_block(p_, s_);
  }

 private:
  // True if the launch takes a turn.
  __device__ bool is_on() const {
    const LlCourse& c = s_.turn.course;
    return !c.fatal && (c.sends || c.receives);
  }
  __device__ void move();
  __device__ void drain(LlSummer<T>& summer, std::uint64_t epoch);

  const LlCombineParams& p_;
  LlCombineShared& s_;
  LlCombineTurn turn_;
  const LlPlanParts parts_;
};

template <class T>
__device__ inline void CombineBlock<T>::move() {
  LlPusher<T> pusher(p_, turn_, s_, parts_);
  const bool may_push = p_.step.send && !p_.step.failed;
  if (may_push) pusher.load_first();
  __syncthreads();
  if (!is_on()) return;
  const LlCourse& c = s_.turn.course;
  uint4 sum{};
  if (c.rows) pusher.push_all(c.send_epoch, sum);
  if (!c.receives) return;
  LlSummer<T> summer(p_, turn_, s_, parts_, pusher);
  if (c.drains) {
    summer.await_verdict();
  } else {
    summer.sum_all(c.take_epoch, c.rows, sum);
  }
  // Operations whose send halves have failed come behind it.
  const int besides = turn_.taken_besides();
#pragma unroll 1
  for (int i = 0; i <= besides; ++i) {
    const std::uint64_t epoch = c.take_epoch + static_cast<std::uint64_t>(i);
    if (i > 0) summer.await_verdict();
    if (!says(s_.decided, epoch, LlVerdict::go)) drain(summer, epoch);
    // The control warp goes on to the next operation.
    if (i < besides) ptx::barrier_sync(kLlNextBarrier, kLlCombineMovers + 32);
  }
}

template <class T>
__device__ inline void CombineBlock<T>::drain(LlSummer<T>& summer, std::uint64_t epoch) {
  // One mover asks for all, since they meet at barriers in drain().
  ptx::barrier_sync(kLlSumBarrier, kLlCombineMovers);
  if (threadIdx.x == 0) s_.drains = *static_cast<volatile int*>(&s_.turn.failed) == 0 ? 1 : 0;
  ptx::barrier_sync(kLlSumBarrier, kLlCombineMovers);
  if (s_.drains != 0) summer.drain(epoch);
}

template <class T>
__global__ void __launch_bounds__(kLlCombineThreads, 1)
    ll_combine_kernel(const __grid_constant__ LlCombineParams p) {
  __shared__ LlCombineShared shared;
  fetch_params(p);
  if (p.group.dependent) ptx::let_next_kernel_start();
  ptx::wait_for_kernel_before();
  CombineBlock<T>(p, shared).run();
}

using CombineKernel = void (*)(LlCombineParams);

CombineKernel kernel_for(DType type) {
  return type == DType::bf16  ? ll_combine_kernel<Bf16>
         : type == DType::f16 ? ll_combine_kernel<F16>
                              : ll_combine_kernel<F32>;
}

}  // namespace

void launch(const LlCombineParams& params, const LaunchShape& shape, cudaStream_t stream) {
  launch_dependent(kernel_for(static_cast<DType>(params.type)), params, shape,
                   params.group.dependent, stream);
}

void load_ll_combine(const LaunchShape& shape) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    load_dependent(kernel_for(type), shape, 0);
  }
}

}  // namespace xd::ep::cuda
