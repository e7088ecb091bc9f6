// dispatch and combine_bwd between machines: a token's row crosses once to each machine on which it
// has rows, and its relay there stores it as the source would have.
//
//   memory                  written by                       read by
//   RemoteDevice::rows,     this rank's senders, as rows     the last block that leaves, which
//   scales: by token        are sent (quantised, packed)     sends them
//   near ranks' tensors     this block, from chunks: the     their receivers, after the flags; the
//                           token's first row there          caller, after the done flags
//   chunk[s][c] there,      this block, when it has the      near ranks' receivers
//   s a source of this      last chunk of s
//   rank
//
// A relay raises all flags of a source at once, behind its last chunk.
#pragma once

#include "ep/bulk/cuda/dispatch_beside.cuh"
#include "ep/bulk/cuda/mover.cuh"
#include "ep/bulk/cuda/remote/work.cuh"

namespace xd::ep::cuda {

// Where the senders put a token's row for other machines, on one lane; none if it has no rows
// there. All lanes call it.
__device__ inline MoverTarget remote_target(const DispatchParams& p, const Turn& turn, int token,
                                            const Choice& c) {
  const RemoteDevice& remote = *turn.group().control->remote;
  const bool goes = c.rank >= 0 && remote.machine_of[c.rank] != kNear;
  const unsigned going = __ballot_sync(kAllLanes, goes);
  if (!goes || (going & lower_lanes()) != 0) return {nullptr, nullptr};
  const auto t = static_cast<std::uint64_t>(token);
  const std::uint64_t scales = p.recv_scales.row_bytes;
  return {remote.rows + t * p.recv_tokens.row_bytes,
          scales != 0 ? remote.scales + t * scales : nullptr};
}

// Copies a row of whole vectors to the places that lanes have, where `to` is not null. All lanes
// call it.
__device__ inline void copy_row(const std::byte* from, std::byte* to, std::uint64_t bytes) {
  constexpr int kAtOnce = 4;
  const unsigned wanting = __ballot_sync(kAllLanes, to != nullptr);
  const auto vectors = static_cast<std::uint32_t>(bytes / 16);
#pragma unroll 1
  for (std::uint32_t first = 0; first < vectors; first += kAtOnce * 32) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::uint32_t v = first + j * 32 + lane_id();
      if (v < vectors) x[j] = ptx::ld_streaming(from + std::uint64_t{v} * 16);
    }
    unsigned left = wanting;
#pragma unroll 1
    while (left != 0) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      auto* there = reinterpret_cast<std::byte*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to), lane));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const std::uint32_t v = first + j * 32 + lane_id();
        if (v < vectors) ptx::st_streaming(there + std::uint64_t{v} * 16, x[j]);
      }
    }
  }
}

class RemoteDispatch : public RemoteWork<RemoteDispatch> {
 public:
  static constexpr RemoteKind kKind = RemoteKind::rows;

  __device__ RemoteDispatch(const DispatchParams& params, Turn& turn, TurnShared& turn_shared,
                            RemoteShared& shared)
      : RemoteWork(params.turn, turn, turn_shared, shared), p_(params) {}

  // Behind enter(). All threads of all blocks call it.
  __device__ void meet() const { meet_remote(remote_turn_, turn_); }

  // Rows of remote sources reach this rank's tensors as those of near ones do: in staging memory,
  // where there is some. This block has sent its own rows, which go elsewhere.
  __device__ void start() const {
    if (thread_in_block() != 0) return;  // the others use them behind the next barrier
    PeerTensors& own = shared_.peer[turn_.rank()];
    const auto arrives = [](const ReceiveRows& tensor) {
      return tensor.staged != nullptr ? tensor.staged : tensor.data;
    };
    own.rows = arrives(p_.recv_tokens);
    own.scales = arrives(p_.recv_scales);
    own.weights = arrives(p_.recv_weights);
    own.extra = arrives(p_.recv_topk_idx);
  }

