// combine and dispatch_bwd between machines: a token's source asks its relays for the sum of the
// token's rows on their machines, and adds it to the sum of the rows on its own.
//
//   memory                      written by                       read by
//   RemoteMap::sums             each rank's pushers: its part    near relays, when all near ranks
//                               of remote tokens' sums           have raised `added`
//   RemoteMap::added[stage][r]  near rank r's last block that    near relays
//                               leaves
//   RemoteDevice::answers       hands, from answers              the hand that keeps the last one
//   RemoteDevice::answers_here  likewise, when it is there       of the token
//   own out                     summers: the sum of the near     that hand, when all blocks have
//                               rows; then that hand: all        left; the caller
//
// Each machine is one host, so these are the sums of the order of sums: by rank, by host, over
// hosts. A relay reads rows where their owners let peers read them, as near sources do.
#pragma once

#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/remote/desk.cuh"
#include "ep/plan/cuda/sums.cuh"

namespace xd::ep::cuda {

// The place of the sum of a remote token's rows here, the first of which is `row`.
__device__ inline std::byte* remote_sum_at(const RemoteDevice& remote, int owner, std::uint32_t row,
                                           std::uint64_t row_bytes) {
  return remote.near_areas[owner] + remote.map.sums + row * row_bytes;
}

// The index of this leader's rank among all ranks that have rows of the token, near or remote,
// which is the token's cell for its partial sum (ep/plan/plan.h). All lanes call it.
__device__ inline int order_with_remote(const RemoteDevice& remote, const Choice& c) {
  Choice all = c;
  all.valid = c.valid || (c.rank >= 0 && remote.machine_of[c.rank] != kNear);
  all.leader = first_of_equals(static_cast<unsigned>(c.rank), all.valid);
  int count = 0;
  return order_of(all, count);
}

template <class T>
class RemoteCombine : public RemoteHandsWork<RemoteCombine<T>> {
  using Base = RemoteHandsWork<RemoteCombine<T>>;
  using Base::moves;
  using Base::remote;
  using Base::remote_turn_;
  using Base::shared_;
  using Base::turn_;

 public:
  using Shared = DeskShared;
  static constexpr RemoteKind kKind = RemoteKind::request;
  static constexpr bool kAnswers = true;

  // `terms`, `rings`: of all warps. The desk's warp adds nothing up meanwhile, and has its partners
  // in its ring.
  __device__ RemoteCombine(const CombineParams& params, Turn& turn, TurnShared& turn_shared,
                           Shared& shared, WarpTerms* terms, std::byte* rings)
      : Base(params.turn, turn, turn_shared, shared, reinterpret_cast<DeskPartner*>(rings)),
        p_(params),
        terms_(terms[warp_in_block()]),
        ring_(rings + warp_in_block() * TermPieces::kBytes) {}
  static_assert(sizeof(DeskPartner) * kMaxDeviceRanks <= TermPieces::kBytes);

  // ---- Of RemoteHandsWork ----

  __device__ bool helps() const { return true; }
  __device__ std::uint32_t helping_blocks() const { return gridDim.x; }
  // All blocks have added up their rows.
  __device__ void begin() const {
    const int i = thread_in_block();
    if (i < remote().num_near)
      ptx::st_release_sys(added_at(remote().near[i], turn_.rank()), turn_.epoch());
  }
  __device__ void begin_hands() const {}
  // All near ranks have. All lanes.
  __device__ bool near_ready() const {
    bool all = true;
#pragma unroll 1
    for (int i = lane_id(); i < remote().num_near; i += 32)
      all &= ptx::ld_acquire_sys(added_at(turn_.rank(), remote().near[i])) == turn_.epoch();
    return __all_sync(kAllLanes, all);
  }
  __device__ void took(int, std::uint32_t) const {}

