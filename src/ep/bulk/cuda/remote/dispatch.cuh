// dispatch and combine_bwd between machines: a token's row crosses once to each machine on which it
// has rows, and its relay there stores it as the source would have.
//
//   memory                  written by                       read by
//   RemoteDevice::rows,     this rank's senders, as rows     hands, which send them, when all
//   scales: by token        are sent (quantised, packed)     blocks have left
//   near ranks' tensors     hands, from chunks: the          their receivers, after the flags; the
//                           token's first row there          caller, after the done flags
//   chunk[s][c] there,      the desk, when chunks of s are   near ranks' receivers
//   s a source of this      taken as far as its tokens go
//   rank
#pragma once

#include "ep/bulk/cuda/dispatch_beside.cuh"
#include "ep/bulk/cuda/mover.cuh"
#include "ep/bulk/cuda/remote/desk.cuh"

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

struct RemoteDispatchShared : DeskShared {
  DeskPartner partners[kMaxDeviceRanks];
};

class RemoteDispatch : public RemoteHandsWork<RemoteDispatch> {
 public:
  using Shared = RemoteDispatchShared;
  static constexpr RemoteKind kKind = RemoteKind::rows;
  static constexpr bool kAnswers = false;

  __device__ RemoteDispatch(const DispatchParams& params, Turn& turn, TurnShared& turn_shared,
                            Shared& shared)
      : RemoteHandsWork(params.turn, turn, turn_shared, shared, shared.partners), p_(params) {}

  // ---- Of RemoteHandsWork ----

  // Every second block, where rows are also fanned out here: the others do that meanwhile.
  __device__ bool helps() const { return !p_.receives || blockIdx.x % 2 == 0; }
  __device__ std::uint32_t helping_blocks() const {
    return p_.receives ? (gridDim.x + 1) / 2 : gridDim.x;
  }
  __device__ void begin() const {}
  // Rows of remote sources reach this rank's tensors as those of near ones do: in staging memory,
  // where there is some. This block has sent its own rows, which go elsewhere.
  __device__ void begin_hands() const {
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
  __device__ bool near_ready() const { return true; }

  __device__ std::uint64_t bytes_of_item(RemoteKind) const { return item_layout().item_bytes(); }
  __device__ std::uint32_t in_chunk() const {
    return static_cast<std::uint32_t>(remote().chunk_room / item_layout().item_bytes());
  }
  __device__ const std::uint32_t* codes() const {
    return parts_of(p_.turn.plan, turn_.plan()).code;
  }
  __device__ void fill(int, std::uint32_t token, std::byte* item) const {
    write_item(parts_of(p_.turn.plan, turn_.plan()), item_layout(), static_cast<int>(token), item);
  }
  __device__ void take(const std::byte* item) const { replay(item_layout(), item); }
  __device__ void answer(const std::byte*, std::byte*, bool) const {}
  __device__ void keep(int, const std::byte*) const {}

  // Raises the flags of the source's chunks of tokens whose rows have all been taken. All lanes.
  __device__ void took(int neighbour, std::uint32_t chunks) {
    const int source = remote().rank_of[neighbour], near = remote().num_near;
    const PlanParts plan = parts_of(p_.turn.plan, turn_.plan());
    const int tokens = min(max(plan.tokens[source], 0), turn_.group().max_tokens);
    const auto all = static_cast<std::uint32_t>(sent_chunks().count(tokens));
    std::uint32_t end = all;
    if (chunks != kUnknownChunks) {
      if (chunks == 0) return;
      const int last = remote().frame(neighbour, Direction::to_relay, chunks - 1);
      end = min(all, remote().state->tokens_in[last] /
                         static_cast<std::uint32_t>(sent_chunks().tokens_per_chunk(tokens)));
    }
    const std::uint32_t first = s_.flagged[neighbour];
    __syncwarp();  // all lanes have read it
    if (end <= first) return;
#pragma unroll 1
    for (std::uint32_t i = first * near + lane_id(); i < end * near; i += 32) {
      ptx::st_release_sys(
          turn_.chunk_at(remote().near[i % near], source, static_cast<int>(i / near)),
          turn_.epoch());
    }
    if (lane_id() == 0) s_.flagged[neighbour] = end;
    __syncwarp();
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
    copy_row(remote().rows + t * layout.row_bytes, k == 0 ? item + layout.row_at() : nullptr,
             layout.row_bytes);
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
