// combine and dispatch_bwd between machines: a token's source asks its relays for the sum of the
// token's rows on their machines, and adds it to the sum of the rows on its own.
//
//   memory                      written by                       read by
//   RemoteMap::sums             each rank's pushers: its part    near relays, when all near ranks
//                               of remote tokens' sums           have raised `added`
//   RemoteMap::added[stage][r]  near rank r's last block that    near relays
//                               leaves
//   RemoteDevice::answers       this block, from answers         this block
//   own out                     summers: the sum of the near     the caller
//                               rows; then this block, all
//
// Each machine is one host, so these are the sums of the order of sums: by rank, by host, over
// hosts. A relay reads rows where their owners let peers read them, as near sources do.
#pragma once

#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/remote/work.cuh"
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
class RemoteCombine : public RemoteWork<RemoteCombine<T>> {
  using Base = RemoteWork<RemoteCombine<T>>;
  using Base::directions;
  using Base::moves;
  using Base::remote;
  using Base::remote_turn_;
  using Base::s_;
  using Base::shared_;
  using Base::turn_;

 public:
  static constexpr RemoteKind kKind = RemoteKind::request;
  static constexpr bool kAnswers = true;

  // `terms`, `rings`: of all warps.
  __device__ RemoteCombine(const CombineParams& params, Turn& turn, TurnShared& turn_shared,
                           RemoteShared& shared, WarpTerms* terms, std::byte* rings)
      : Base(params.turn, turn, turn_shared, shared),
        p_(params),
        terms_(terms[warp_in_block()]),
        ring_(rings + warp_in_block() * TermPieces::kBytes) {}

  // Behind enter(). All threads of all blocks call it.
  __device__ void meet() const { meet_remote(remote_turn_, turn_); }

  // All blocks have added up their rows.
  __device__ void start() const {
    const int i = thread_in_block();
    if (i < remote().num_near)
      ptx::st_release_sys(added_at(remote().near[i], turn_.rank()), turn_.epoch());
  }
  __device__ bool may_take(int neighbour) const {
    if (!directions().may_fill(neighbour, Direction::to_source)) return false;
    for (int i = 0; s_.partials_here == 0 && i < remote().num_near; ++i) {
      const std::uint64_t* added = added_at(turn_.rank(), remote().near[i]);
      if (ptx::ld_acquire_sys(added) != turn_.epoch()) return false;
    }
    s_.partials_here = 1;
    return true;
  }

  __device__ bool fill(int machine, RemoteHeader* chunk) const {
    const PlanParts plan = parts_of(p_.turn.plan, turn_.plan());
    const std::uint64_t size = request_bytes(topk());
    // Its answers fit into one chunk.
    const bool last = this->pick_tokens(machine, plan.code, size, answer_room());
#pragma unroll 1
    for (int i = warp_in_block(); i < s_.items; i += warps_per_block()) {
      const std::uint32_t token = s_.picks[i];
      std::byte* item = items_of(chunk) + i * size;
      const std::uint32_t code = code_of(plan, token);
      const std::uint32_t place = place_of(token, machine, machines_of(code));
      if (lane_id() == 0) {
        *reinterpret_cast<RequestItem*>(item) = {
            .token = token, .place = place, .host = remote().host_of[machine], .form = 0};
      }
      if (lane_id() < topk()) {
        reinterpret_cast<std::uint32_t*>(item + sizeof(RequestItem))[lane_id()] = code;
      }
    }
    return last;
  }

