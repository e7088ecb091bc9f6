// xd_ll_dispatch: rows of tokens to the slots of their experts.
//
// A block either only sends rows or only receives them, and the launch's last block also tells the
// routing. See docs/internals/low_latency.md for the whole course and its proof.
//
//   blocks [0, senders)         LlSender
//   blocks [senders, all)       LlList, LlReceiver; one warp LlSources; the first of them LlHead
//   the last block              LlTeller, this rank's record and credit
//
// A launch does the send half, the receive half or both; the other roles have nothing to do then.
//
// Groups whose rows lie without gaps have kernels of their own (kRows; rows.cu), and so those of
// slots (slots.cu) are not slower for them.
#pragma once

#include <type_traits>

#include "ep/plan/cuda/launch.cuh"
#include "ep/slots/cuda/dispatch/fill.cuh"
#include "ep/slots/cuda/dispatch/head.cuh"
#include "ep/slots/cuda/dispatch/receive.cuh"
#include "ep/slots/cuda/dispatch/sources.cuh"
#include "ep/slots/cuda/kernels.h"

namespace xd::ep::cuda {
namespace {

struct DispatchShared {
  LlShared turn;
  LlListShared list;
  LlReceiveShared receive;
  LlHeadShared head;
};

// Where rows lie without gaps.
__device__ inline bool form_fits_what_was_sent(const LlDispatchParams& p, const LlRecord& own) {
  if (p.rows.row_offsets == nullptr) return true;
  const bool weighted = (own.flags & kWeighted) != 0;
  return p.record.max_tokens == own.max_tokens && (p.rows.recv_weights != nullptr) == weighted &&
         (p.rows.topk == 0 || p.rows.topk == static_cast<int>(own.topk));
}

// A receive half must have tensors for the rows that its send half has sent. One thread.
__device__ inline bool fits_what_was_sent(const LlDispatchParams& p, LlShared& turn) {
  const LlRecord& own = turn.record[p.group.rank()];
  if (turn.course.rows || turn.failed != 0) return true;
  const auto quantise = static_cast<xd_ep_quantise>(own.quantise);
  const QuantiseFormat sent = quantise_format(quantise);
  const std::uint32_t bytes = sent ? own.row_bytes / 2 : own.row_bytes;
  const auto type = sent ? DType::e4m3 : static_cast<DType>(own.dtype);
  turn.findings = {};
  if (p.record.quantise == own.quantise && p.recv_row_bytes == bytes &&
      p.recv_type == static_cast<std::uint8_t>(type)) {
    if (form_fits_what_was_sent(p, own)) return true;
    turn.findings.kind = LlFault::form_not_as_sent;
    return false;
  }
  turn.findings.kind = LlFault::not_as_sent;
  turn.findings.got = p.recv_row_bytes;
  turn.findings.expected = bytes;
  return false;
}

// It makes a turn of its own: one whose address is taken would lie in memory. It is no function at
// run time: that would read the launch's parameters through memory, and all wait for this step.
__device__ __forceinline__ void ll_begin(const LlDispatchParams& params, LlShared& shared) {
  LlDispatchTurn(params, shared, kLlDispatch).begin();
}

// Of rows that are given, whose type of scales is this rank's own: whether a receive half names
// the one that the send half has sent.
__device__ inline bool scales_fit_what_was_sent(const LlDispatchParams& p, LlShared& turn) {
  const LlRecord& own = turn.record[p.group.rank()];
  if (turn.course.rows || turn.failed != 0 || p.record.scale_type == own.scale_type) return true;
  turn.findings.kind = LlFault::not_as_sent;
  turn.findings.got = turn.findings.expected = p.recv_row_bytes;
  return false;
}

// The steps of a receiver block that move no rows: see ll_begin(). Warps of which each calls one.
template <bool kMany, bool kGiven>
__device__ __forceinline__ void watch_sources(const LlDispatchParams& p, DispatchShared& shared,
                                              std::uint64_t epoch) {
  LlShared& s = shared.turn;
  const auto fits = [&] {
    return fits_what_was_sent(p, s) && (!kGiven || scales_fit_what_was_sent(p, s));
  };
  if (lane_id() == 0) s.bad_id_rank = p.group.ranks();
  LlDispatchTurn turn(p, s, kLlDispatch);
  if (p.group.masks && !turn.is_last_block()) {
    turn.follow_sources(epoch);
  } else {
    LlSources<kMany>(p, turn, shared.list, epoch).wait();
    turn.judge(lane_id() != 0 || fits());
    if (p.group.masks) turn.tell_sources(epoch);
  }
  // Rows of a launch that does both halves have the form that it sends.
  if (lane_id() == 0 && !s.course.rows) {
    const LlRecord& own = s.record[p.group.rank()];
    if constexpr (kGiven) {
      shared.receive.taken = LlTaken::of_given(own, ll_given(p).given_form);
    } else {
      shared.receive.taken = LlTaken::of(own);
    }
  }
}

template <bool kMany>
__device__ __forceinline__ void count_bad_ids(const LlDispatchParams& p, DispatchShared& shared,
                                              std::uint64_t epoch) {
  LlDispatchTurn turn(p, shared.turn, kLlDispatch);
  LlSources<kMany>(p, turn, shared.list, epoch).count_bad_ids();
}

template <bool kMany, bool kRows>
__device__ __forceinline__ void write_head(const LlDispatchParams& p, DispatchShared& shared,
                                           bool delivers) {
  LlDispatchTurn turn(p, shared.turn, kLlDispatch);
  const LlSmemParts parts{p.smem, ptx::dynamic_shared()};
  const LlList<kMany, kRows> list(p, turn, shared.list, parts);
  LlHead<kMany, kRows> head(p, turn, list, shared.list, shared.head);
  if (delivers) return head.write();
  if (threadIdx.x == 0) head.write_nothing();
}

// The warp that watches, where the operation is delivered.
template <bool kMany, bool kRows>
__device__ __forceinline__ void complete_head(const LlDispatchParams& p, DispatchShared& shared,
                                              std::uint64_t epoch) {
  LlDispatchTurn turn(p, shared.turn, kLlDispatch);
  const LlSmemParts parts{p.smem, ptx::dynamic_shared()};
  const LlList<kMany, kRows> list(p, turn, shared.list, parts);
  LlHead<kMany, kRows>(p, turn, list, shared.list, shared.head).complete(epoch);
}

// prepare(), before the block's first barrier, where the block is the first receiver.
template <bool kMany, bool kRows>
__device__ __forceinline__ void prepare_head(const LlDispatchParams& p, DispatchShared& shared) {
  LlDispatchTurn turn(p, shared.turn, kLlDispatch);
  const LlSmemParts parts{p.smem, ptx::dynamic_shared()};
  const LlList<kMany, kRows> list(p, turn, shared.list, parts);
  LlHead<kMany, kRows>(p, turn, list, shared.list, shared.head).prepare();
}

// One thread of a receiver block, behind its barrier, where there is something to tell.
__device__ __noinline__ void tell_operation(const LlDispatchParams& p, LlShared& turn,
                                            std::uint64_t epoch) {
  if (turn.findings.kind != LlFault::none) {
    turn.status = XD_ERROR_INVALID_ARGUMENT;
    turn.status_rank = p.group.rank();
  }
  LlDispatchTurn(p, turn, kLlDispatch).tell(epoch);
  if (static_cast<int>(blockIdx.x) != p.senders || turn.bad_ids == 0) return;
  LlControl* control = p.group.control;
  control->bad_ids += turn.bad_ids;
  ptx::st_relaxed_sys(&p.group.report->total_bad_ids, control->bad_ids);
}

// The fingerprint of this launch's record: a batch has that of the table in force.
__device__ inline std::uint64_t own_fingerprint(const LlDispatchParams& p) {
  const SlotTableDevice* const slots = p.group.slots;
  return slots != nullptr && p.record.call.operation == XD_LL_DISPATCH ? slots->hash
                                                                       : p.record.fingerprint;
}

// Sends this rank's record to all: a warp of the last block. Eight lanes have a word each, and so
// four ranks are told at once.
class LlRecordSender {
 public:
  __device__ LlRecordSender(const LlDispatchParams& params, LlShared& shared)
      : p_(params), s_(shared) {}