  __device__ bool fill(int machine, RemoteHeader* chunk) const {
    const PlanParts plan = parts_of(p_.turn.plan, turn_.plan());
    const RowsLayout layout = item_layout();
    const bool last = pick_tokens(machine, plan.code, layout.item_bytes());
#pragma unroll 1
    for (int i = warp_in_block(); i < s_.items; i += warps_per_block()) {
      write_item(plan, layout, static_cast<int>(s_.picks[i]),
                 items_of(chunk) + static_cast<std::uint64_t>(i) * layout.item_bytes());
    }
    return last;
  }

  __device__ std::uint64_t bytes_of_item(RemoteKind) const { return item_layout().item_bytes(); }
  __device__ void take(int, const RemoteHeader& chunk) const {
    if (!moves()) return;
    const RowsLayout layout = item_layout();
#pragma unroll 1
    for (auto i = static_cast<std::uint32_t>(warp_in_block()); i < chunk.items;
         i += static_cast<std::uint32_t>(warps_per_block())) {
      replay(layout, items_of(&chunk) + std::uint64_t{i} * layout.item_bytes());
    }
  }

  // Behind a barrier of the block.
  __device__ void took_all(int neighbour, const RemoteHeader& chunk) const {
    const int tokens = min(static_cast<int>(chunk.tokens), turn_.group().max_tokens);
    const int flags = sent_chunks().count(tokens), near = remote().num_near;
#pragma unroll 1
    for (int i = thread_in_block(); i < flags * near; i += threads_per_block()) {
      ptx::st_release_sys(
          turn_.chunk_at(remote().near[i % near], remote().rank_of[neighbour], i / near),
          turn_.epoch());
    }
  }

 private:
  __device__ RowsLayout item_layout() const {
    return {.topk = turn_.plan().topk,
            .weights = p_.weighs,
            .row_bytes = p_.recv_tokens.row_bytes,
            .scale_bytes = p_.recv_scales.row_bytes};
  }
  __device__ void write_item(const PlanParts& plan, const RowsLayout& layout, int token,
                             std::byte* item) const {
    const auto t = static_cast<std::uint64_t>(token);
    const int k = lane_id();
    if (k < layout.topk) {
      reinterpret_cast<std::uint32_t*>(item)[k] = plan.code[t * layout.topk + k];
      if (layout.weights) {
        reinterpret_cast<float*>(item + layout.weights_at())[k] =
            p_.topk_weights[t * layout.topk + k];
      }
    }
    copy_bytes(item + layout.row_at(), remote().rows + t * layout.row_bytes, layout.row_bytes);
    copy_bytes(item + layout.scales_at(), remote().scales + t * layout.scale_bytes,
               layout.scale_bytes);
  }
  // Does with an item what the source does with a token of its own.
  __device__ void replay(const RowsLayout& layout, const std::byte* item) const {
    const int k = lane_id();
    const auto* codes = reinterpret_cast<const volatile std::uint32_t*>(item);
    const auto* weights = reinterpret_cast<const float*>(item + layout.weights_at());
    const Choice c = decode(turn_, shared_, k < layout.topk ? codes[k] : RowCodec::kNone);
    std::byte* to = c.leader ? turn_.peer(c.rank).rows + c.row * layout.row_bytes : nullptr;
    copy_row(item + layout.row_at(), to, layout.row_bytes);
    unsigned leaders = __ballot_sync(kAllLanes, c.leader);
    if (layout.scale_bytes == 0) leaders = 0;
    std::byte* beside = c.leader ? turn_.peer(c.rank).scales + c.row * layout.scale_bytes : nullptr;
#pragma unroll 1
    while (leaders != 0) {
      const int lane = __ffs(static_cast<int>(leaders)) - 1;
      leaders &= leaders - 1;
      copy_bytes(reinterpret_cast<std::byte*>(
                     __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(beside), lane)),
                 item + layout.scales_at(), layout.scale_bytes);
    }
    store_beside(
        p_, turn_, c, [=] { return weights; }, 0);
  }

  const DispatchParams& p_;
};

}  // namespace xd::ep::cuda
