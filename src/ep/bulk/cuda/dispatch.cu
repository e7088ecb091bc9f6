// dispatch, and combine_bwd: every rank stores its tokens' rows into their final places in the
// peers' tensors, one row per (token, rank); the owner copies it to the token's other rows there.
//
//   memory                written by                   read by
//   peer's receive rows   senders (bulk stores): the   the peer's receivers, after the chunk's
//                         token's first row there      flag; its caller, after the done flags
//   peer's weights, ...   senders (plain stores)       likewise
//   chunk[src][c] there   a sender's warp, when all    the peer's receivers
//                         rows of chunk c have landed
//   own receive rows      receivers: a token's other   the caller
//                         rows, padding, tail; scaled
//                         rows: scaler.cuh
//   own tensors with      all, at the end: late.cuh    the caller
//   strides
//
// Blocks [0, send_blocks) send first, and receive when they have sent. The others receive from the
// start. Senders wait for entry records only; receivers wait for chunk flags, which senders raise
// without waiting for peers. Where the receive tensors need no work (RANK_MAJOR in symmetric
// memory), no block receives and no chunk flag is raised: the done flags say that rows have landed.
#include "ep/bulk/cuda/dispatch_beside.cuh"
#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/late.cuh"
#include "ep/bulk/cuda/mover.cuh"
#include "ep/bulk/cuda/remote/dispatch.cuh"
#include "ep/bulk/cuda/rows.cuh"
#include "ep/bulk/cuda/scaler.cuh"
#include "ep/plan/cuda/launch.cuh"

#include <type_traits>

namespace xd::ep::cuda {
namespace {

// A kernel's `Scaled` is the type of rows that are multiplied by their weights at their owner, or
// this one.
struct NotScaled {};

// ---- Sending -----------------------------------------------------------------------------------

// The tokens that a warp sends at a time: those of a chunk, or one where nobody waits for chunks,
// so that all warps end at the same time.
__device__ int tokens_at_once(const Turn& turn, bool in_chunks) {
  return in_chunks ? sent_chunks(turn.selects()).tokens_per_chunk(turn.plan().tokens) : 1;
}

// `kRemote`: some ranks are on other machines.
template <class Quantiser, bool kRemote>
class Sender {
 public:
  __device__ Sender(const DispatchParams& params, Turn& turn, TurnShared& shared,
                    const PlanParts& plan, Mover<Quantiser>& mover)
      : p_(params), turn_(turn), shared_(shared), plan_(plan), mover_(mover) {}

  // Fetches the token that the warp sends first, while the rank waits for its peers.
  __device__ void start() {
    const int tokens = turn_.plan().tokens;
    const int unit = first_unit({0, p_.send_blocks});
    if (!turn_.moves() || unit < 0) return;
    const int token = unit * tokens_at_once(turn_, p_.receives);
    if (token >= tokens) return;
    first_ = token;
    first_code_ = code_of(first_);
    mover_.start(row_of(first_));
  }

  // With a blank verdict it raises flags without rows. The last rows have not landed when it
  // returns.
  __device__ void send_all() {
    const bool moves = turn_.moves();
    const int tokens = turn_.plan().tokens;
    const bool in_chunks = any_receiver();
    if (in_chunks != p_.receives) forget_first();
    const int each = tokens_at_once(turn_, in_chunks);
    const Team team{0, p_.send_blocks};
    for_each_unit(turn_, 0, team, (tokens + each - 1) / each, !in_chunks, [&](int unit) {
      const int first = unit * each, last = min(first + each, tokens);
      unsigned due = moves ? due_tokens(first, last) : 0;
#pragma unroll 1
      for (; due != 0; due &= due - 1) send_token(first + __ffs(static_cast<int>(due)) - 1);
      if (in_chunks) {
        mover_.landed();
        turn_.release_chunk(unit, [&](int d) { return receives(d); });
      }
      return true;
    });
  }

