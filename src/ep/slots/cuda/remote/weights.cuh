// The weights of a combine that has some, in front of its send half: a rank sums rows for a remote
// source under the source's weights. One block sends this rank's to all remote ranks, and brings
// in theirs.
//
// A rank that fails sends no weights, nor does one whose call has none; its sums say so. Where they
// are here first, it needs none either. Messages of weights are numbered for each pair of ranks, so
// a rank that has failed meets those of its peers later, with a number of an operation before.
// Weights of another shape than the plan's are a mistake that the send half finds: none go.
#pragma once

#include "ep/slots/cuda/combine/push.cuh"
#include "ep/slots/cuda/remote/carrier.cuh"

namespace xd::ep::cuda {

// All threads of the launch's only block. Where the send half behind is refused, it does nothing.
__device__ inline void LlCarrier::carry_weights() {
  const std::uint64_t open = sent_ - taken_;
  const bool goes = p_.whole ? open == 0 : open < static_cast<std::uint64_t>(g_.in_flight);
  if (!goes || !weights_fit() || !post_weights(sent_ + 1)) return;
  static_cast<void>(land_weights(sent_ + 1));
}

__device__ inline bool LlCarrier::weights_fit() const {
  const PlanHeader& plan = *reinterpret_cast<const PlanHeader*>(p_.plan);
  return p_.tokens <= static_cast<std::uint32_t>(g_.max_tokens) &&
         p_.topk <= static_cast<std::uint32_t>(g_.max_topk) &&
         p_.tokens == static_cast<std::uint32_t>(plan.tokens) &&
         p_.topk == static_cast<std::uint32_t>(plan.topk);
}

// One thread for each neighbour. True if weights of an operation before this one were here, which
// nobody has a use for.
__device__ inline bool LlCarrier::give_up_weights(int neighbour, std::uint64_t epoch) const {
  const std::uint64_t number = state_.weights_read[neighbour] + 1;
  const std::uint32_t frame = r_.frame(neighbour, LlRemoteKind::combine, number);
  if (!is_here(frame, r_.frames.use(number))) return false;
  if (ll_header_in(chunk(true, frame)).epoch >= epoch) return false;
  read(frame, r_.frames.use(number));
  state_.weights_read[neighbour] = number;
  return true;
}

// Whether sums of a neighbour are `here`; true if they say that it has no weights.
__device__ inline bool LlCarrier::needs_none(int neighbour, std::uint64_t epoch, bool& here) const {
  const std::uint32_t frame = r_.frame(neighbour, LlRemoteKind::sums, epoch);
  here = is_here(frame, r_.frames.use(epoch)) && bytes_in(frame) >= sizeof(LlRemoteHeader);
  if (!here) return false;
  const LlRecord record = ll_header_in(chunk(true, frame)).record;
  return record.call.status != XD_SUCCESS || (record.flags & kWeighted) == 0;
}

__device__ inline bool LlCarrier::post_weights(std::uint64_t epoch) const {
  const auto number_of = [&](int n) { return state_.weights_sent[n] + 1; };
  bool sends = false;
  const bool good = wait_for_all(XD_PHASE_CREDIT, epoch, [&](int n) {
    bool has_sums = false;
    needs_none(n, epoch, has_sums);
    if (has_sums) return true;
    while (give_up_weights(n, epoch)) {
    }
    const std::uint64_t number = number_of(n);
    sends = may_fill(r_.frame(n, LlRemoteKind::combine, number), r_.frames.use(number));
    return sends;
  });
  if (!good) return false;
  const auto words = static_cast<int>(p_.tokens * p_.topk);
  const int own = thread_in_block();
  if (own < r_.num_neighbours) s_.items[own] = sends ? 1 : 0;
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < r_.num_neighbours; ++n) {
    if (s_.items[n] == 0) continue;
    auto* const to = reinterpret_cast<float*>(
        chunk(false, r_.frame(n, LlRemoteKind::combine, number_of(n))) + sizeof(LlRemoteHeader));
#pragma unroll 1
    for (int i = own; i < words; i += threads_per_block()) to[i] = p_.topk_weights[i];
  }
  __syncthreads();
  if (!sends) return true;
  const std::uint64_t number = number_of(own);
  const std::uint32_t frame = r_.frame(own, LlRemoteKind::combine, number);
  *reinterpret_cast<LlRemoteHeader*>(chunk(false, frame)) = {.epoch = epoch,
                                                             .kind = LlRemoteKind::combine,
                                                             .source = g_.rank(),
                                                             .items = p_.tokens,
                                                             .item_bytes = p_.topk * 4,
                                                             .record = {}};
  send(frame, r_.frames.use(number),
       sizeof(LlRemoteHeader) + std::uint64_t{p_.tokens} * p_.topk * 4);
  state_.weights_sent[own] = number;
  return true;
}

