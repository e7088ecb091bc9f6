// The usual combine: both halves in one launch, in a group of up to 32 ranks that does not mask, of
// rows that a block's movers hold at once, with up to 15 choices a token (LlCombineRoute).
//
// It does what LlPusher and LlSummer do, in fewer instructions and registers, and it makes no call:
// values that live over one would lie in memory. Where something is unusual, a wait that becomes
// long or a verdict against delivery, a warp stops, and they go on from there (LlRest).
#pragma once

#include "ep/slots/cuda/combine/sum.cuh"

namespace xd::ep::cuda {

// Where a warp of movers goes on in the code for all launches.
struct LlRest {
  std::uint32_t unit;  // the first unit that it has not sent
  int token;           // the first token that it has not summed
  bool judged;         // it has met the verdict
  bool is_over;        // there is nothing left
};

// A warp of movers. Lane 2 + k has the word of a plan's item for its choice k, lane 2 + room + k
// the choice's weight; lanes 0 and 1 have the source, token and place.
template <class F>
class LlQuickMover {
 public:
  __device__ LlQuickMover(const LlCombineParams& params, LlCombineShared& shared)
      : p_(params), r_(params.route), s_(shared) {}

  // Before the block's first barrier: the first rows are on their way.
  __device__ void load_first();
  // Behind it, in a launch that sends rows and receives.
  __device__ LlRest move();

 private:
  static constexpr int kAhead = 4;   // rows that are loaded together
  static constexpr int kAtOnce = 4;  // partial sums that are waited for together

  __device__ bool is_own() const { return unit_ >= units_; }
  __device__ std::uint32_t item_word(std::uint32_t unit) const {
    const std::uint32_t item = min(r_.row_parts.divides(unit), r_.most_items);
    return word_at(r_.items + std::uint64_t{item} * r_.item_bytes);
  }
  __device__ std::uint32_t word_at(const std::byte* item) const {
    const auto word = min(static_cast<std::uint32_t>(lane_id()), 1 + 2 * r_.topk);
    return reinterpret_cast<const std::uint32_t*>(item)[word];
  }
  __device__ std::uint32_t own_word(int token) const;
  __device__ std::uint32_t home_of(int token) const {
    return reinterpret_cast<const std::uint32_t*>(r_.home)[token * 4];
  }
  __device__ void take_unit(std::uint32_t word);
  __device__ void take_own(std::uint32_t word, std::uint32_t home);
  __device__ void take(std::uint32_t word, bool there);
  __device__ unsigned load_rows(unsigned left);
  __device__ bool take_weights();
  __device__ bool add_up(uint4& sum);
  __device__ bool push_all(uint4& own);
  __device__ bool sum_token(int token, std::uint32_t home, const uint4& own, bool first);