 private:
  // True if rank d waits for chunks.
  __device__ bool receives(int d) const {
    if (d == turn_.rank() && (p_.own_rows_direct || stays(d))) return false;
    return turn_.group().layout.row_per_expert || turn_.peer(d).staged;
  }
  __device__ bool any_receiver() const {
    bool any = false;
#pragma unroll 1
    for (int d = lane_id(); d < turn_.ranks(); d += 32) any |= receives(d);
    return __any_sync(kAllLanes, any);
  }

  // Where only a peer waits for chunks, or only this rank does, the warp's first token is another
  // one.
  __device__ void forget_first() {
    mover_.landed();
    first_ = -1;
  }

  // The code of this lane's choice.
  __device__ std::uint32_t code_of(int token) const {
    const int topk = turn_.plan().topk;
    return lane_id() < topk ? plan_.code[static_cast<std::uint64_t>(token) * topk + lane_id()]
                            : RowCodec::kNone;
  }
  __device__ MoverSource row_of(int token) const {
    return {p_.tokens + static_cast<std::uint64_t>(token) * p_.send.row_bytes,
            p_.scales.data != nullptr ? p_.scales.row(token) : nullptr};
  }

  // The tokens [first, last), up to 31, some of whose rows may go in the call's part, as bits; in a
  // call without a part all of them. A lane looks at a token, so that those of other parts cost
  // little. All lanes call it.
  __device__ unsigned due_tokens(int first, int last) const {
    if (kRemote || !turn_.selects()) return (1u << (last - first)) - 1;
    const int token = first + lane_id(), topk = turn_.plan().topk;
    bool due = false;
    if (token < last) {
      const std::uint32_t* codes = plan_.code + static_cast<std::uint64_t>(token) * topk;
#pragma unroll 1
      for (int k = 0; k < topk; ++k) due |= has_row_in_part(turn_, shared_, codes[k]);
      due |= token == first_;
    }
    return __ballot_sync(kAllLanes, due);
  }

  __device__ void send_token(int token) {
    Choice c = decode(turn_, shared_, token == first_ ? first_code_ : code_of(token));
    if (!kRemote && turn_.selects()) keep_due(turn_, c);
    MoverTarget to{nullptr, nullptr};
    if constexpr (kRemote) to = remote_target(p_, turn_, token, c);
    if ((c.leader && !stays(c.rank)) || (c.valid && goes_everywhere(c.rank))) {
      const PeerTensors& peer = turn_.peer(c.rank);
      to.row = peer.rows + c.row * p_.recv_tokens.row_bytes;
      to.beside = peer.scales + c.row * p_.recv_scales.row_bytes;
    }
    // A row that start() has fetched leaves the mover here, also if nobody wants it.
    if (token != first_ && !__any_sync(kAllLanes, to.row != nullptr)) return;
    const MoverSource from = row_of(token);
    mover_.move(from, to);
    if (from.beside != nullptr && p_.send.beside_bytes == 0) send_scales(from.beside, to);
    store_beside(
        p_, turn_, c, [&] { return p_.topk_weights; }, token);
  }

  // True for this rank's own rows where they are scaled, out of `tokens`.
  __device__ bool stays(int rank) const { return p_.weights != nullptr && rank == turn_.rank(); }
  // True for rows that stay on this rank and go to all their places at once, whether or not they
  // are staged.
  __device__ bool goes_everywhere(int rank) const {
    return p_.own_rows_direct && rank == turn_.rank() && turn_.group().layout.row_per_expert;
  }

  // Sends scales that no stage can hold.
  __device__ void send_scales(const std::byte* from, const MoverTarget& to) const {
    unsigned wanting = __ballot_sync(kAllLanes, to.row != nullptr);
#pragma unroll 1
    while (wanting != 0) {
      const int lane = __ffs(static_cast<int>(wanting)) - 1;
      wanting &= wanting - 1;
      auto* there = reinterpret_cast<std::byte*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.beside), lane));
      copy_elements(there, p_.scales.element, from, p_.scales.col_stride, p_.scales.element,
                    static_cast<std::uint32_t>(p_.scales.row_bytes / p_.scales.element));
    }
  }

  const DispatchParams& p_;
  Turn& turn_;
  TurnShared& shared_;
  const PlanParts& plan_;
  Mover<Quantiser>& mover_;
  int first_ = -1;                              // the token that start() has fetched
  std::uint32_t first_code_ = RowCodec::kNone;  // code of this lane's choice
};

