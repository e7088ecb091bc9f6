// The routing of a dispatch, told by the launch's last block, in warps that do nothing else: the
// expert ids of all tokens to every rank, before rows fill the links, and the record.
//
//   memory                      written by               read by
//   topk_idx                    the caller, before       the tellers
//   entry[slot][rank] there     one warp                 the owner's receiver blocks
//   ids[slot][rank][t] there    the tellers, one token   the owner's receiver blocks
//                               a thread
//   bad_ids[slot][rank] there   the last of the tellers  the owner's first receiver block
//
// Every word of ids is written in every operation, also of tokens that are not there, so its tag
// tells operations apart. Bad ids and repeated ones have become "none" here, so that all ranks see
// the same.
#pragma once

#include "ep/cuda/ll_dispatch_send.cuh"

namespace xd::ep::cuda {

inline constexpr int kLlTellers = kLlThreads - kLlMovers;

// `kMostTopk`: bound of K, as a token's ids are in registers.
template <int kMostTopk>
class LlTeller {
 public:
  __device__ LlTeller(const LlDispatchParams& params, LlShared& shared)
      : p_(params), g_(params.group), s_(shared), thread_(threadIdx.x - kLlMovers) {}

  // Before the block's first barrier, since all ranks wait for these words: the first token's words
  // but for their tags.
  __device__ void prepare_first() {
    load(thread_);
    bad_ = drop_bad_ids();
    first_ = pack(0);
  }

  // Behind it. All tellers call it.
  __device__ void tell(std::uint64_t epoch) {
#pragma unroll 1
    for (int t = thread_; t < g_.max_tokens; t += kLlTellers) {
      if (t != thread_) {
        load(t);
        bad_ += drop_bad_ids();
        first_ = pack(0);
      }
      send(epoch, t);
    }
    tell_bad_ids(epoch);
  }

 private:
  __device__ void load(int token) {
    const bool here = p_.step.send && !p_.step.failed && token < static_cast<int>(p_.record.tokens);
    const std::int64_t first = static_cast<std::int64_t>(token) * p_.record.topk;
#pragma unroll
    for (int k = 0; k < kMostTopk; ++k) {
      std::int64_t id = -1;
      if (here && k < static_cast<int>(p_.record.topk)) id = ll_id_at(p_, first + k);
      // Ids that are no int32 are bad whatever they are.
      id_[k] = id < -1 || id >= g_.experts ? -2 : static_cast<int>(id);
    }
  }
  // Returns the number of bad ids; they are -1 from then on. An expert's second mention is bad,
  // unless the group collapses them.
  __device__ int drop_bad_ids() {
    int bad = 0;
#pragma unroll
    for (int k = 0; k < kMostTopk; ++k) {
      bool repeated = false;
#pragma unroll
      for (int j = 0; j < k; ++j) repeated |= id_[j] == id_[k];
      repeated &= id_[k] >= 0;
      if (id_[k] == -2 || (repeated && !g_.collapse)) ++bad;
      if (id_[k] == -2 || repeated) id_[k] = -1;
    }
    return bad;
  }
  __device__ ulonglong2 pack(int pair) const;
  __device__ void send(std::uint64_t epoch, int token) const;
  __device__ void tell_bad_ids(std::uint64_t epoch) const;

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlShared& s_;
  const int thread_;
  int id_[kMostTopk];  // -2 = bad
  int bad_ = 0;        // bad ids of this thread's tokens
  ulonglong2 first_;   // the first pair of the token's words
};

// Two of a token's words without their tags, by loops over registers alone.
template <int kMostTopk>
__device__ ulonglong2 LlTeller<kMostTopk>::pack(int pair) const {
  const LlIdWords& form = g_.ids;
  ulonglong2 words = make_ulonglong2(0, 0);
#pragma unroll
  for (int k = 0; k < kMostTopk; ++k) {
    const int place = k - pair * form.per_word;
    const bool second = place >= form.per_word;
    const int at = second ? place - form.per_word : place;
    if (place < 0 || at >= form.per_word) continue;
    const std::uint64_t id = id_[k] < 0 ? form.none() : static_cast<std::uint32_t>(id_[k]);
    words.x |= second ? 0 : id << (at * form.bits);
    words.y |= second ? id << (at * form.bits) : 0;
  }
  return words;
}

template <int kMostTopk>
__device__ void LlTeller<kMostTopk>::send(std::uint64_t epoch, int token) const {
  const LlIdWords& form = g_.ids;
  const std::uint64_t tag = static_cast<std::uint64_t>(ll_tag(epoch)) << 48;
  const std::uint64_t slot = turn::lane_slot(epoch, g_.slots);
  const std::uint64_t row =
      (slot * g_.ranks() + g_.rank()) * static_cast<std::uint64_t>(g_.max_tokens) + token;
  const std::uint64_t offset = g_.map.ids + row * form.words * 8;
#pragma unroll 1
  for (int pair = 0; pair < form.words; pair += 2) {
    const ulonglong2 words = pair == 0 ? first_ : pack(pair);
#pragma unroll 1
    for (int n = 1; n <= g_.ranks(); ++n) {
      int d = g_.rank() + n;
      if (d >= g_.ranks()) d -= g_.ranks();
      if (g_.masks && s_.masked.has(d)) continue;
      ptx::st_relaxed_sys_pair(s_.area[d].base + offset + pair * 8,
                               make_ulonglong2(words.x | tag, words.y | tag));
    }
  }
}

// The count and its tag are one word, as the counts of prepare are.
template <int kMostTopk>
__device__ void LlTeller<kMostTopk>::tell_bad_ids(std::uint64_t epoch) const {
  if (bad_ != 0) atomicAdd(&s_.told_bad_ids, static_cast<std::uint32_t>(bad_));
  ptx::barrier_sync(kLlTellBarrier, kLlTellers);
  const std::uint64_t slot = turn::lane_slot(epoch, g_.slots);
  const std::uint64_t cell = slot * g_.ranks() + g_.rank();
#pragma unroll 1
  for (int d = thread_; d < g_.ranks(); d += kLlTellers) {
    auto* to = reinterpret_cast<std::uint64_t*>(s_.area[d].base + g_.map.bad_ids) + cell;
    ptx::st_relaxed_sys(to, count_word(s_.told_bad_ids, epoch));
  }
}

}  // namespace xd::ep::cuda
