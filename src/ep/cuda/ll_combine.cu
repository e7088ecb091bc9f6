// xd_ep_ll_combine: rows of the experts back to their tokens.
//
// All blocks push, then sum. In each, 28 warps move rows, and two control: one begins the turn,
// sends weights, waits for records and judges; the other checks the plan at the start. The launch's
// last block also sends this rank's record and credit. See docs/internals/low_latency.md.
#include "ep/cuda/launch.cuh"
#include "ep/cuda/ll_combine_push.cuh"
#include "ep/cuda/ll_combine_sum.cuh"
#include "ep/cuda/ll_kernels.h"

namespace xd::ep::cuda {
namespace {

// Numbers of named barriers, beside kLlSumBarrier.
constexpr int kLlNextBarrier = 2, kLlControlBarrier = 3;

// The control warps of a block. The first one goes on where the other has looked.
class CombineControl {
 public:
  __device__ CombineControl(const LlCombineParams& params, LlCombineTurn& turn,
                            LlCombineShared& shared, const LlPlanParts& parts)
      : p_(params), g_(params.group), turn_(turn), s_(shared), parts_(parts) {}

  // What the other control warp looks at meanwhile: the peers' memory, and the plan.
  __device__ void look() {
    for (int r = lane_id(); r < g_.ranks(); r += 32) s_.turn.area[r] = g_.areas[r];
    if (lane_id() == 0) s_.turn.findings = {};
    __syncwarp();
    if (!p_.step.failed && !p_.step.silent) check();
    ptx::barrier_sync(kLlControlBarrier, kLlCombineControls);
  }
  __device__ void begin() {
    turn_.begin();
    if (lane_id() == 0) {
      s_.decided = 0;
      s_.drained = 0;
      s_.turn.verdict = static_cast<int>(LlVerdict::drain);
    }
    ptx::barrier_sync(kLlControlBarrier, kLlCombineControls);
    if (lane_id() == 0) take_look();
  }

  // Behind the block's barrier.
  __device__ void run();

 private:
  __device__ void check();
  __device__ void refuse(LlFault kind, const Fault& fault, std::int64_t got,
                         std::int64_t expected) {
    s_.turn.findings = {kind, fault, got, expected, 0};
  }
  __device__ void take_look();
  __device__ void send_weights();
  __device__ void send_record();
  __device__ void wait(std::uint64_t epoch, bool drains);
  __device__ bool fits_what_was_sent();