// ---- Receiving ---------------------------------------------------------------------------------

template <class Quantiser>
class Receiver {
 public:
  __device__ Receiver(const DispatchParams& params, Turn& turn, const PlanParts& plan,
                      Mover<Quantiser>& mover)
      : p_(params), turn_(turn), plan_(plan), mover_(mover) {}

  // False = fatal.
  __device__ bool receive_all() {
    const Team team = blocks_behind(p_.send_blocks);
    const bool good = for_each_arrival(
        turn_, plan_, sent_chunks(turn_.selects()), 0, 1, team, [&](const Arrival& a) {
          if (a.source == turn_.rank() && p_.own_rows_direct) return true;
          const ItemRange items = items_of(turn_, plan_, a.source, a.token, a.tokens);
          const unsigned due = due_items(turn_, plan_, items, false);
          if (due == 0) return true;
          if (!await_chunk(turn_, a.source, a.flag)) return false;
          // This thread sees the peers' stores; the fence makes bulk loads see them as well.
          ptx::fence_proxy_async_global();
          for_each_item(turn_, plan_, items, due,
                        [&](const ItemRows& rows, std::uint32_t) { receive(rows); });
          return true;
        });
    mover_.landed();
    return good;
  }

 private:
  __device__ void receive(const ItemRows& rows) {
    if (rows.count == 0) return;
    const std::uint32_t first = __shfl_sync(kAllLanes, rows.row, 0);
    fan_out(rows, first);
    if (p_.fan_out.beside_bytes == 0) copy_rows(p_.recv_scales, rows, first);
    if (turn_.group().layout.choices_beside_rows) {
      copy_rows(p_.recv_weights, rows, first);
      copy_rows(p_.recv_topk_idx, rows, first);
    } else {
      copy_own(p_.recv_weights, rows);
    }
  }

  // Copies the row that crossed to all the token's rows.
  __device__ void fan_out(const ItemRows& rows, std::uint32_t first) {
    const ReceiveRows& tensor = p_.recv_tokens;
    const ReceiveRows& beside = p_.recv_scales;
    const bool carried = p_.fan_out.beside_bytes != 0;
    const bool staged = tensor.staged != nullptr || (carried && beside.staged != nullptr);
    const bool mine = lane_id() < rows.count && (lane_id() > 0 || staged);
    if (!__any_sync(kAllLanes, mine)) return;
    MoverTarget to{nullptr, nullptr};
    if (mine) {
      to = {tensor.data + rows.row * tensor.row_bytes, beside.data + rows.row * beside.row_bytes};
    }
    mover_.move({tensor.arrived(first), carried ? beside.arrived(first) : nullptr}, to);
  }

  __device__ void copy_rows(const ReceiveRows& tensor, const ItemRows& rows, std::uint32_t first) {
    if (tensor.data == nullptr) return;
#pragma unroll 1
    for (int i = tensor.staged != nullptr ? 0 : 1; i < rows.count; ++i) {
      const std::uint32_t row = __shfl_sync(kAllLanes, rows.row, i);
      copy_bytes(tensor.data + row * tensor.row_bytes, tensor.arrived(first), tensor.row_bytes);
    }
  }

  // Copies one value per row out of staging memory, each row its own.
  __device__ void copy_own(const ReceiveRows& tensor, const ItemRows& rows) {
    if (tensor.staged == nullptr || lane_id() >= rows.count) return;
    reinterpret_cast<float*>(tensor.data)[rows.row] =
        reinterpret_cast<const volatile float*>(tensor.staged)[rows.row];
  }

