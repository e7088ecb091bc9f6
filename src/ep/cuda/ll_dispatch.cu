// xd_ep_ll_dispatch: rows of tokens to the slots of their experts.
//
// A block either only sends rows or only receives them, and the launch's last block also tells the
// routing. See docs/internals/low_latency.md for the whole course and its proof.
//
//   blocks [0, senders)         LlSender
//   blocks [senders, all)       LlList, LlSources, LlReceiver; the first of them also LlHead
//   the last block              LlTeller, this rank's record and credit
//
// A launch does the send half, the receive half or both; the other roles have nothing to do then.
#include "ep/cuda/launch.cuh"
#include "ep/cuda/ll_dispatch_head.cuh"
#include "ep/cuda/ll_dispatch_receive.cuh"
#include "ep/cuda/ll_kernels.h"
#include "ep/cuda/ll_sources.cuh"

namespace xd::ep::cuda {
namespace {

struct DispatchShared {
  LlShared turn;
  LlListShared list;
  LlReceiveShared receive;
  LlHeadShared head;
};

// A receive half must have tensors for the rows that its send half has sent. One thread.
__device__ inline bool fits_what_was_sent(const LlDispatchParams& p, LlShared& turn) {
  const LlRecord& own = turn.record[p.group.rank()];
  if (turn.course.rows || p.step.failed || p.step.silent || turn.failed != 0) return true;
  if (own.call.status != XD_SUCCESS) return true;
  const auto quantise = static_cast<xd_ep_quantise>(own.quantise);
  const QuantiseFormat sent = quantise_format(quantise);
  const std::uint32_t bytes = sent ? own.row_bytes / 2 : own.row_bytes;
  const auto type = sent ? DType::e4m3 : static_cast<DType>(own.dtype);
  if (p.record.quantise == own.quantise && p.recv_row_bytes == bytes &&
      p.recv_type == static_cast<std::uint8_t>(type)) {
    return true;
  }
  turn.findings = {};
  turn.findings.kind = LlFault::not_as_sent;
  turn.findings.got = p.recv_row_bytes;
  turn.findings.expected = bytes;
  return false;
}

// The steps of a receiver block that move no rows: see ll_begin(). Warps of which each calls one.
template <bool kMany>
__device__ __forceinline__ void watch_sources(const LlDispatchParams& p, DispatchShared& shared,
                                              std::uint64_t epoch, bool drains) {
  LlShared& s = shared.turn;
  if (lane_id() == 0) {
    s.bad_ids = 0;
    s.bad_id_rank = p.group.ranks();
    s.findings.kind = LlFault::none;
  }
  __syncwarp();
  LlDispatchTurn turn(p, s, kLlDispatch);
  const bool first = static_cast<int>(blockIdx.x) == p.senders;
  LlSources<kMany>(p, turn, shared.list, epoch).wait(first);
  turn.judge(lane_id() == 0 && (drains || !fits_what_was_sent(p, s)));
}

template <bool kMany>
__device__ __forceinline__ void write_head(const LlDispatchParams& p, DispatchShared& shared,
                                           std::uint64_t epoch, bool delivers) {
  LlDispatchTurn turn(p, shared.turn, kLlDispatch);
  const LlRoomParts parts{p.room, ptx::dynamic_shared()};
  const LlList<kMany> list(p, turn, shared.list, parts, nullptr);
  LlHead<kMany> head(p, turn, list, shared.list, shared.head);
  if (delivers) return head.write(epoch);
  const bool own = !p.step.failed && !p.step.silent && epoch == shared.turn.course.take_epoch;
  if (own) head.write_nothing();
}

// The same before the block's first barrier, where the block is the first receiver.
template <bool kMany>
__device__ __forceinline__ void prepare_head(const LlDispatchParams& p, DispatchShared& shared) {
  LlDispatchTurn turn(p, shared.turn, kLlDispatch);
  const LlRoomParts parts{p.room, ptx::dynamic_shared()};
  const LlList<kMany> list(p, turn, shared.list, parts, nullptr);
  LlHead<kMany>(p, turn, list, shared.list, shared.head).prepare();
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

// All lanes of a warp of the last block.
__device__ __forceinline__ void send_own_record(const LlDispatchParams& p, LlShared& turn) {
  LlDispatchTurn(p, turn, kLlDispatch).send_record(p.record, [](int, LlRecord&) {});
}

// One thread of the block, where a call has a mistake or is refused.
__device__ __noinline__ void tell_mistake(const LlDispatchParams& p, LlShared& turn) {
  LlDispatchTurn launch(p, turn, kLlDispatch);
  const bool mistake = p.step.failed || p.step.silent;  // which the host has told
  if (mistake) return launch.count_mistake();
  launch.tell_refusal();
}

// One thread of the block, when all of it is over.
__device__ __forceinline__ void finish_block(const LlDispatchParams& p, LlShared& turn) {
  const bool good = turn.course.status == XD_SUCCESS;
  if (turn.course.fatal) return;
  if ((p.step.failed || p.step.silent || !good) && blockIdx.x == 0) tell_mistake(p, turn);
  if (good) LlDispatchTurn(p, turn, kLlDispatch).end();
}

// A block's part of a dispatch. Its parts are locals of run(), each handed on by reference: parts
// in one object that refer to one another would lie in memory.
template <class Quantiser, bool kMany, int kMostTopk>
class DispatchBlock {
 public:
  using Sender = LlSender<Quantiser, kMany>;
  using List = LlList<kMany>;
  using Teller = LlTeller<kMostTopk>;

  __device__ DispatchBlock(const LlDispatchParams& params, DispatchShared& shared)
      : p_(params), s_(shared) {}

  __device__ void run() {
    LlDispatchTurn turn(p_, s_.turn, kLlDispatch);
    const LlRoomParts parts{p_.room, ptx::dynamic_shared()};
    const std::uint32_t* const places =
        p_.room.has_places ? parts.at<std::uint32_t>(p_.room.places) : p_.group.places;
    List list(p_, turn, s_.list, parts, places);
    if (sends()) {
      // Movers do not come past the call in begin(), over which their first rows would have to lie
      // in memory.
      if (moves()) {
        Sender sender(p_, s_.turn, places, parts.tails());
        if (p_.step.send && !p_.step.failed) sender.load_first();
        __syncthreads();
        if (takes_turn() && s_.turn.course.rows) sender.send_all(s_.turn.course.send_epoch);
      } else {
        if (begins()) {
          ll_begin(p_, s_.turn, kLlDispatch);
        } else {
          copy_tables(parts, threadIdx.x - kLlMovers, kLlTellers - 32);
        }
        __syncthreads();
      }
    } else {
      Teller teller(p_, s_.turn);
      const bool tells = turn.is_last_block();
      if (tells) teller.load_first();
      list.clear();
      if (threadIdx.x < kLlGroups * 2) s_.receive.lost[threadIdx.x / 2][threadIdx.x % 2] = 0;
      if (begins()) {
        ll_begin(p_, s_.turn, kLlDispatch);
        list.load_first();
      } else if (moves()) {
        list.load_first();
        copy_tables(parts, threadIdx.x, kLlMovers - 32);
      } else {
        if (is_first_receiver()) prepare_head<kMany>(p_, s_);
      }
      if (tells) teller.prepare_first();
      __syncthreads();
      if (takes_turn()) {
        if (tells) announce(turn, teller);
        if (s_.turn.course.receives) receive_all(turn, list, parts);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) finish_block(p_, s_.turn);
  }

 private:
  __device__ bool sends() const { return static_cast<int>(blockIdx.x) < p_.senders; }
  __device__ bool is_first_receiver() const { return static_cast<int>(blockIdx.x) == p_.senders; }
  __device__ static bool moves() { return threadIdx.x < kLlMovers; }
  __device__ static int control_warp() { return warp_in_block() - kLlMovers / 32; }
  // The warp that begins the turn loads nothing else.
  __device__ bool begins() const {
    return warp_in_block() == (sends() ? kLlThreads / 32 : kLlMovers / 32) - 1;
  }
  __device__ bool takes_turn() const {
    return !s_.turn.course.fatal && s_.turn.course.status == XD_SUCCESS;
  }

  __device__ void copy_tables(const LlRoomParts& parts, int thread, int threads) const;
  __device__ void announce(const LlDispatchTurn& turn, Teller& teller) const;
  __device__ void receive_all(LlDispatchTurn& turn, List& list, const LlRoomParts& parts) const;
  __device__ void receive(LlDispatchTurn& turn, List& list, const LlRoomParts& parts,
                          std::uint64_t epoch, bool drains) const;

  const LlDispatchParams& p_;
  DispatchShared& s_;
};

#define XD_LL_BLOCK(type)                               \
  template <class Quantiser, bool kMany, int kMostTopk> \
  __device__ inline type DispatchBlock<Quantiser, kMany, kMostTopk>

XD_LL_BLOCK(void)::copy_tables(const LlRoomParts& parts, int thread, int threads) const {
  // The last threads begin with the areas, the first with the experts: no load waits for another.
  for (int r = threads - 1 - thread; r < p_.group.ranks(); r += threads) {
    s_.turn.area[r] = p_.group.areas[r];
  }
  if (!p_.room.has_places) return;
  auto* to = parts.at<std::uint32_t>(p_.room.places);
  for (int e = thread; e < p_.group.experts; e += threads) to[e] = p_.group.places[e];
}

// The last block.
XD_LL_BLOCK(void)::announce(const LlDispatchTurn& turn, Teller& teller) const {
  const LlCourse& course = s_.turn.course;
  if (course.sends) {
    if (control_warp() == 1) send_own_record(p_, s_.turn);
    teller.tell(course.send_epoch);
    if (threadIdx.x == 0 && !course.rows && !course.receives) turn.note_failed_send();
  }
  if (control_warp() == 0) turn.give_credit();
}

XD_LL_BLOCK(void)::receive_all(LlDispatchTurn& turn, List& list, const LlRoomParts& parts) const {
  const LlCourse& course = s_.turn.course;
  const int besides = turn.taken_besides();
#pragma unroll 1
  for (int i = 0; i <= besides; ++i) {
    if (i > 0) {
      list.clear();
      __syncthreads();
    }
    receive(turn, list, parts, course.take_epoch + static_cast<std::uint64_t>(i),
            i > 0 || course.drains);
  }
}

// All threads of a receiver block.
XD_LL_BLOCK(void)::receive(LlDispatchTurn& turn, List& list, const LlRoomParts& parts,
                           std::uint64_t epoch, bool drains) const {
  LlShared& s = s_.turn;
  if (moves()) list.collect(epoch);
  if (warp_in_block() == kLlThreads / 32 - 1) watch_sources<kMany>(p_, s_, epoch, drains);
  __syncthreads();
  if (s.failed != 0) return;
  if (p_.group.masks) {
    bool gone = false;
    for (int r = 0; r < p_.group.ranks(); ++r) gone |= s.gone[r] != 0;
    if (gone && moves()) list.drop_gone();
    if (gone) __syncthreads();
  }
  if (moves()) list.list();
  __syncthreads();
  const bool delivers = s.verdict == static_cast<int>(LlVerdict::go);
  if (moves()) {
    LlReceiver<Quantiser, kMany> receiver(p_, turn, list, parts, s_.receive);
    receiver.take_all(epoch, !delivers, s.course.rows, s_.list.own_units);
  } else if (is_first_receiver()) {
    write_head<kMany>(p_, s_, epoch, delivers);
  }
  __syncthreads();
  if (threadIdx.x == 0 && (turn.has_met() || s.findings.kind != LlFault::none)) {
    tell_operation(p_, s, epoch);
  }
}

#undef XD_LL_BLOCK

template <class Quantiser, bool kMany, int kMostTopk>
__global__ void __launch_bounds__(kLlThreads, 1)
    ll_dispatch_kernel(const __grid_constant__ LlDispatchParams p) {
  __shared__ DispatchShared shared;
  if (p.group.dependent) ptx::let_next_kernel_start();
  ptx::wait_for_kernel_before();
  DispatchBlock<Quantiser, kMany, kMostTopk>(p, shared).run();
}

using DispatchKernel = void (*)(LlDispatchParams);

template <bool kMany, int kMostTopk>
DispatchKernel kernel_for(const QuantiseFormat& format) {
  return !format         ? ll_dispatch_kernel<NotQuantised, kMany, kMostTopk>
         : format.powers ? ll_dispatch_kernel<ByPowers, kMany, kMostTopk>
                         : ll_dispatch_kernel<ByQuotients, kMany, kMostTopk>;
}

// The kernels for few ranks and choices have both in registers.
DispatchKernel kernel_for(const LlDevice& group, const QuantiseFormat& format) {
  return ll_is_small(group.ranks(), group.max_topk) ? kernel_for<false, kLlFewTopk>(format)
                                                    : kernel_for<true, kMaxTopk>(format);
}

}  // namespace

void launch(const LlDispatchParams& params, const LaunchShape& shape, cudaStream_t stream) {
  launch_dependent(kernel_for(params.group, params.format), params, shape, params.group.dependent,
                   stream);
}

void load_ll_dispatch(const LlDevice& group, const LaunchShape& shape, std::size_t shared_bytes) {
  for (const auto way :
       {XD_EP_QUANTISE_NONE, XD_EP_QUANTISE_FP8_BLOCK128, XD_EP_QUANTISE_FP8_BLOCK128_POW2}) {
    load_dependent(kernel_for(group, quantise_format(way)), shape, shared_bytes);
  }
}

}  // namespace xd::ep::cuda