  const LlCombineParams& p_;
  const LlCombineRoute& r_;
  LlCombineShared& s_;
  std::uint32_t unit_ = 0, units_ = 0;
  std::uint32_t next_ = 0;            // item_word() of the unit behind this one
  std::uint32_t own_ = 0, home_ = 0;  // of the block's first token
  bool weighted_ = false, go_ = false;
  // The rows that are on their way:
  std::uint32_t word_ = 0, vector_ = 0;
  std::uint32_t source_token_ = 0, place_ = 0;
  std::int32_t offset_ = 0;  // of this lane's row, in vectors
  unsigned here_ = 0;        // the lanes with rows
  uint4 row_[kAhead];
};

#define XD_LL_QUICK(type) \
  template <class F>      \
  __device__ inline type LlQuickMover<F>

XD_LL_QUICK(void)::load_first() {
  unit_ = warp_in_block() / (kLlPartThreads / 32) * gridDim.x + blockIdx.x;
  const auto& facts = *reinterpret_cast<const LlPlanFacts*>(r_.facts);
  const std::int64_t items = facts.peer_items, weighted = facts.weighted;
  const std::uint32_t first = item_word(unit_);
  next_ = item_word(unit_ + 4 * gridDim.x);
  const int token = min(static_cast<int>(blockIdx.x), r_.max_tokens - 1);
  home_ = home_of(token);
  own_ = own_word(token);
  const auto most = static_cast<std::int64_t>(r_.most_items);
  const std::int64_t remote = items < 0 ? 0 : items > most ? most : items;
  units_ = static_cast<std::uint32_t>(remote) * r_.row_parts.by;
  weighted_ = weighted != 0 || r_.weighs;
  if (is_own()) {
    take_own(own_, static_cast<int>(blockIdx.x) < p_.out_rows ? home_ : 0);
  } else {
    take_unit(first);
  }
}

// The weights of own tokens are those of the call, if it has some.
XD_LL_QUICK(std::uint32_t)::own_word(int token) const {
  const int k = lane_id() - 2 - static_cast<int>(r_.topk);
  if (r_.weighs && k >= 0 && k < p_.weight_cols && token < p_.weight_rows) {
    return __float_as_uint(p_.topk_weights[token * p_.weight_cols + k]);
  }
  return word_at(r_.own_items + static_cast<std::uint64_t>(token) * r_.item_bytes);
}

XD_LL_QUICK(void)::take_unit(std::uint32_t word) {
  const std::uint32_t part = unit_ - r_.row_parts.divides(unit_) * r_.row_parts.by;
  vector_ = part * kLlPartThreads + threadIdx.x % kLlPartThreads;
  source_token_ = __shfl_sync(kAllLanes, word, 0);
  place_ = __shfl_sync(kAllLanes, word, 1);
  const LlItem item{source_token_, place_};
  take(word, item.source() < r_.ranks && item.token() < r_.max_tokens && place_ < r_.places);
}

XD_LL_QUICK(void)::take_own(std::uint32_t word, std::uint32_t home) {
  vector_ = threadIdx.x;
  take(word, (home >> r_.rank & 1) != 0);
}

// A plan's items are not under its checksum, so they are held within the bounds of all memory.
XD_LL_QUICK(void)::take(std::uint32_t word, bool there) {
  word_ = word;
  const auto k = static_cast<std::uint32_t>(lane_id()) - 2;
  const std::uint32_t expert = p_.slots.divides(word & 0x7FFFFFFFu);
  const bool good =
      there && k < r_.topk && static_cast<int>(word) >= 0 && expert < r_.local_experts;
  offset_ = static_cast<std::int32_t>(expert) * r_.expert_stride +
            static_cast<std::int32_t>(word - expert * p_.slots.by) * r_.slot_stride;
  here_ = __ballot_sync(kAllLanes, good);
  load_rows(here_);
}

// Threads behind the row's end load its last vector. Returns the rows that are left.
XD_LL_QUICK(unsigned)::load_rows(unsigned left) {
  const std::byte* at = r_.rows + min(vector_, r_.vectors - 1) * F::kBytes;
#pragma unroll
  for (int q = 0; q < kAhead; ++q) {
    if (left == 0) break;
    const int offset = __shfl_sync(kAllLanes, offset_, __ffs(static_cast<int>(left)) - 1);
    row_[q] = F::load_row(at + std::int64_t{offset} * 16);
    left &= left - 1;
  }
  return left;
}

// The weights of this call for another rank's token. False: they have not come for long.
XD_LL_QUICK(bool)::take_weights() {
  const int k = lane_id() - 2 - static_cast<int>(r_.topk);
  const bool mine = k >= 0 && k < p_.weight_cols && (here_ >> (2 + k) & 1) != 0;
  const LlItem item{source_token_, place_};
  const std::uint64_t epoch = s_.turn.course.send_epoch;
  const auto* at = reinterpret_cast<const std::uint64_t*>(
      p_.group.own_area + ll_weight_offset(p_.group, turn::pipeline_stage(epoch, p_.group.stages),
                                           item.source(), item.token()));
  std::uint64_t word = 0;
#pragma unroll 1
  for (int i = 0; i < turn::kPollsBetweenLooks; ++i) {
    if (mine) word = ptx::ld_relaxed_sys(at + k);
    if (__all_sync(kAllLanes, !mine || count_is_of(word, epoch)) == 0) continue;
    if (mine) word_ = count_of(word);
    return true;
  }
  return false;
}

// The sum of the rows by ascending k, rounded once. False: weights are late.
XD_LL_QUICK(bool)::add_up(uint4& sum) {
  unsigned left = here_;
  if (!weighted_ && (left & (left - 1)) == 0) {
    sum = left != 0 ? F::partial_of_row(p_, row_[0]) : make_uint4(0, 0, 0, 0);
    return true;
  }
  if (r_.weighs && !is_own() && !take_weights()) return false;
  float x[F::kColumns];
#pragma unroll
  for (int n = 0; n < F::kColumns; ++n) x[n] = -0.0f;
#pragma unroll 1
  for (;;) {
    unsigned rest = left;
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      if (rest == 0) break;
      const int lane = __ffs(static_cast<int>(rest)) - 1 + static_cast<int>(r_.topk);
      F::add_row(x, row_[q], __uint_as_float(__shfl_sync(kAllLanes, word_, lane)));
      rest &= rest - 1;
    }
    left = rest;
    if (left == 0) break;
    load_rows(left);
  }
  sum = here_ != 0 ? F::partial_of(p_, x) : make_uint4(0, 0, 0, 0);
  return true;
}