  const DispatchParams& p_;
  Turn& turn_;
  const PlanParts& plan_;
  Mover<Quantiser>& mover_;
};

// False = fatal. `shared`: that of the warp. All warps that have sent call it.
template <class Scaled, class Quantiser>
__device__ bool receive_all(const DispatchParams& p, Turn& turn, const PlanParts& plan,
                            std::byte* shared) {
  if constexpr (std::is_same_v<Scaled, NotScaled>) {
    Mover<Quantiser> mover(shared, p.fan_out);
    return Receiver<Quantiser>(p, turn, plan, mover).receive_all();
  } else {
    return Scaler<Scaled>(p, turn, plan, *reinterpret_cast<ScalerShared*>(shared)).scale_all();
  }
}

__device__ void fill_gaps(const DispatchParams& p, const Turn& turn, const PlanParts& plan) {
  if (has_gaps(turn)) {
    zero_gaps(turn, plan, p.recv_tokens);
    zero_gaps(turn, plan, p.recv_scales);
    zero_gaps(turn, plan, p.recv_weights);
    if (p.grad_weights != nullptr) {
      zero_gaps(turn, plan,
                {reinterpret_cast<std::byte*>(p.grad_weights), nullptr, p.grad_weights_rows,
                 sizeof(float)});
    }
  }
  if (!turn.group().layout.choices_beside_rows) return;
  fill_tail(turn, p.recv_weights, 0);
  fill_tail(turn, p.recv_topk_idx, 0xFF);  // -1 of either width
}

// Lets this rank's sender store into the caller's tensors: its own rows need no staging.
__device__ void take_own_tensors(const DispatchParams& p, PeerTensors& own) {
  own.rows = p.recv_tokens.data;
  own.scales = p.recv_scales.data;
  own.weights = p.recv_weights.data;
  own.extra = p.recv_topk_idx.data;
}

// True if work is left when the done flags have been raised.
__device__ bool closes_late(const DispatchParams& p) { return p.receives || p.num_late > 0; }

// The strides of the scales that lanes load beside rows; none where bulk copies load them.
__device__ Besides besides(const StridedRows& scales) {
  if (scales.data == nullptr || scales.bulk) return {};
  return {scales.element, scales.col_stride};
}

// All threads of every block call it, after leave(). A block may be the only one with a blank
// verdict, and the others wait for it at the barrier.
template <class Work>
__device__ void copy_late(const DispatchParams& p, Turn& turn, const PlanParts& plan,
                          const Work& remote) {
  const bool moves = turn.verdict() == Verdict::go;
  // A tensor that is missing somewhere makes the content undefined.
  if (moves && !turn.wait_all_done(remote)) return;
  // This rank's own receivers have also put rows there.
  if (p.receives && !turn.barrier(1)) return;
#pragma unroll 1
  for (int i = 0; i < p.num_late && moves; ++i) LateCopier(p.late[i], turn, plan).copy_all();
}

__device__ bool takes_part(const Turn& turn) {
  return turn.verdict() == Verdict::go || turn.verdict() == Verdict::blank;
}

// All threads, before the first row is stored.
__device__ void open_tensors(const DispatchParams& p, const Turn& turn, TurnShared& shared) {
  if (p.own_rows_direct && threadIdx.x == 0) take_own_tensors(p, shared.peer[turn.rank()]);
  __syncthreads();
  // Some thread of the block has seen that every peer has entered. The fence orders the bulk stores
  // behind that.
  ptx::fence_proxy_async_global();
}

