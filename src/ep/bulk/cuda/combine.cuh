// The kernel of combine and dispatch_bwd: sums of a token's rows, home to the token's rank.
//
//   memory                  written by                        read by
//   own expert_out          the caller, before the call       own pushers; in RANK_MAJOR, where it
//                                                             lies in symmetric memory, the sources
//   partials at the source  pushers: one row per (token,      the source's summers, after the flag
//                           rank), the sum of the rank's rows
//   chunk[rank][c] there    a pusher's warp, when all of its  the source's summers
//                           partial sums of chunk c are there
//   own out                 summers                           the caller
//   grad_topk_weights       summers, from the owners' rows    the caller
//
// In a call with a part the pushers take the tokens whose last part here it is. The last part alone
// sums, so partial sums wait in group memory: see ep/bulk/part_order.h.
//
// Blocks [0, push_blocks) push first, and sum when they have pushed. The others sum from the start.
// Pushers wait for entry records only; summers wait for chunk flags, which pushers raise without
// waiting for peers. Where a peer's rows can be read, they are not pushed: the peer's entry record
// says that they are there, and this rank's done flag says that it reads them no more.
//
// A policy `Sums` says in what form partial sums cross, and how they are made and added up:
//   Params                           CombineParams, or what has more
//   T                                the payload type
//   cell_bytes(p)                    bytes of a partial sum
//   strip_of(p, strip, strips)       a strip of the columns
//   note_own(terms, i, own)          term i lies as a row of this rank's tensor, else as in a cell
//   push(p, to, ring, terms, count, columns)
//   sum(p, out, ring, terms, count, place, columns)
#pragma once

#include "ep/bulk/cuda/hosts.cuh"
#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/remote/combine.cuh"
#include "ep/bulk/cuda/rows.cuh"
#include "ep/plan/cuda/launch.cuh"
#include "ep/plan/cuda/sums.cuh"

namespace xd::ep::cuda {

// ---- At the owner of rows ----------------------------------------------------------------------

// `kRemote`: some ranks are on other machines.
template <class Sums, bool kRemote>
class Pusher {
  using Params = typename Sums::Params;

 public:
  __device__ Pusher(const Params& params, Turn& turn, const PlanParts& plan, WarpTerms& terms,
                    std::byte* ring)
      : p_(params), turn_(turn), plan_(plan), terms_(terms), ring_(ring) {}

  // With a blank verdict it raises flags without sums. Before the last part it raises none: nobody
  // waits for them, as the sums are added up in the last part, behind all done flags of this one.
  __device__ void push_all() {
    const bool moves = turn_.moves();
    const Team team{0, p_.push_blocks};
    // More tokens at a time take fewer searches for their items.
    const ChunkFlags chunks = turn_.part().ends() ? summed_chunks() : sent_chunks();
    for_each_arrival(turn_, plan_, chunks, p_.row_bytes, 0, team, [&](const Arrival& a) {
      if (reads_itself(a.source)) return true;
      const Columns columns = Sums::strip_of(p_, a.strip, a.strips);
      const ItemRange items =
          moves ? items_of(turn_, plan_, a.source, a.token, a.tokens) : ItemRange{0, 0};
      const unsigned due = due_items(turn_, plan_, items, true);
      for_each_item(turn_, plan_, items, due, [&](const ItemRows& rows, std::uint32_t cell) {
        push(a.source, rows, cell, columns);
      });
      // The flag is raised also without items: a source whose codes are damaged must not wait for
      // ever.
      if (turn_.part().ends()) {
        turn_.release_chunk(a.flag, [&](int d) { return d == a.source; });
      }
      return true;
    });
  }

 private:
  // In RANK_MAJOR a rank's own rows are partial sums already.
  __device__ bool reads_itself(int source) const {
    return source == turn_.rank() && !turn_.group().layout.row_per_expert;
  }