  __device__ std::uint64_t bytes_of_item(RemoteKind kind) const {
    return kind == RemoteKind::answer ? answer().item_bytes() : request_bytes(topk());
  }
  __device__ void take(int neighbour, const RemoteHeader& chunk) const {
    if (chunk.items == 0) return;
    RemoteHeader* out = directions().next_out(neighbour, Direction::to_source);
    const AnswerLayout layout = answer();
    const auto warps = static_cast<std::uint32_t>(warps_per_block());
    // As many answers have room, where a chunk of requests is as it must be.
    const auto most = static_cast<std::uint32_t>(remote().chunk_room / answer_room());
    const std::uint32_t items = min(chunk.items, most);
#pragma unroll 1
    for (auto i = static_cast<std::uint32_t>(warp_in_block()); i < items; i += warps) {
      answer_item(items_of(&chunk) + i * request_bytes(topk()),
                  items_of(out) + i * layout.item_bytes(), layout);
    }
    __syncthreads();
    if (thread_in_block() != 0) return;
    remote_turn_.write_header(out, RemoteKind::answer, items);
    directions().fill(neighbour, Direction::to_source,
                      static_cast<std::uint32_t>(items * layout.item_bytes()));
  }

  __device__ void take_answer(int machine, const RemoteHeader& chunk) const {
    if (!moves()) return;
    const PlanParts plan = parts_of(p_.turn.plan, turn_.plan());
    const AnswerLayout layout = answer();
    const auto warps = static_cast<std::uint32_t>(warps_per_block());
#pragma unroll 1
    for (auto i = static_cast<std::uint32_t>(warp_in_block()); i < chunk.items; i += warps) {
      keep_answer(plan, machine, items_of(&chunk) + i * layout.item_bytes(), layout);
    }
  }

  __device__ void after_done() {
    if (moves() && p_.sums) add_answers();
    Base::after_done();
  }

 private:
  __device__ int topk() const { return turn_.plan().topk; }
  __device__ AnswerLayout answer() const {
    return {.topk = p_.gradients ? topk() : 0, .row_bytes = p_.sums ? p_.row_bytes : 0};
  }
  // Both a request and its answer have room in so many bytes.
  __device__ std::uint64_t answer_room() const {
    return max(std::uint64_t{request_bytes(topk())}, std::uint64_t{answer().item_bytes()});
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
  __device__ void answer_item(const std::byte* request, std::byte* item,
                              const AnswerLayout& layout) const {
    const auto* words = reinterpret_cast<const volatile std::uint32_t*>(request);
    constexpr int kHead = sizeof(RequestItem) / sizeof(std::uint32_t);
    const int k = lane_id();
    if (k < kHead) reinterpret_cast<std::uint32_t*>(item)[k] = words[k];
    const Choice c = decode(turn_, shared_, k < topk() ? words[kHead + k] : RowCodec::kNone);
    if (!moves()) return;
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
    if (p_.sums) copy_bytes(answer_at(place), item + layout.row_at(), layout.row_bytes);
  }

  // Adds up the sums of all machines for tokens that have rows on others.
  __device__ void add_answers() const {
    const PlanParts plan = parts_of(p_.turn.plan, turn_.plan());
#pragma unroll 1
    for (int t = warp_in_block(); t < turn_.plan().tokens; t += warps_per_block()) {
      const auto token = static_cast<std::uint32_t>(t);
      const std::uint32_t code = code_of(plan, token);
      const std::uint64_t machines = machines_of(code);
      if (machines == 0) continue;
      const bool near = __any_sync(kAllLanes, decode(turn_, shared_, code).valid);
      std::byte* out = p_.out + static_cast<std::uint64_t>(token) * p_.row_bytes;
      __syncwarp();  // the last sum has read its terms
      if (lane_id() == 0) collect(token, machines, near ? out : nullptr);
      __syncwarp();
      add_up<T>(out, ring_, terms_, __popcll(machines) + (near ? 1 : 0), false, 0, vectors());
    }
  }
  // By ascending host. One lane.
  __device__ void collect(std::uint32_t token, std::uint64_t machines, const std::byte* own) const {
    int next = 0;
#pragma unroll 1
    for (int m = 0; m <= remote().num_machines; ++m) {
      if (m == remote().machines_before && own != nullptr) terms_.row[next++] = own;
      if (m < remote().num_machines && (machines >> m & 1) != 0) {
        terms_.row[next++] = answer_at(place_of(token, m, machines));
      }
    }
  }

  const CombineParams& p_;
  WarpTerms& terms_;
  std::byte* const ring_;
};

}  // namespace xd::ep::cuda