  const LlCombineParams& p_;
  const LlDevice& g_;
  LlCombineTurn& turn_;
  LlCombineShared& s_;
  const LlPlanParts& parts_;
};

// All lanes: is this a plan of this group, and do the tensors fit it? Mistakes are findings.
__device__ inline void CombineControl::check() {
  const auto* words = reinterpret_cast<const std::uint64_t*>(p_.plan);
  constexpr std::uint64_t kHeader = sizeof(PlanHeader) / 8;
  constexpr std::uint64_t kChecksum = offsetof(PlanHeader, checksum) / 8;
  std::uint64_t sum = 0;
  for (std::uint64_t i = lane_id(); i < g_.plan.home / 8; i += 32) {
    const std::uint64_t word = words[i];
    if (i < kHeader) reinterpret_cast<std::uint64_t*>(&s_.plan)[i] = word;
    if (i != kChecksum) sum += hash_entry(i, word);
  }
  sum = warp_sum(sum);
  __syncwarp();
  if (lane_id() != 0) return;
  const PlanHeader& h = s_.plan;
  Fault fault = header_fault(h, p_.plan_bytes);
  // A head of another length belongs to another group's plan.
  if (!fault && extent_of(h).checked == g_.plan.home) fault = checksum_fault(h, sum);
  if (!fault) fault = binding_fault(h, g_.terms);
  if (fault) return refuse(LlFault::plan, fault, 0, 0);
  if (p_.step.receive && p_.out_rows != h.tokens) {
    return refuse(LlFault::tokens, {}, p_.out_rows, h.tokens);
  }
  if (p_.topk_weights == nullptr) return;
  if (p_.weight_rows != h.tokens) return refuse(LlFault::tokens, {}, p_.weight_rows, h.tokens);
  if (p_.weight_cols != h.topk) return refuse(LlFault::topk, {}, p_.weight_cols, h.topk);
}

// A call with a mistake fails: nothing is sent but its record. A receive half takes its turn and
// delivers nothing. One thread.
__device__ inline void CombineControl::take_look() {
  LlCourse& c = s_.turn.course;
  // A call that takes no turn tells why, and nothing else.
  if (c.fatal || c.status != XD_SUCCESS) s_.turn.findings.kind = LlFault::none;
  if (s_.turn.findings.kind == LlFault::none) return;
  c.status = XD_ERROR_INVALID_ARGUMENT;
  c.rows = false;
  c.drains = true;
  if (c.sends) c.receives = s_.turn.before.sent == s_.turn.before.taken;
}

__device__ inline void CombineControl::run() {
  const LlCourse& c = s_.turn.course;
  if (c.rows && p_.topk_weights != nullptr) send_weights();
  if (turn_.is_last_block()) {
    if (c.sends) send_record();
    turn_.give_credit();
    if (lane_id() == 0 && c.sends && !c.rows && !c.receives) turn_.note_failed_send();
  }
  if (!c.receives) return;
  wait(c.take_epoch, c.drains);
  const int besides = turn_.taken_besides();
  for (int i = 1; i <= besides; ++i) {
    ptx::barrier_sync(kLlNextBarrier, kLlCombineMovers + 32);
    if (lane_id() == 0) {
      turn_.tell(c.take_epoch + static_cast<std::uint64_t>(i) - 1);
      s_.drained = 0;
    }
    __syncwarp();
    wait(c.take_epoch + static_cast<std::uint64_t>(i), true);
  }
}

// Each token's weights go to all other ranks with rows of it.
__device__ inline void CombineControl::send_weights() {
  const std::uint64_t epoch = s_.turn.course.send_epoch;
  for (int t = static_cast<int>(blockIdx.x); t < s_.plan.tokens; t += static_cast<int>(gridDim.x)) {
    const RankBits home = parts_.home(t);
    const std::uint64_t offset = ll_weight_offset(g_, turn_.slot(epoch), g_.rank(), t);
    float weight = 0;
    if (lane_id() < p_.weight_cols) weight = p_.topk_weights[t * p_.weight_cols + lane_id()];
    for (int r = 0; r < g_.ranks(); ++r) {
      if (!home.has(r) || r == g_.rank() || turn_.leaves_out(r)) continue;
      if (lane_id() >= p_.weight_cols) continue;
      auto* to = reinterpret_cast<std::uint64_t*>(s_.turn.area[r].base + offset) + lane_id();
      ptx::st_relaxed_sys(to, count_word(__float_as_uint(weight), epoch));
    }
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
    told.partials = crosses ? static_cast<std::uint64_t>(parts_.items_of(r)) : 0;
  });
}

__device__ inline void CombineControl::wait(std::uint64_t epoch, bool drains) {
  const std::uint64_t began = ptx::global_timer_ns();
  turn_.clear_sources();
  for (int r = lane_id(); r < g_.ranks(); r += 32) {
    if (s_.turn.gone[r] != 0) continue;
    turn::LongWait wait;
    const bool here =
        turn_.take_record(r, epoch, [&] { return turn_.goes_on(XD_PHASE_ENTRY, epoch, r, wait); });
    if (here && blockIdx.x == 0) turn_.add_wait(r, began);
    if (!here && s_.turn.failed == 0) s_.turn.gone[r] = 1;
  }
  __syncwarp();
  turn_.judge(lane_id() == 0 && (drains || !fits_what_was_sent()));
  if (lane_id() != 0) return;
  // Ranks that have become known as lost are absent for the sums.
  s_.turn.masked.word[0] |= s_.turn.lost[0];
  s_.turn.masked.word[1] |= s_.turn.lost[1];
  // Release: movers that drain read records, behind a fence of their own.
  __threadfence_block();
  *static_cast<volatile std::uint64_t*>(&s_.decided) = said_by(epoch, s_.turn.verdict);
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

// They make turns of their own: see ll_begin().
__device__ __forceinline__ void begin_control(const LlCombineParams& p, LlCombineShared& shared) {
  LlCombineTurn turn(p, shared.turn, kLlCombine);
  const LlPlanParts parts(p);
  CombineControl(p, turn, shared, parts).begin();
}
__device__ __forceinline__ void look_at_call(const LlCombineParams& p, LlCombineShared& shared) {
  LlCombineTurn turn(p, shared.turn, kLlCombine);
  const LlPlanParts parts(p);
  CombineControl(p, turn, shared, parts).look();
}
__device__ __noinline__ void run_control(const LlCombineParams& p, LlCombineShared& shared) {
  LlCombineTurn turn(p, shared.turn, kLlCombine);
  const LlPlanParts parts(p);
  CombineControl(p, turn, shared, parts).run();
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
  launch.tell(c.receives ? c.take_epoch + static_cast<std::uint64_t>(launch.taken_besides())
                         : c.send_epoch);
  launch.end();
}

// ---- The kernel --------------------------------------------------------------------------------

template <class T>
class CombineBlock {
 public:
  __device__ CombineBlock(const LlCombineParams& params, LlCombineShared& shared)
      : p_(params), s_(shared), turn_(params, shared.turn, kLlCombine), parts_(params) {}

  __device__ void run() {
    if (controls()) {
      begin_control(p_, s_);
      __syncthreads();
      if (is_on()) run_control(p_, s_);
    } else if (warp_in_block() > kLlCombineMovers / 32) {
      look_at_call(p_, s_);
      __syncthreads();
    } else {
      move();
    }
    __syncthreads();
    if (threadIdx.x == 0) finish_block(p_, s_);
  }

 private:
  __device__ static bool controls() { return warp_in_block() == kLlCombineMovers / 32; }
  // True if the launch takes a turn.
  __device__ bool is_on() const {
    const LlCourse& c = s_.turn.course;
    return !c.fatal && (c.sends || c.receives);
  }
  __device__ void move();

  const LlCombineParams& p_;
  LlCombineShared& s_;
  LlCombineTurn turn_;
  const LlPlanParts parts_;
};

template <class T>
__device__ inline void CombineBlock<T>::move() {
  LlPusher<T> pusher(p_, turn_, parts_);
  const bool may_push = p_.step.send && !p_.step.failed;
  if (may_push) pusher.load_first();
  __syncthreads();
  if (!is_on()) return;
  const LlCourse& c = s_.turn.course;
  uint4 sum{};
  if (c.rows) pusher.push_all(c.send_epoch, sum);
  if (!c.receives) return;
  LlSummer<T> summer(p_, turn_, s_, parts_, pusher);
  if (!c.drains) summer.sum_all(c.take_epoch, c.rows, sum);
  // Operations whose send halves have failed come behind it.
  const int besides = turn_.taken_besides();
#pragma unroll 1
  for (int i = 0; i <= besides; ++i) {
    const std::uint64_t epoch = c.take_epoch + static_cast<std::uint64_t>(i);
    const volatile std::uint64_t* decided = &s_.decided;
    while (*decided >> 2 < epoch && *static_cast<volatile int*>(&s_.turn.failed) == 0) ptx::pause();
    __threadfence_block();
    // One mover asks for all, since they meet at barriers in drain().
    ptx::barrier_sync(kLlSumBarrier, kLlCombineMovers);
    if (threadIdx.x == 0) {
      const bool failed = *static_cast<volatile int*>(&s_.turn.failed) != 0;
      s_.drains = !failed && says(s_.decided, epoch, LlVerdict::drain) ? 1 : 0;
    }
    ptx::barrier_sync(kLlSumBarrier, kLlCombineMovers);
    if (s_.drains != 0) summer.drain(epoch);
    // The control warp goes on to the next operation.
    if (i < besides) ptx::barrier_sync(kLlNextBarrier, kLlCombineMovers + 32);
  }
}

template <class T>
__global__ void __launch_bounds__(kLlCombineThreads, 1)
    ll_combine_kernel(const __grid_constant__ LlCombineParams p) {
  __shared__ LlCombineShared shared;
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