  // Before the block's first barrier: the words of a group that masks no rank.
  __device__ void prepare() {
    constexpr std::uint32_t kSealed = LlPipeline::kWords - 1;
    const std::uint32_t at = word_at();
    word_ = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < kSealed; ++w) {
      if (at == w) word_ = reinterpret_cast<const std::uint64_t*>(&p_.record)[w];
    }
    static_assert(offsetof(LlRecord, fingerprint) % sizeof(std::uint64_t) == 0);
    if (at == offsetof(LlRecord, fingerprint) / sizeof(std::uint64_t)) {
      word_ = own_fingerprint(p_);
    }
    std::uint64_t hash = word_ * turn::seal_factor(static_cast<int>(at));
#pragma unroll
    for (int step = LlPipeline::kWords / 2; step > 0; step /= 2) {
      hash += __shfl_xor_sync(kAllLanes, hash, step);
    }
    if (at == kSealed) word_ = 0 - hash;
  }
  // Likewise: sends them, if the warp finds that it may.
  __device__ void send_early() {
    if (p_.group.ranks() > 32) return;
    sent_ = LlDispatchTurn(p_, s_, kLlDispatch).early_epoch();
    if (sent_ != 0) send_words(sent_, p_.group.areas);
  }
  // Behind it.
  __device__ void send(std::uint64_t epoch) const {
    if (sent_ != 0) return;
    LlDispatchTurn turn(p_, s_, kLlDispatch);
    if (p_.group.masks) {
      LlRecord record = p_.record;
      record.fingerprint = own_fingerprint(p_);
      return turn.send_record(record);
    }
    send_words(epoch, s_.area);
  }