// Weights are where a near source would have put them. A rank that sends none has its record there:
// nobody waits for its weights then.
__device__ inline bool LlCarrier::land_weights(std::uint64_t epoch) const {
  bool comes = false;
  bool good = wait_for_all(XD_PHASE_ROWS, epoch, [&](int n) {
    while (give_up_weights(n, epoch)) {
    }
    const std::uint64_t number = state_.weights_read[n] + 1;
    const std::uint32_t frame = r_.frame(n, LlRemoteKind::combine, number);
    comes =
        is_here(frame, r_.frames.use(number)) && ll_header_in(chunk(true, frame)).epoch == epoch;
    bool has_sums = false;
    return comes || needs_none(n, epoch, has_sums);
  });
  if (!good) return false;
  const int own = thread_in_block();
  if (own < r_.num_neighbours) {
    s_.items[own] = comes ? 1 : 0;
    if (!comes) {
      const std::byte* const sums = chunk(true, r_.frame(own, LlRemoteKind::sums, epoch));
      land_entry(epoch, r_.rank_of[own], ll_header_in(sums).record);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < r_.num_neighbours && good; ++n) {
    if (s_.items[n] != 0) good = land_weights_of(n, epoch);
  }
  __syncthreads();
  if (!good || !comes) return good;
  const std::uint64_t number = state_.weights_read[own] + 1;
  read(r_.frame(own, LlRemoteKind::combine, number), r_.frames.use(number));
  state_.weights_read[own] = number;
  return true;
}

// All threads find the same. False: the message cannot be. Every cell is written, whatever the
// message has, so that none is waited for in vain.
__device__ inline bool LlCarrier::land_weights_of(int neighbour, std::uint64_t epoch) const {
  const std::uint64_t number = state_.weights_read[neighbour] + 1;
  const std::uint32_t frame = r_.frame(neighbour, LlRemoteKind::combine, number);
  const int source = r_.rank_of[neighbour];
  const std::uint64_t bytes = bytes_in(frame);
  const std::byte* const from = chunk(true, frame);
  const LlRemoteHeader h = ll_header_in(from);
  const std::uint32_t topk = h.item_bytes / 4;
  const bool good = bytes == sizeof(h) + std::uint64_t{h.items} * h.item_bytes &&
                    h.kind == LlRemoteKind::combine && h.source == source &&
                    h.item_bytes % 4 == 0 && h.items <= static_cast<std::uint32_t>(g_.max_tokens) &&
                    topk <= static_cast<std::uint32_t>(g_.max_topk);
  if (!good) {
    if (thread_in_block() == 0) refuse(neighbour, epoch);
    return false;
  }
  auto* const to =
      reinterpret_cast<std::uint64_t*>(g_.own_area + ll_weight_offset(g_, stage(epoch), source, 0));
  const auto* const weights = reinterpret_cast<const std::uint32_t*>(from + sizeof(h));
  const auto most_topk = static_cast<std::uint32_t>(g_.max_topk);
  const std::uint32_t cells = static_cast<std::uint32_t>(g_.max_tokens) * most_topk;
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(thread_in_block()); i < cells;
       i += static_cast<std::uint32_t>(threads_per_block())) {
    const std::uint32_t t = i / most_topk, k = i - t * most_topk;
    const bool has = t < h.items && k < topk;
    const std::uint32_t weight = has ? ptx::ld_relaxed_sys(weights + t * topk + k) : 0;
    ptx::st_relaxed_sys(to + i, count_word(weight, epoch));
  }
  return true;
}

}  // namespace xd::ep::cuda