  __device__ void push(int source, const ItemRows& rows, std::uint32_t cell,
                       const Columns& columns) {
    const int per_token = turn_.group().cells_per_token(turn_.plan().topk);
    if (cell >= static_cast<std::uint32_t>(turn_.group().max_tokens) * per_token) return;
    __syncwarp();  // the last sum has read its terms
    if (lane_id() < rows.count) {
      terms_.row[lane_id()] = p_.rows + rows.row * p_.row_bytes;
      if (p_.weights != nullptr) terms_.weight[lane_id()] = p_.weights[rows.row];
    }
    __syncwarp();
    std::byte* to = turn_.peer(source).extra + cell * Sums::cell_bytes(p_);
    if constexpr (kRemote) {  // relays read it here
      const RemoteDevice& remote = *turn_.group().control->remote;
      if (remote.machine_of[source] != kNear) {
        if (rows.count == 0) return;  // a damaged item names no row, so no place
        const std::uint32_t first = __shfl_sync(kAllLanes, rows.row, 0);
        to = remote_sum_at(remote, turn_.rank(), first, p_.row_bytes);
      }
    }
    Sums::push(p_, to, ring_, terms_, rows.count, columns);
  }

  const Params& p_;
  Turn& turn_;
  const PlanParts& plan_;
  WarpTerms& terms_;
  std::byte* const ring_;
};

// ---- At the tokens' rank -----------------------------------------------------------------------

template <class Sums, bool kRemote>
class Summer {
  using Params = typename Sums::Params;

 public:
  __device__ Summer(const Params& params, Turn& turn, const TurnShared& shared,
                    const PlanParts& plan, WarpTerms& terms, std::byte* ring)
      : p_(params), turn_(turn), shared_(shared), plan_(plan), terms_(terms), ring_(ring) {}

  // Returns false after a fatal error. Where tokens are few, several warps share one, by columns.
  __device__ bool sum_all() {
    const Team team = blocks_behind(p_.pushes ? p_.push_blocks : 0);
    const int tokens = turn_.plan().tokens;
    const auto vectors = static_cast<int>(p_.row_bytes / 16);
    const int warps = team.blocks * warps_per_block();
    const int pushed_strips = summed_chunks().strips(tokens, p_.row_bytes);
    int strips = pushed_strips;
    while (tokens * strips < 2 * warps && strips * 64 < vectors) strips *= 2;
    return for_each_unit(turn_, 1, team, tokens * strips, false, [&](int unit) {
      const int token = unit / strips, strip = unit % strips;
      const int chunk = token / summed_chunks().tokens_per_chunk(tokens);
      const int flag = chunk * pushed_strips + strip * pushed_strips / strips;
      return sum(token, flag, Sums::strip_of(p_, strip, strips));
    });
  }

  // grad_topk_weights: each choice's gradient comes from its own row (and in RANK_MAJOR from its
  // own k there); choices without a row have none.
  __device__ void gather_weights() {
    const int topk = turn_.plan().topk;
    const int warps = static_cast<int>(gridDim.x) * warps_per_block();
    for (int t = static_cast<int>(blockIdx.x) * warps_per_block() + warp_in_block();
         t < turn_.plan().tokens; t += warps) {
      const Choice c = choice_of(t);
      if (lane_id() >= topk) continue;
      float grad = 0.0f;
      if (c.valid) {
        const auto* from = reinterpret_cast<const volatile float*>(turn_.peer(c.rank).weights);
        grad =
            from[turn_.group().layout.choices_beside_rows ? std::uint64_t{c.row} * topk + lane_id()
                                                          : c.row];
      }
      p_.grad_topk_weights[static_cast<std::uint64_t>(t) * topk + lane_id()] = grad;
    }
  }

 private:
  __device__ Choice choice_of(int token) const {
    const int topk = turn_.plan().topk;
    return decode(turn_, shared_,
                  lane_id() < topk
                      ? plan_.code[static_cast<std::uint64_t>(token) * topk + lane_id()]
                      : RowCodec::kNone);
  }

