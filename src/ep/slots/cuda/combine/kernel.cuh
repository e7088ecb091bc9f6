// The kernels of xd_ll_combine: rows of the experts back to their tokens.
//
// All blocks push, then sum. In each, 28 warps move rows, and two control: one begins the turn,
// waits for records and judges; the other checks the plan at the start and sends weights. In the
// launch's last block the other also sends this rank's record, and behind it its credit; where
// something is unusual, the first sends the record. See docs/internals/low_latency.md.
//
// Launches of LlQuickMover have a kernel of their own, so that what others need takes no registers
// from them; so have those that sum by host.
//
// With few tokens the time of an operation is that of its longest chain of loads and instructions.
// So all that is loaded once is loaded before the block's first barrier, each by a warp that has
// nothing else to do, and what needs many instructions is done only where something is unusual.
#pragma once

#include "ep/plan/cuda/launch.cuh"
#include "ep/slots/cuda/combine/check.cuh"
#include "ep/slots/cuda/combine/quick.cuh"
#include "ep/slots/cuda/kernels.h"

namespace xd::ep::cuda {

// The control warp that takes the block's turn.
class CombineControl {
 public:
  __device__ CombineControl(const LlCombineParams& params, LlCombineTurn& turn,
                            LlCombineShared& shared)
      : p_(params), g_(params.group), turn_(turn), s_(shared) {}

  // False: not as LlQuickMover wants it.
  __device__ bool begin() {
    if (lane_id() == 0) s_.unusual = 0;
    const bool quick = p_.route.quick && begin_quickly();
    if (!quick) turn_.begin();
    if (lane_id() == 0) {
      s_.stage_offset = ll_partial_offset(g_, turn_.stage(s_.turn.course.send_epoch), 0);
    }
    if (p_.route.quick) factor_ = turn::seal_factor(LlPipeline::word_of_pipeline());
    __syncwarp();
    return quick;
  }
  // Behind the block's first barrier, where something is unusual: what it means for the launch. All
  // others wait for it.
  __device__ void take_look();
  // Behind that. `usual`: a launch of LlQuickMover sends rows and receives.
  __device__ void run(bool usual);

 private:
  __device__ bool begin_quickly();
  __device__ void take_mistake();
  __device__ void send_record();
  __device__ bool all_agree(std::uint64_t epoch) const;
  __device__ void wait(std::uint64_t epoch);
  __device__ void take_records(std::uint64_t epoch);
  __device__ bool fits_what_was_sent();