  __device__ std::uint64_t bytes_of_item(RemoteKind kind) const {
    return kind == RemoteKind::answer ? answer_layout().item_bytes() : request_bytes(topk());
  }
  // A chunk's answers fit into one chunk.
  __device__ std::uint32_t in_chunk() const {
    return static_cast<std::uint32_t>(remote().chunk_room / answer_room());
  }
  __device__ const std::uint32_t* codes() const {
    return parts_of(p_.turn.plan, turn_.plan()).code;
  }
  __device__ void fill(int machine, std::uint32_t token, std::byte* item) const {
    const std::uint32_t code = code_of(parts_of(p_.turn.plan, turn_.plan()), token);
    const std::uint32_t place = place_of(token, machine, machines_of(code));
    if (lane_id() == 0) {
      *reinterpret_cast<RequestItem*>(item) = {
          .token = token, .place = place, .host = remote().host_of[machine], .form = 0};
    }
    if (lane_id() < topk())
      reinterpret_cast<std::uint32_t*>(item + sizeof(RequestItem))[lane_id()] = code;
  }
  __device__ void take(const std::byte*) const {}
  // At the relay.
  __device__ void answer(const std::byte* request, std::byte* item, bool moves) const {
    answer_item(request, item, answer_layout(), moves);
  }
  // At the source.
  __device__ void keep(int machine, const std::byte* item) const {
    keep_answer(parts_of(p_.turn.plan, turn_.plan()), machine, item, answer_layout());
  }

 private:
  __device__ int topk() const { return turn_.plan().topk; }
  __device__ AnswerLayout answer_layout() const {
    return {.topk = p_.gradients ? topk() : 0, .row_bytes = p_.sums ? p_.row_bytes : 0};
  }
  // Both a request and its answer have room in so many bytes.
  __device__ std::uint64_t answer_room() const {
    return max(std::uint64_t{request_bytes(topk())}, std::uint64_t{answer_layout().item_bytes()});
  }
  __device__ std::uint64_t* added_at(int owner, int source) const {
    return reinterpret_cast<std::uint64_t*>(remote().near_areas[owner] + remote().map.added) +
           turn::cell_of(turn_.epoch(), source, turn_.ranks());
  }
  // This lane's choice.
  __device__ std::uint32_t code_of(const PlanParts& plan, std::uint64_t token) const {
    return lane_id() < topk() ? plan.code[token * topk() + lane_id()] : RowCodec::kNone;
  }
  // The remote machines of the lanes' choices, as bits. All lanes call it.
  __device__ std::uint64_t machines_of(std::uint32_t code) const {
    const int m = this->machine_of_code(code);
    const std::uint64_t bit = m == kNear ? 0 : std::uint64_t{1} << m;
    const unsigned low = __reduce_or_sync(kAllLanes, static_cast<unsigned>(bit));
    const unsigned high = __reduce_or_sync(kAllLanes, static_cast<unsigned>(bit >> 32));
    return std::uint64_t{high} << 32 | low;
  }
  __device__ static int below(std::uint64_t machines, int machine) {
    return __popcll(machines & ((std::uint64_t{1} << machine) - 1));
  }
  __device__ std::uint32_t place_of(std::uint32_t token, int machine,
                                    std::uint64_t machines) const {
    return token * remote().most_answers(topk()) + below(machines, machine);
  }
  __device__ std::byte* answer_at(std::uint32_t place) const {
    return remote().answers + place * p_.row_bytes;
  }

  // At the relay.
  __device__ void answer_item(const std::byte* request, std::byte* item, const AnswerLayout& layout,
                              bool moves) const {
    const auto* words = reinterpret_cast<const volatile std::uint32_t*>(request);
    constexpr int kHead = sizeof(RequestItem) / sizeof(std::uint32_t);
    const int k = lane_id();
    if (k < kHead) reinterpret_cast<std::uint32_t*>(item)[k] = words[k];
    if (!moves) return;
    const Choice c = decode(turn_, shared_, k < topk() ? words[kHead + k] : RowCodec::kNone);
    if (k < layout.topk) {
      const bool beside = turn_.group().layout.choices_beside_rows;
      const auto* from =
          reinterpret_cast<const volatile float*>(c.valid ? turn_.peer(c.rank).weights : nullptr);
      reinterpret_cast<float*>(item + sizeof(RequestItem))[k] =
          c.valid ? from[beside ? std::uint64_t{c.row} * topk() + k : c.row] : 0.0f;
    }
    if (!p_.sums) return;
    int count = 0;
    const int order = order_of(c, count);
    __syncwarp();  // the last sum has read its terms
    if (c.leader) {
      const std::byte* rows = turn_.peer(c.rank).rows;
      terms_.row[order] = rows != nullptr ? rows + c.row * p_.row_bytes
                                          : remote_sum_at(remote(), c.rank, c.row, p_.row_bytes);
    }
    __syncwarp();
    add_up<T>(item + layout.row_at(), ring_, terms_, count, false, 0, vectors());
  }
  __device__ std::uint32_t vectors() const { return static_cast<std::uint32_t>(p_.row_bytes / 16); }