 private:
  __device__ static std::uint32_t word_at() {
    return static_cast<std::uint32_t>(lane_id()) % LlPipeline::kWords;
  }
  __device__ void send_words(std::uint64_t epoch, const HeapRange* areas) const {
    const LlPipeline pipeline = ll_pipeline_of(p_.group, kLlDispatch, areas);
    const std::uint64_t word = word_ + (word_at() == LlPipeline::kWords - 1 ? epoch : 0);
#pragma unroll 1
    for (int r = lane_id() / LlPipeline::kWords; r < p_.group.ranks();
         r += 32 / LlPipeline::kWords) {
      pipeline.send_word(r, epoch, word_at(), word);
    }
    __syncwarp();
  }

  const LlDispatchParams& p_;
  LlShared& s_;
  std::uint64_t word_ = 0;
  std::uint64_t sent_ = 0;  // the operation whose record has been sent
};

__device__ __forceinline__ void give_credit(const LlDispatchParams& p, LlShared& turn) {
  const LlDispatchTurn launch(p, turn, kLlDispatch);
  launch.give_credit();
  launch.free_left();
}

__device__ __forceinline__ void end_turn(const LlDispatchParams& p, LlShared& turn) {
  LlDispatchTurn(p, turn, kLlDispatch).end();
}

// One thread of a receiver block, behind its barrier.
__device__ __forceinline__ void tell_if_met(const LlDispatchParams& p, LlShared& turn,
                                            std::uint64_t epoch) {
  const bool met = LlDispatchTurn(p, turn, kLlDispatch).has_met();
  if (met || turn.findings.kind != LlFault::none) tell_operation(p, turn, epoch);
}

// One thread of the last block, behind its barrier.
__device__ __forceinline__ void note_left(const LlDispatchParams& p, LlShared& turn) {
  LlDispatchTurn(p, turn, kLlDispatch).note_left();
}

// One thread of the launch, when all of its block is over, where a call has a mistake or is
// refused.
__device__ __noinline__ void tell_mistake(const LlDispatchParams& p, LlShared& turn) {
  LlDispatchTurn launch(p, turn, kLlDispatch);
  const bool mistake = p.step.failed || p.step.silent;  // which the host has told
  if (mistake) return launch.count_mistake();
  launch.tell_refusal();
}

// The verdict about an operation. All threads of a receiver block, once for each; `good`: no wait
// of this thread has failed.
__device__ __forceinline__ LlVerdict await_verdict(const LlShared& turn, bool good) {
  if (__syncthreads_or(good ? 0 : 1) != 0) return LlVerdict::fatal;
  return static_cast<LlVerdict>(turn.verdict);
}

// A block's part of a dispatch. Each of its warps has one role from the beginning to the end; roles
// share no code but what all must do, since what one role keeps would take registers of the others.
// Parts are locals, each handed on by reference: parts in one object that refer to one another
// would lie in memory.
template <class Quantiser, bool kMany, bool kRows>
class DispatchBlock {
 public:
  using Sender = LlSender<Quantiser, kMany>;
  using List = LlList<kMany, kRows>;
  using Teller = std::conditional_t<kMany, LlManyTeller, LlFewTeller>;