  const LlCombineParams& p_;
  const LlDevice& g_;
  LlCombineTurn& turn_;
  LlCombineShared& s_;
  std::uint64_t factor_ = 0;  // seal_factor() of this lane's word of a record
  bool usual_ = false;
};

// ---- The turn ----------------------------------------------------------------------------------

// Does the steps of LlTurn::begin() where nothing is unusual. False: it has to be called. All
// lanes.
__device__ inline bool CombineControl::begin_quickly() {
  LlShared& turn = s_.turn;
  // The credits come last, since nothing passes an acquire.
  const turn::PipelineEpochs before = turn_.pipeline().epochs();
  const bool failed = device::failed(g_.comm);
  std::uint64_t left = 0;
  if (turn_.is_last_block()) left = ll_left_in_stage(g_, kLlCombine);
  if (lane_id() == 0) {
    turn.clear();
    turn.course = {};
    turn.course.sends = turn.course.rows = turn.course.receives = true;
  }
  const bool has_credit = lane_id() < g_.ranks() && lane_id() != g_.rank();
  const std::uint64_t credit = has_credit ? turn_.pipeline().freed_by(lane_id()) : before.sent;
  const bool good = !failed && left == 0 && before.sent == before.taken &&
                    credit + static_cast<std::uint64_t>(g_.stages) > before.sent;
  if (__all_sync(kAllLanes, good) == 0) return false;
  if (lane_id() == 0) {
    turn.before = before;
    turn.freed = before.taken;
    turn.course.send_epoch = turn.course.take_epoch = before.sent + 1;
  }
  return true;
}

// A call with a mistake fails: nothing is sent but its record. A receive half takes its turn and
// delivers nothing. One thread.
__device__ inline void CombineControl::take_mistake() {
  if (s_.turn.findings.kind == LlFault::none) return;
  LlCourse& c = s_.turn.course;
  // A call that takes no turn tells why, and nothing else.
  if (c.fatal || c.status != XD_SUCCESS) {
    s_.turn.findings.kind = LlFault::none;
    return;
  }
  c.status = XD_ERROR_INVALID_ARGUMENT;
  c.rows = false;
  c.leaves = true;
  if (c.sends) c.receives = s_.turn.before.sent == s_.turn.before.taken;
}

__device__ inline void CombineControl::take_look() {
  if (lane_id() == 0) take_mistake();
  __syncwarp();
}

__device__ inline void CombineControl::run(bool usual) {
  usual_ = usual;
  const LlCourse& c = s_.turn.course;
  if (turn_.is_last_block() && c.sends && !usual_) {
    send_record();
    if (lane_id() == 0 && !c.rows && !c.receives) turn_.note_failed_send();
  }
  if (c.receives && !c.leaves) wait(c.take_epoch);
}

__device__ inline void CombineControl::send_record() {
  const LlCourse& c = s_.turn.course;
  LlRecord record = p_.record;
  if (c.rows) {
    record.fingerprint = s_.plan.fingerprint;
    record.topk = static_cast<std::uint32_t>(s_.plan.topk);
    record.tokens = static_cast<std::uint32_t>(s_.plan.tokens);
  }
  turn_.send_record(record);
}

// Looks for a while at the records of all other ranks. True: they have come, and are like this
// rank's own. False: they are taken again, for a verdict.
__device__ inline bool CombineControl::all_agree(std::uint64_t epoch) const {
  const std::uint64_t own = usual_record_word(p_, s_);
  const bool must_be_equal =
      LlPipeline::word_of_pipeline() < static_cast<int>(offsetof(LlRecord, tokens) / 8);
  const auto waits = [&](int r) { return r != g_.rank(); };
  bool same = true;
#pragma unroll 1
  for (int first = 0; first < g_.ranks(); first += LlPipeline::kTogether) {
    std::uint64_t word = 0;
    if (!turn_.pipeline().look_together(first, epoch, factor_, word, waits)) return false;
    const int source = first + lane_id() / LlPipeline::kWords;
    same &= !must_be_equal || source >= g_.ranks() || !waits(source) || word == own;
  }
  return __all_sync(kAllLanes, same) != 0;
}

__device__ inline void CombineControl::wait(std::uint64_t epoch) {
  if (usual_ && p_.wait_ns == nullptr && all_agree(epoch)) {
    // Where movers meet something unusual behind this, note_left() asks what was decided.
    if (lane_id() == 0) s_.turn.verdict = static_cast<int>(LlVerdict::go);
    ll_meet_verdict(true);
    return;
  }
  turn_.clear_sources();
  if (g_.masks && !turn_.is_last_block()) {
    turn_.follow_sources(epoch);
  } else {
    take_records(epoch);
    turn_.judge(lane_id() != 0 || fits_what_was_sent());
    if (g_.masks) turn_.tell_sources(epoch);
  }
  if (lane_id() == 0) {
    // Ranks that have become known as lost are absent for the sums.
    s_.turn.company = s_.turn.company & ~RankBits{s_.turn.lost[0], s_.turn.lost[1]};
  }
  __syncwarp();
  const bool go = s_.turn.verdict == static_cast<int>(LlVerdict::go);
  if (!go && lane_id() == 0) atomicExch(&s_.unusual, 1u);
  ll_meet_verdict(go);
}

// All lanes: the records of all sources that are not gone then.
__device__ inline void CombineControl::take_records(std::uint64_t epoch) {
  const bool times = p_.wait_ns != nullptr && turn_.is_last_block();
  const std::uint64_t began = times ? ptx::global_timer_ns() : 0;
  turn::LongWait wait;  // one for all of a lane's ranks
#pragma unroll 1
  for (int r = lane_id(); r < g_.ranks(); r += 32) {
    if (s_.turn.gone[r] != 0) continue;
    wait.peer_is_lost = false;
    const bool here =
        turn_.take_record(r, epoch, [&] { return turn_.goes_on(XD_PHASE_ENTRY, epoch, r, wait); });
    if (here && times) turn_.add_wait(r, began);
    if (!here && s_.turn.failed == 0) s_.turn.gone[r] = 1;
  }
  __syncwarp();
}

__device__ inline bool CombineControl::fits_what_was_sent() {
  const LlRecord& own = s_.turn.record[g_.rank()];
  const LlCourse& c = s_.turn.course;
  if (c.rows || s_.turn.failed != 0) return true;
  const bool same_wire = own.quantise == p_.record.quantise;
  if (own.row_bytes == p_.row_bytes && own.dtype == p_.type &&
      own.fingerprint == s_.plan.fingerprint && same_wire) {
    return true;
  }
  if (!same_wire) {
    s_.turn.findings.kind = LlFault::wire_not_as_sent;
    s_.turn.findings.got = p_.record.quantise;
    s_.turn.findings.expected = own.quantise;
    return false;
  }
  s_.turn.findings.kind = LlFault::not_as_sent;
  s_.turn.findings.got = p_.row_bytes;
  s_.turn.findings.expected = own.row_bytes;
  return false;
}

// One thread of the block.
inline __device__ __noinline__ void finish_block(const LlCombineParams& p,
                                                 LlCombineShared& shared) {
  LlCombineTurn launch(p, shared.turn, kLlCombine);
  LlShared& turn = shared.turn;
  const LlCourse& c = turn.course;
  if (c.fatal) return;
  const bool mistake = p.step.failed || p.step.silent;  // which the host has told
  if (mistake && blockIdx.x == 0) launch.count_mistake();
  if (launch.is_last_block()) launch.note_left();
  if (!c.sends && !c.receives) {
    if (!mistake && blockIdx.x == 0) launch.tell_refusal();
    return;
  }
  if (turn.findings.kind != LlFault::none) {
    turn.status = XD_ERROR_INVALID_ARGUMENT;
    turn.status_rank = launch.rank();
  } else if (!c.receives) {
    return;  // the receive half tells the findings of a send half
  }
  launch.tell(c.receives ? c.take_epoch : c.send_epoch);
}

// ---- The kernel --------------------------------------------------------------------------------

// The movers' steps behind the block's first barrier, in all launches.
template <class F, bool kByHost>
__device__ inline void move_all(LlPusher<F>& pusher, const LlCombineParams& p, LlCombineTurn& turn,
                                LlCombineShared& s, const LlPlanParts& parts) {
  const LlCourse& c = s.turn.course;
  uint4 sum{};
  if (c.rows) pusher.push_all(c.send_epoch, sum);
  if (!c.receives || c.leaves) return;
  LlSummer<F, kByHost>(p, turn, s, parts, pusher, false).sum_all(c.take_epoch, c.rows, sum);
}

// Where a launch of LlQuickMover meets something unusual: a warp of movers.
template <class F>
__device__ __noinline__ void go_on(const LlCombineParams& p, LlCombineShared& s, LlRest rest) {
  const LlCourse& c = s.turn.course;
  if (lane_id() == 0) atomicExch(&s.unusual, 1u);
  __syncwarp();
  if (rest.judged) {
    return ll_sum_rest<F, false>(p, s, c.take_epoch, rest.token, true, false, uint4{});
  }
  LlCombineTurn turn(p, s.turn, kLlCombine);
  const LlPlanParts parts(p);
  LlPusher<F> pusher(p, turn, s, parts);
  if (c.rows) pusher.load_first(rest.unit);
  move_all<F, false>(pusher, p, turn, s, parts);
}

// The ways of movers through a launch, each in a kernel of its own.
enum class LlWay {
  quick,    // LlQuickMover
  any,      // of all launches that do not sum by host; under a wire, of all
  by_host,  // ranks have named several hosts
};

template <class F, LlWay kWay>
class CombineBlock {
 public:
  __device__ CombineBlock(const LlCombineParams& params, LlCombineShared& shared)
      : p_(params), s_(shared), turn_(params, shared.turn, kLlCombine), parts_(params) {}

