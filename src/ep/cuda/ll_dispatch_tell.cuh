// The routing of a dispatch, told by the launch's last block before anything else, since all ranks
// wait for it: the expert ids of all tokens to every rank, and the record.
//
//   memory                      written by               read by
//   topk_idx                    the caller, before       all warps of the block
//   entry[slot][rank] there     one warp                 the owner's receiver blocks
//   ids[slot][rank][t] there    the lanes of a token,    the owner's receiver blocks
//                               each for other owners
//   bad_ids[slot][rank] there   the last of the warps    the owner's first receiver block
//
// Every word of ids is written in every operation, also of tokens that are not there, so its tag
// tells operations apart. Bad ids and repeated ones have become "none" here, so that all ranks see
// the same.
#pragma once

#include "ep/cuda/ll_dispatch_send.cuh"

namespace xd::ep::cuda {

inline constexpr int kLlTellers = kLlThreads - kLlMovers;

// `kMostTopk`: bound of K, a power of two. A token has as many lanes, each for one of its ids.
template <int kMostTopk>
class LlTeller {
 public:
  static constexpr int kTokens = 32 / kMostTopk;  // of a warp at once
  static_assert(kTokens * kMostTopk == 32);

  __device__ LlTeller(const LlDispatchParams& params, LlShared& shared)
      : p_(params),
        g_(params.group),
        s_(shared),
        k_(lane_id() % kMostTopk),
        first_token_(warp_in_block() * kTokens + lane_id() / kMostTopk) {}

  // Before the block's first barrier: the first token's ids are on their way.
  __device__ void load_first() { load(first_token_); }
  // Likewise: the first token's words but for their tags.
  __device__ void prepare_first() {
    drop_bad_id();
    first_ = pack(0);
  }

  // Behind it. All warps of the block call it.
  __device__ void tell(std::uint64_t epoch) {
    constexpr int kStep = kLlThreads / 32 * kTokens;
    // A warp stays together.
    const int end = g_.max_tokens + lane_id() / kMostTopk;
#pragma unroll 1
    for (int t = first_token_; t < end; t += kStep) {
      if (t != first_token_) {
        load(t);
        prepare_first();
      }
      send(epoch, t);
    }
    tell_bad_ids(epoch);
  }

 private:
  __device__ void load(int token) {
    const bool here = p_.step.send && !p_.step.failed &&
                      token < static_cast<int>(p_.record.tokens) &&
                      k_ < static_cast<int>(p_.record.topk);
    id_ = -1;
    if (here) id_ = ll_id_at(p_, static_cast<std::int64_t>(token) * p_.record.topk + k_);
  }
  __device__ void drop_bad_id();
  __device__ ulonglong2 pack(int pair) const;
  __device__ void send(std::uint64_t epoch, int token) const;
  __device__ void tell_bad_ids(std::uint64_t epoch) const;

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlShared& s_;
  const int k_, first_token_;
  std::int64_t id_ = -1;
  std::uint32_t bad_ = 0;  // bad ids of this warp's tokens
  ulonglong2 first_;       // the first pair of the token's words
};

// A bad id is -1 from then on. An expert's second mention is bad, unless the group collapses them.
template <int kMostTopk>
__device__ void LlTeller<kMostTopk>::drop_bad_id() {
  const bool out = id_ < -1 || id_ >= g_.experts;
  const bool named = id_ >= 0 && !out;
  const unsigned equal = equal_lanes(static_cast<unsigned>(id_), named);
  // Of them, the lanes of this token that are lower.
  const bool repeated = named && (equal & lower_lanes()) >> (lane_id() - k_) != 0;
  const bool bad = out || (repeated && !g_.collapse);
  bad_ += static_cast<std::uint32_t>(__popc(__ballot_sync(kAllLanes, bad)));
  if (out || repeated) id_ = -1;
}

// Two of a token's words without their tags, in all of its lanes.
template <int kMostTopk>
__device__ ulonglong2 LlTeller<kMostTopk>::pack(int pair) const {
  const LlIdWords& form = g_.ids;
  const int place = k_ - pair * form.per_word;
  const bool second = place >= form.per_word;
  const int at = second ? place - form.per_word : place;
  std::uint64_t id = id_ < 0 ? form.none() : static_cast<std::uint32_t>(id_);
  id = place < 0 || at >= form.per_word ? 0 : id << (at * form.bits);
  unsigned long long x = second ? 0 : id, y = second ? id : 0;
#pragma unroll
  for (int step = kMostTopk / 2; step > 0; step /= 2) {
    x |= __shfl_xor_sync(kAllLanes, x, step);
    y |= __shfl_xor_sync(kAllLanes, y, step);
  }
  return make_ulonglong2(x, y);
}

template <int kMostTopk>
__device__ void LlTeller<kMostTopk>::send(std::uint64_t epoch, int token) const {
  const LlIdWords& form = g_.ids;
  const std::uint64_t tag = static_cast<std::uint64_t>(ll_tag(epoch)) << 48;
  const std::uint32_t row =
      (turn::lane_slot(epoch, g_.slots) * g_.ranks() + g_.rank()) * g_.max_tokens + token;
  const std::uint64_t offset = g_.map.ids + std::uint64_t{row} * (form.words * 8);
#pragma unroll 1
  for (int pair = 0; pair < form.words; pair += 2) {
    const ulonglong2 words = pair == 0 ? first_ : pack(pair);
#pragma unroll 1
    for (int n = 1 + k_; n <= g_.ranks() && token < g_.max_tokens; n += kMostTopk) {
      const int d = g_.rank() + n < g_.ranks() ? g_.rank() + n : g_.rank() + n - g_.ranks();
      if (g_.masks && s_.masked.has(d)) continue;
      ptx::st_relaxed_sys_pair(s_.area[d].base + offset + pair * 8,
                               make_ulonglong2(words.x | tag, words.y | tag));
    }
    __syncwarp();
  }
}

// The warps add up their bad ids, and count themselves above them; the last one tells. The count
// and its tag are one word, as the counts of prepare are.
template <int kMostTopk>
__device__ void LlTeller<kMostTopk>::tell_bad_ids(std::uint64_t epoch) const {
  constexpr int kShift = 26;
  constexpr std::uint32_t kWarps = kLlThreads / 32;
  std::uint32_t before = 0;
  if (lane_id() == 0) before = atomicAdd(&s_.told_bad_ids, bad_ + (1u << kShift));
  before = __shfl_sync(kAllLanes, before, 0);
  if (before >> kShift != kWarps - 1) return;
  const std::uint32_t bad = (before & ((1u << kShift) - 1)) + bad_;
  const std::uint64_t cell = turn::lane_slot(epoch, g_.slots) * g_.ranks() + g_.rank();
#pragma unroll 1
  for (int d = lane_id(); d < g_.ranks(); d += 32) {
    auto* to = reinterpret_cast<std::uint64_t*>(s_.area[d].base + g_.map.bad_ids) + cell;
    ptx::st_relaxed_sys(to, count_word(bad, epoch));
  }
}

}  // namespace xd::ep::cuda