  __device__ DispatchBlock(const LlDispatchParams& params, DispatchShared& shared)
      : p_(params), s_(shared), parts_{params.smem, ptx::dynamic_shared()} {}

  __device__ void run() const {
    if (sends()) {
      if (moves()) {
        send();
      } else {
        control_sender();
      }
    } else if (moves()) {
      move();
    } else if (warp_in_block() == kLlWatch) {
      watch();
    } else if (warp_in_block() == kLlHelper) {
      help();
    } else {
      take_tails();
    }
    if (!has_mistake()) return;
    __syncthreads();
    if (threadIdx.x == 0) tell_mistake(p_, s_.turn);
  }

 private:
  __device__ bool sends() const { return static_cast<int>(blockIdx.x) < p_.senders; }
  __device__ bool is_first_receiver() const { return static_cast<int>(blockIdx.x) == p_.senders; }
  __device__ bool tells() const { return blockIdx.x == gridDim.x - 1; }
  __device__ static bool moves() { return threadIdx.x < kLlMovers; }
  // Behind the first barrier.
  __device__ bool takes_turn() const {
    return !s_.turn.course.fatal && s_.turn.course.status == XD_SUCCESS;
  }
  // True if places of rows are looked for in front of the verdict: where rows have the form that
  // this launch sends, and no source is left out.
  __device__ bool is_early() const { return s_.turn.course.rows && !p_.group.masks; }
  // Behind the first barrier: this block tells a mistake of the call itself.
  __device__ bool has_mistake() const {
    const LlCourse& course = s_.turn.course;
    const bool mistake = p_.step.failed || p_.step.silent || course.status != XD_SUCCESS;
    return blockIdx.x == 0 && mistake && !course.fatal;
  }
  __device__ LlVerdict await(bool good) const { return await_verdict(s_.turn, good); }
  template <class Receive>
  __device__ void receive_all(Receive receive) const;
  template <bool kMoves>
  __device__ void take_rows(std::uint64_t epoch) const;

  __device__ void send() const;
  __device__ void control_sender() const;
  __device__ void move() const;
  __device__ void take_tails() const;
  __device__ void help() const;
  __device__ void watch() const;
  __device__ void copy_tables(int thread, int threads) const;