  __device__ void run() {
    const int warp = warp_in_block();
    bool usual = false;
    if (warp == kLlCombineMovers / 32) {
      CombineControl control(p_, turn_, s_);
      const bool good = control.begin() || !kQuick;
      const bool met = ll_meet_first(good);
      if (!met) {
        control.take_look();
        __syncthreads();
      }
      if (is_on()) control.run(kQuick && met);
    } else if (warp > kLlCombineMovers / 32) {
      LlCombineCheck check(p_, turn_, s_, parts_);
      const bool met = meet(check.look());
      if (is_on()) check.run(kQuick && met);
    } else {
      usual = move();
    }
    __syncthreads();
    if (warp == 0 && (!usual || s_.unusual != 0)) finish();
  }

 private:
  static constexpr bool kQuick = kWay == LlWay::quick;

  // The start of all warps but that which begins the turn. True if nothing is unusual.
  __device__ bool meet(bool good) const {
    const bool met = ll_meet_first(good);
    if (!met) __syncthreads();
    return met;
  }
  // True if the launch takes a turn.
  __device__ bool is_on() const {
    const LlCourse& c = s_.turn.course;
    return !c.fatal && (c.sends || c.receives);
  }
  // True if it was usual.
  __device__ bool move();
  // A warp, where something was unusual, when all of the block is over.
  __device__ void finish() const {
    if (lane_id() == 0) finish_block(p_, s_);
  }

  const LlCombineParams& p_;
  LlCombineShared& s_;
  LlCombineTurn turn_;
  const LlPlanParts parts_;
};

template <class F, LlWay kWay>
__device__ inline bool CombineBlock<F, kWay>::move() {
  if constexpr (kQuick) {
    LlQuickMover<F> mover(p_, s_);
    mover.load_first();
    const bool usual = meet(true);
    LlRest rest{LlPushBlocks::of(p_).first(), static_cast<int>(blockIdx.x), false, true};
    if (usual) {
      rest = mover.move();
    } else {
      rest.is_over = !is_on();
    }
    if (!rest.is_over) go_on<F>(p_, s_, rest);
    return usual;
  } else {
    LlPusher<F> pusher(p_, turn_, s_, parts_);
    if (p_.step.send && !p_.step.failed) pusher.load_first(LlPushBlocks::of(p_).first());
    meet(true);
    if (is_on()) move_all<F, kWay == LlWay::by_host>(pusher, p_, turn_, s_, parts_);
    return false;
  }
}

// As of dispatch's, "::combine" is found in its name.
namespace low_latency {
template <class F, LlWay kWay>
__global__ void __launch_bounds__(kLlCombineThreads, 1)
    combine_kernel(const __grid_constant__ LlCombineParams p) {
  __shared__ LlCombineShared shared;
  if (p.route.dependent) ptx::let_next_kernel_start();
  ptx::wait_for_kernel_before();
  CombineBlock<F, kWay>(p, shared).run();
}
}  // namespace low_latency

}  // namespace xd::ep::cuda