template <class Scaled, class Quantiser, bool kRemote>
__global__ void __launch_bounds__(kMostMoverWarps * 32, 1)
    dispatch_kernel(const __grid_constant__ DispatchParams p) {
  __shared__ TurnShared shared;
  extern __shared__ __align__(128) std::byte stages[];
  Turn turn(p.turn, shared);
  fetch_params(p);
  const bool started = turn.begin();
  auto remote = make_remote_work<kRemote, RemoteDispatch>(p, turn, shared);
  const PlanParts plan = parts_of(p.turn.plan, turn.plan());  // of a plan that was judged
  constexpr bool kScaled = !std::is_same_v<Scaled, NotScaled>;
  std::byte* warp_stages =
      stages + warp_in_block() * dispatch_warp_bytes(p.send, p.fan_out, kScaled);
  {
    Mover<Quantiser> mover(warp_stages, p.send, besides(p.scales));
    Sender<Quantiser, kRemote> sender(p, turn, shared, plan, mover);
    if (started) {
      turn.enter();
      if constexpr (kRemote) remote.meet();
      sender.start();
      turn.await({.rows = p.recv_tokens.row_bytes,
                  .scales = p.recv_scales.row_bytes,
                  .weights = p.recv_weights.row_bytes,
                  .extra = p.indices ? turn.plan().topk * sizeof(std::int32_t) : 0,
                  .partials = 0,
                  .scale_alignment = p.scale_alignment});
    }
    if (takes_part(turn)) {
      open_tensors(p, turn, shared);
      if (static_cast<int>(blockIdx.x) < p.send_blocks) sender.send_all();
    }
    mover.landed();
  }
  if (turn.verdict() == Verdict::go) fill_gaps(p, turn, plan);
  if (!closes_late(p)) {
    turn.leave_and_end(remote);
    if constexpr (kRemote) remote.help();
    return;
  }
  turn.leave(remote);
  if constexpr (kRemote) remote.help();
  if (takes_part(turn)) {
    bool failed = false;
    if (turn.moves() && p.receives) {
      failed = turn.any_failed(!receive_all<Scaled, Quantiser>(p, turn, plan, warp_stages));
    }
    if (!failed && p.num_late > 0) copy_late(p, turn, plan, remote);
  }
  turn.end(remote);
}

}  // namespace

namespace {

using DispatchKernel = void (*)(DispatchParams);

template <bool kRemote>
DispatchKernel kernel_for(const QuantiseFormat& format, bool scaled, DType type) {
  return format && format.powers ? dispatch_kernel<NotScaled, ByPowers, kRemote>
         : format                ? dispatch_kernel<NotScaled, ByQuotients, kRemote>
         : !scaled               ? dispatch_kernel<NotScaled, NotQuantised, kRemote>
         : type == DType::bf16   ? dispatch_kernel<Bf16, NotQuantised, kRemote>
         : type == DType::f16    ? dispatch_kernel<F16, NotQuantised, kRemote>
                                 : dispatch_kernel<F32, NotQuantised, kRemote>;
}

template <bool kRemote>
void load_all(std::size_t shared_bytes) {
  load_kernel(dispatch_kernel<NotScaled, NotQuantised, kRemote>, shared_bytes);
  load_kernel(dispatch_kernel<NotScaled, ByQuotients, kRemote>, shared_bytes);
  load_kernel(dispatch_kernel<NotScaled, ByPowers, kRemote>, shared_bytes);
  load_kernel(dispatch_kernel<Bf16, NotQuantised, kRemote>, shared_bytes);
  load_kernel(dispatch_kernel<F16, NotQuantised, kRemote>, shared_bytes);
  load_kernel(dispatch_kernel<F32, NotQuantised, kRemote>, shared_bytes);
}

}  // namespace

void launch(const DispatchParams& params, DType scaled_type, bool remote, const LaunchShape& shape,
            cudaStream_t stream) {
  const bool scaled = params.weights != nullptr;
  const auto kernel = remote ? kernel_for<true> : kernel_for<false>;
  launch_cooperative(kernel(params.send.format, scaled, scaled_type), params, shape, stream);
}

void load_dispatch(std::size_t shared_bytes, bool remote) {
  (remote ? load_all<true> : load_all<false>)(shared_bytes);
}

}  // namespace xd::ep::cuda