  // `flag` says that the strip of these columns that a peer pushes is here.
  __device__ bool sum(int token, int flag, const Columns& columns) {
    const Choice c = choice_of(token);
    int count = 0;
    const int order = order_of(c, count);
    HostPlace place{order, 0};
    if (Sums::by_host(p_)) place = place_by_host(c, p_.host_keys);
    int cell_of_rank = order;
    if constexpr (kRemote) cell_of_rank = order_with_remote(*turn_.group().control->remote, c);
    __syncwarp();  // the last sum has read its terms
    bool here = true;
    if (c.leader) {
      const PeerTensors& peer = turn_.peer(c.rank);
      const bool own = c.rank == turn_.rank() && !turn_.group().layout.row_per_expert;
      Sums::note_own(terms_, place.index, own);
      if (peer.rows != nullptr || own) {
        terms_.row[place.index] = (own ? p_.rows : peer.rows) + c.row * p_.row_bytes;
      } else {
        here = turn_.wait_chunk(c.rank, flag);
        const std::uint64_t cell =
            static_cast<std::uint64_t>(token) * turn_.group().cells_per_token(turn_.plan().topk) +
            cell_of_rank;
        terms_.row[place.index] = turn_.area(turn_.rank()).base + turn_.group().map.partials() +
                                  cell * Sums::cell_bytes(p_);
      }
    }
    if (!__all_sync(kAllLanes, here)) return false;
    __syncwarp();  // passes the acquires on to all lanes, and the terms
    std::byte* out = p_.out + static_cast<std::uint64_t>(token) * p_.row_bytes;
    Sums::sum(p_, out, ring_, terms_, count, place, columns);
    return true;
  }

  const Params& p_;
  Turn& turn_;
  const TurnShared& shared_;
  const PlanParts& plan_;
  WarpTerms& terms_;
  std::byte* const ring_;
};

// Copies gradients of weights from outside symmetric memory to memory that peers can read. All
// warps call it.
__device__ inline void stage_weights(const ReceiveRows& tensor, std::int64_t rows) {
  const std::uint64_t words = static_cast<std::uint64_t>(rows) * tensor.row_bytes / 4;
  const auto* from = reinterpret_cast<const std::uint32_t*>(tensor.data);
  auto* to = reinterpret_cast<std::uint32_t*>(tensor.staged);
  for (std::uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words;
       i += std::uint64_t{gridDim.x} * blockDim.x) {
    to[i] = from[i];
  }
}

template <class Sums, bool kRemote>
__global__ void __launch_bounds__(kCombineWarps * 32, 1)
    combine_kernel(const __grid_constant__ typename Sums::Params p) {
  __shared__ TurnShared shared;
  __shared__ WarpTerms terms_of_warp[kCombineWarps];
  extern __shared__ __align__(128) std::byte rings[];
  Turn turn(p.turn, shared);
  fetch_params(p);
  auto remote = make_remote_work<kRemote, RemoteCombine<typename Sums::T>>(p, turn, shared,
                                                                           terms_of_warp, rings);
  bool started = turn.begin();
  // Gradients of weights are read by peers, in the last part.
  const bool stages = p.grad_recv_weights.staged != nullptr && turn.part().ends();
  if (started && stages) {
    if (turn.verdict() == Verdict::go && !refused(turn.plan())) {
      stage_weights(p.grad_recv_weights, turn.plan().recv_rows);
    }
    started = turn.barrier(1);
  }
  const PlanParts plan = parts_of(p.turn.plan, turn.plan());  // of a plan that was judged
  if (started) {
    turn.enter(stages);
    if constexpr (kRemote) remote.meet();
    turn.await({.rows = p.row_bytes,
                .scales = 0,
                .weights = p.grad_recv_weights.row_bytes,
                .extra = 0,
                .partials = p.sums ? p.partial_bytes : 0});
  }
  const bool moves = turn.moves();
  if (moves || turn.verdict() == Verdict::blank) {
    WarpTerms& terms = terms_of_warp[warp_in_block()];
    std::byte* const ring = rings + warp_in_block() * TermPieces::kBytes;
    // Before the last part all blocks push, as nobody sums.
    const bool pushes =
        p.pushes && (static_cast<int>(blockIdx.x) < p.push_blocks || !turn.part().ends());
    if (pushes) Pusher<Sums, kRemote>(p, turn, plan, terms, ring).push_all();
    if (moves && turn.part().ends()) {
      Summer<Sums, kRemote> summer(p, turn, shared, plan, terms, ring);
      bool good = true;
      if (p.sums) good = summer.sum_all();
      if (good && p.grad_topk_weights != nullptr) summer.gather_weights();
      turn.any_failed(!good);
    }
  }
  turn.leave_and_end(remote);
  if constexpr (kRemote) remote.help();
}

}  // namespace xd::ep::cuda