// Afterwards `own` is this rank's own part of the block's first token. False: a unit's weights are
// late.
XD_LL_QUICK(bool)::push_all(uint4& own) {
  const std::uint32_t step = 4 * gridDim.x;
#pragma unroll 1
  for (;;) {
    if (!add_up(own)) return false;
    if (is_own()) return true;
    const typename F::Place to(s_.turn.area[source_token_ >> 16].base + s_.stage_offset +
                                   std::uint64_t{place_} * r_.partial_stride,
                               vector_, p_);
    const bool sends = here_ != 0 && vector_ < r_.vectors;
    unit_ += step;
    if (is_own()) {
      take_own(own_, static_cast<int>(blockIdx.x) < p_.out_rows ? home_ : 0);
    } else {
      const std::uint32_t word = next_;
      next_ = item_word(unit_ + step);
      take_unit(word);
    }
    if (sends) to.send(own);
  }
}

XD_LL_QUICK(LlRest)::move() {
  const int first = static_cast<int>(blockIdx.x);
  uint4 own{};
  if (!push_all(own)) return {unit_, first, false, false};
  if (first >= p_.out_rows) go_ = ll_meet_verdict(true);
  std::uint32_t home = home_;
#pragma unroll 1
  for (int token = first; token < p_.out_rows;) {
    if (!sum_token(token, home, own, token == first)) {
      return {units_, token, true, !go_};
    }
    token += static_cast<int>(gridDim.x);
    if (token >= p_.out_rows) break;
    home = home_of(token);
    take_own(own_word(token), home);
    add_up(own);
  }
  return {units_, 0, true, true};
}

// With the block's first token the verdict comes, while its words do. False: they have not come for
// long, or nothing is delivered; nothing has been taken.
XD_LL_QUICK(bool)::sum_token(int token, std::uint32_t home, const uint4& own, bool first) {
  const int count = min(__popc(home), r_.partials_per_token);
  const int own_order = (home >> r_.rank & 1) != 0 ? __popc(home & ((1u << r_.rank) - 1)) : -1;
  const bool active = threadIdx.x < r_.vectors;
  const typename F::Place at(
      r_.own_area + s_.stage_offset +
          static_cast<std::uint64_t>(static_cast<std::uint32_t>(token * r_.partials_per_token)) *
              r_.partial_stride,
      threadIdx.x, p_);
  float x[F::kColumns];
#pragma unroll
  for (int n = 0; n < F::kColumns; ++n) x[n] = -0.0f;
  uint4 only = make_uint4(0, 0, 0, 0);
  bool come = true;
#pragma unroll 1
  for (int base = 0; base < count && come; base += kAtOnce) {
    const std::uint64_t from = static_cast<std::uint64_t>(base) * r_.partial_stride;
    unsigned missing = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (base + j < count && base + j != own_order) missing |= 1u << j;
    }
    if (!active) missing = 0;
    ulonglong2 words[kAtOnce];
    come = false;
#pragma unroll 1
    for (int i = 0; i < turn::kPollsBetweenLooks && !come; ++i) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if ((missing >> j & 1) != 0) words[j] = at.load(from + j * r_.partial_stride);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if ((missing >> j & 1) != 0 && has_come(words[j])) missing &= ~(1u << j);
      }
      // A warp stays together.
      come = __all_sync(kAllLanes, missing == 0) != 0;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (base + j >= count) break;
      only = base + j == own_order ? own : vector_of(words[j]);
      F::add(x, only);
    }
  }
  if (first) go_ = ll_meet_verdict(true);
  if (!come || !go_) return false;
  if (!active) return true;
  if (count > 1) only = F::round(x);
  if (count == 1) only = F::round_one(only);
  F::put(p_.out + static_cast<std::uint64_t>(token) * p_.row_bytes + threadIdx.x * F::kBytes, only);
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    if (j != own_order) at.put_back(static_cast<std::uint64_t>(j) * r_.partial_stride);
  }
  return true;
}

#undef XD_LL_QUICK

}  // namespace xd::ep::cuda