  // At the source.
  __device__ void keep_answer(const PlanParts& plan, int machine, const std::byte* item,
                              const AnswerLayout& layout) const {
    const auto* words = reinterpret_cast<const volatile std::uint32_t*>(item);
    const std::uint32_t token = words[0], place = words[1];
    const bool known = token < static_cast<std::uint32_t>(turn_.plan().tokens);
    const std::uint32_t code = known ? code_of(plan, token) : RowCodec::kNone;
    const std::uint64_t machines = machines_of(code);
    if ((machines >> machine & 1) == 0 || place != place_of(token, machine, machines)) {
      if (lane_id() == 0) remote_turn_.refuse(remote().relays[machine]);  // an answer to no request
      return;
    }
    const int k = lane_id();
    if (k < layout.topk && this->machine_of_code(code) == machine) {
      p_.grad_topk_weights[static_cast<std::uint64_t>(token) * topk() + k] =
          reinterpret_cast<const volatile float*>(item + sizeof(RequestItem))[k];
    }
    if (p_.sums) add_answer(token, machine, place, code, machines, item + layout.row_at());
  }

  // Adds up the sums of all machines when the token's last one is here: behind those that hands
  // have kept before, and the sum of the near rows, which all blocks had made when they left.
  __device__ void add_answer(std::uint32_t token, int machine, std::uint32_t place,
                             std::uint32_t code, std::uint64_t machines,
                             const std::byte* row) const {
    const int all = __popcll(machines);
    if (all > 1) copy_bytes(answer_at(place), row, p_.row_bytes);
    __syncwarp();
    unsigned here = 0;
    if (lane_id() == 0) here = note_answer(token, 1u << (place - place_of(token, 0, 0)));
    here = __shfl_sync(kAllLanes, here, 0);
    __syncwarp();  // passes the acquire on to all lanes
    if (here == 0 && lane_id() == 0)
      remote_turn_.refuse(remote().relays[machine]);  // a second answer
    if (__popc(here) != all) return;
    const bool near = __any_sync(kAllLanes, decode(turn_, shared_, code).valid);
    std::byte* out = p_.out + static_cast<std::uint64_t>(token) * p_.row_bytes;
    __syncwarp();  // the last sum has read its terms
    if (lane_id() == 0) collect(token, machines, near ? out : nullptr, all > 1 ? nullptr : row);
    __syncwarp();
    add_up<T>(out, ring_, terms_, all + (near ? 1 : 0), false, 0, vectors());
  }
  // The token's answers that are here with this one, as bits; none if it was here before. One lane.
  __device__ unsigned note_answer(std::uint32_t token, unsigned bit) const {
    std::uint64_t* word = remote().answers_here + token;
    const std::uint64_t none = turn_.epoch() << 32;
    std::uint64_t seen = ptx::ld_relaxed_sys(word);
    __threadfence();  // with the exchange: release, of the answer that the warp has kept
#pragma unroll 1
    for (;;) {
      const std::uint64_t before = seen >> 32 == none >> 32 ? seen : none;
      if ((before & bit) != 0) return 0;
      const std::uint64_t found = ptx::cas_acquire_gpu(word, seen, before | bit);
      if (found == seen) return static_cast<unsigned>(before | bit);
      seen = found;
    }
  }

  // By ascending host; `only`: the one answer that there is, else nullptr. One lane.
  __device__ void collect(std::uint32_t token, std::uint64_t machines, const std::byte* own,
                          const std::byte* only) const {
    int next = 0;
#pragma unroll 1
    for (int m = 0; m <= remote().num_machines; ++m) {
      if (m == remote().machines_before && own != nullptr) terms_.row[next++] = own;
      if (m < remote().num_machines && (machines >> m & 1) != 0) {
        terms_.row[next++] = only != nullptr ? only : answer_at(place_of(token, m, machines));
      }
    }
  }

  const CombineParams& p_;
  WarpTerms& terms_;
  std::byte* const ring_;
};

}  // namespace xd::ep::cuda