  const LlDispatchParams& p_;
  DispatchShared& s_;
  const LlSmemParts parts_;
};

#define XD_LL_BLOCK(type)                            \
  template <class Quantiser, bool kMany, bool kRows> \
  __device__ inline type DispatchBlock<Quantiser, kMany, kRows>

// Copies tables to shared memory; receiver blocks also have the candidates' names. All first loads
// are on their way before one of them is waited for.
XD_LL_BLOCK(void)::copy_tables(int thread, int threads) const {
  const int names = !sends() && p_.smem.has_names ? p_.group.ranks() * p_.group.max_tokens : 0;
  const int places = p_.smem.has_places ? p_.group.experts : 0;
  const int last = threads - 1 - thread;
  std::uint32_t name = 0, place = 0;
  HeapRange area{};
  if (thread < names) name = p_.group.order[thread];
  if (thread < places) place = p_.group.places[thread];
  if (last < p_.group.ranks()) area = p_.group.areas[last];
  if (thread < names) parts_.names()[thread] = name;
  if (thread < places) parts_.places()[thread] = place;
  if (last < p_.group.ranks()) s_.turn.area[last] = area;
#pragma unroll 1
  for (int i = thread + threads; i < names; i += threads) parts_.names()[i] = p_.group.order[i];
#pragma unroll 1
  for (int i = thread + threads; i < places; i += threads) parts_.places()[i] = p_.group.places[i];
#pragma unroll 1
  for (int r = last + threads; r < p_.group.ranks(); r += threads) {
    s_.turn.area[r] = p_.group.areas[r];
  }
}

// ---- Sender blocks -----------------------------------------------------------------------------

XD_LL_BLOCK(void)::send() const {
  const std::uint32_t* const places = p_.smem.has_places ? parts_.places() : p_.group.places;
  Sender sender(p_, s_.turn, places, parts_.tails());
  if (p_.step.send && !p_.step.failed) sender.load_first();
  __syncthreads();
  if (takes_turn() && s_.turn.course.rows) sender.send_all(s_.turn.course.send_epoch);
}

XD_LL_BLOCK(void)::control_sender() const {
  if (warp_in_block() == kLlWatch) {
    ll_begin(p_, s_.turn);
  } else {
    copy_tables(threadIdx.x - kLlMovers, kLlThreads - kLlMovers - 32);
  }
  __syncthreads();
  if (threadIdx.x == kLlMovers && takes_turn()) end_turn(p_, s_.turn);
}

// ---- Receiver blocks ---------------------------------------------------------------------------

// All threads of a receiver block. An operation that nobody waits for is only counted.
template <class Quantiser, bool kMany, bool kRows>
template <class Receive>
__device__ inline void DispatchBlock<Quantiser, kMany, kRows>::receive_all(Receive receive) const {
  const LlCourse& course = s_.turn.course;
  if (!course.receives) return;
  if (!course.leaves) receive(course.take_epoch);
  // The helper waits for the other warps, and tells what they have met.
  if (warp_in_block() == kLlHelper) {
    ptx::barrier_sync(kLlEndBarrier, kLlThreads);
    if (lane_id() == 0) {
      tell_if_met(p_, s_.turn, course.take_epoch);
      if (tells()) note_left(p_, s_.turn);
    }
  } else {
    ptx::barrier_arrive(kLlEndBarrier, kLlThreads);
  }
}

XD_LL_BLOCK(void)::move() const {
  LlDispatchTurn turn(p_, s_.turn, kLlDispatch);
  Teller teller(p_, s_.turn);
  if (tells()) teller.begin(turn);
  copy_tables(threadIdx.x, kLlMovers);
  List(p_, turn, s_.list, parts_).clear();
  if (threadIdx.x < kLlGroups * 2) s_.receive.lost[threadIdx.x / 2][threadIdx.x % 2] = 0;
  __syncthreads();
  if (!takes_turn()) return;
  if (tells() && s_.turn.course.sends) {
    teller.tell(s_.turn.course.send_epoch);
    if (threadIdx.x == 0 && !s_.turn.course.rows && !s_.turn.course.receives) {
      turn.note_failed_send();
    }
  }
  receive_all([&](std::uint64_t epoch) { take_rows<true>(epoch); });
}

XD_LL_BLOCK(void)::take_tails() const {
  __syncthreads();
  if (!takes_turn()) return;
  if (tells() && warp_in_block() == kLlHelper - 1) give_credit(p_, s_.turn);
  receive_all([&](std::uint64_t epoch) { take_rows<false>(epoch); });
}

// Movers and tail warps.
template <class Quantiser, bool kMany, bool kRows>
template <bool kMoves>
__device__ inline void DispatchBlock<Quantiser, kMany, kRows>::take_rows(
    std::uint64_t epoch) const {
  LlDispatchTurn turn(p_, s_.turn, kLlDispatch);
  List list(p_, turn, s_.list, parts_);
  bool good = true;
  if constexpr (kMoves) good = list.collect(epoch);
  const bool early = is_early();
  LlVerdict verdict = LlVerdict::go;
  if (!early) {
    verdict = await(good);
    if (verdict == LlVerdict::fatal) return;
    if (kMoves && p_.group.masks) list.drop_gone();
  }
  ptx::barrier_sync(kLlListBarrier, kLlHelper * 32);
  if constexpr (kRows && !kMoves) {
    if (warp_in_block() == kLlMovers / 32) list.make_zones();
  }
  LlReceiver<Quantiser, kMany, kRows, kMoves, false> receiver(p_, turn, list, s_.list, s_.receive,
                                                              epoch);
  verdict = receiver.take_all(!early, verdict, [this, good] { return await(good); });
  if constexpr (kRows) {
    if (verdict == LlVerdict::go) ll_fill_behind<kMany>(p_, s_.turn, s_.list, kMoves);
  }
  if (kMoves && list.heads() && verdict != LlVerdict::fatal) {
    write_head<kMany, kRows>(p_, s_, verdict == LlVerdict::go);
  }
}

XD_LL_BLOCK(void)::help() const {
  if (lane_id() == 0) {
    s_.receive.taken = {p_.form, static_cast<int>(p_.record.topk)};
    if (is_first_receiver()) prepare_head<kMany, kRows>(p_, s_);
  }
  LlRecordSender record(p_, s_.turn);
  if (tells()) {
    record.prepare();
    record.send_early();
  }
  __syncthreads();
  if (!takes_turn()) return;
  if (tells() && s_.turn.course.sends) record.send(s_.turn.course.send_epoch);
  if (lane_id() == 0) end_turn(p_, s_.turn);
  receive_all([&](std::uint64_t) { await(true); });
}

XD_LL_BLOCK(void)::watch() const {
  if (lane_id() == 0) s_.turn.findings.kind = LlFault::none;
  ll_begin(p_, s_.turn);
  __syncwarp();
  LlDispatchTurn(p_, s_.turn, kLlDispatch).clear_sources();  // movers look at them as well
  __syncthreads();
  if (!takes_turn()) return;
  receive_all([&](std::uint64_t epoch) {
    watch_sources<kMany, kIsGiven<Quantiser>>(p_, s_, epoch);
    const LlVerdict verdict = await(s_.turn.failed == 0);
    if (verdict != LlVerdict::go || !is_first_receiver()) return;
    count_bad_ids<kMany>(p_, s_, epoch);
    complete_head<kMany, kRows>(p_, s_, epoch);
  });
}

#undef XD_LL_BLOCK

// Profilers' users, DeepEP's tests among them, look for "::dispatch" in names of kernels.
namespace low_latency {
template <class Quantiser, bool kMany, bool kRows>
__global__ void __launch_bounds__(kLlThreads, 1)
    dispatch_kernel(const __grid_constant__ LlDispatchParams p) {
  __shared__ DispatchShared shared;
  fetch_params(p);
  if (p.group.dependent) ptx::let_next_kernel_start();
  ptx::wait_for_kernel_before();
  DispatchBlock<Quantiser, kMany, kRows>(p, shared).run();
}
}  // namespace low_latency

using DispatchKernel = void (*)(LlDispatchParams);

template <bool kMany, bool kRows>
DispatchKernel kernel_for(const QuantiseFormat& format) {
  return !format         ? low_latency::dispatch_kernel<NotQuantised, kMany, kRows>
         : format.powers ? low_latency::dispatch_kernel<ByPowers, kMany, kRows>
                         : low_latency::dispatch_kernel<ByQuotients, kMany, kRows>;
}

// The kernels for few ranks and choices have both in registers.
template <bool kRows>
DispatchKernel kernel_for(const LlDevice& group, const QuantiseFormat& format) {
  return ll_is_small(group.ranks(), group.max_topk) ? kernel_for<false, kRows>(format)
                                                    : kernel_for<true, kRows>(format);
}

template <bool kRows>
void launch_dispatch(const LlDispatchParams& params, const LaunchShape& shape,
                     cudaStream_t stream) {
  launch_dependent(kernel_for<kRows>(params.group, params.format), params, shape,
                   params.group.dependent, stream);
}

template <bool kRows>
void load_dispatch(const LlDevice& group, const LaunchShape& shape, std::size_t shared_bytes) {
  for (const auto way :
       {XD_EP_QUANTISE_NONE, XD_EP_QUANTISE_FP8_BLOCK128, XD_EP_QUANTISE_FP8_BLOCK128_POW2}) {
    load_dependent(kernel_for<kRows>(group, quantise_format(way)), shape, shared_bytes);
  }
}

}  // namespace
}  // namespace xd::ep::cuda
