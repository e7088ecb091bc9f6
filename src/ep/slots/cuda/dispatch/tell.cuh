// The routing of a dispatch, told by the launch's last block before anything else, since all ranks
// wait for it: the expert ids of all tokens to every rank, and the record.
//
//   memory                      written by               read by
//   topk_idx                    the caller, before       movers of the block
//   ids[stage][rank][t] there   the movers               the owner's receiver blocks
//   bad_ids[stage][rank] there  the last of their warps  the owner's first receiver block
//   entry[stage][rank] there    the helper's warp        the owner's receiver blocks
//
// Every word of ids is written in every operation, also of tokens that are not there, so its tag
// tells operations apart. Bad ids and repeated ones have become "none" here, so that all ranks see
// the same.
#pragma once

#include "ep/slots/cuda/dispatch/send.cuh"

namespace xd::ep::cuda {

inline constexpr int kLlTellers = kLlMovers / 32;  // warps: the movers

// The parts that both kinds of tellers have.
class LlTellerBase {
 public:
  __device__ LlTellerBase(const LlDispatchParams& params, LlShared& shared)
      : p_(params), g_(params.group), s_(shared) {}

 protected:
  __device__ bool has(int token) const {
    return p_.step.send && !p_.step.failed && token < static_cast<int>(p_.record.tokens);
  }
  // The place of a token's words in every rank's memory.
  __device__ std::uint64_t offset_of(std::uint64_t epoch, int token) const {
    const std::uint32_t row =
        (turn::pipeline_stage(epoch, g_.stages) * g_.ranks() + g_.rank()) * g_.max_tokens + token;
    return g_.map.ids + std::uint64_t{row} * (g_.ids.words * 8);
  }
  __device__ void add_bad_ids(std::uint64_t epoch, std::uint32_t bad_of_warp, int warps) const;
  __device__ void tell_bad_ids(std::uint64_t epoch, std::uint32_t bad, int rank,
                               std::byte* area) const;

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlShared& s_;
};

// The warps that have tokens add up their bad ids, and count themselves above them; the last one
// tells. The count and its tag are one word, as the counts of prepare are.
__device__ inline void LlTellerBase::add_bad_ids(std::uint64_t epoch, std::uint32_t bad_of_warp,
                                                 int warps) const {
  constexpr int kShift = 26;
  std::uint32_t before = 0;
  if (lane_id() == 0) before = atomicAdd(&s_.told_bad_ids, bad_of_warp + (1u << kShift));
  before = __shfl_sync(kAllLanes, before, 0);
  if (static_cast<int>(before >> kShift) != warps - 1) return;
  const std::uint32_t bad = (before & ((1u << kShift) - 1)) + bad_of_warp;
#pragma unroll 1
  for (int d = lane_id(); d < g_.ranks(); d += 32) tell_bad_ids(epoch, bad, d, s_.area[d].base);
}

__device__ inline void LlTellerBase::tell_bad_ids(std::uint64_t epoch, std::uint32_t bad, int rank,
                                                  std::byte* area) const {
  const std::uint64_t cell = turn::pipeline_stage(epoch, g_.stages) * g_.ranks() + g_.rank();
  auto* to = reinterpret_cast<std::uint64_t*>(area + g_.map.bad_ids) + cell;
  ptx::st_relaxed_sys(to, count_word(bad, epoch));
}

// Up to eight choices: a thread has a token. A warp tells its first tokens in front of the block's
// first barrier, where it finds that it may: all ranks wait for them.
class LlFewTeller : LlTellerBase {
 public:
  using LlTellerBase::LlTellerBase;

  // Before the block's first barrier. All tellers.
  __device__ void begin(const LlDispatchTurn& turn) {
    if (!has_words()) return;
    if (lane_id() < g_.ranks()) area_ = g_.areas[lane_id()].base;
    load(thread_in_block());
    told_ = turn.early_epoch();
    if (has(warp_in_block() * 32)) drop_bad_ids();
    if (told_ != 0) tell_first(told_);
  }
  // Behind it.
  __device__ void tell(std::uint64_t epoch) {
    if (!has_words()) return;
    if (told_ == 0) tell_first(epoch);
#pragma unroll 1
    for (int t = thread_in_block() + kLlMovers; t - lane_id() < g_.max_tokens; t += kLlMovers) {
      load(t);
      drop_bad_ids();
      send(epoch, t);
    }
    if (tellers() > 1) add_bad_ids(epoch, __reduce_add_sync(kAllLanes, bad_), tellers());
  }

 private:
  static constexpr std::int32_t kOut = -2;  // neither an expert nor none

  // The warps that have words of ids.
  __device__ int tellers() const { return min((g_.max_tokens + 31) / 32, kLlTellers); }
  __device__ bool has_words() const { return warp_in_block() < tellers(); }
  __device__ void tell_first(std::uint64_t epoch) {
    send(epoch, thread_in_block());
    if (tellers() > 1) return;
    const std::uint32_t bad = __reduce_add_sync(kAllLanes, bad_);
    if (lane_id() < g_.ranks()) tell_bad_ids(epoch, bad, lane_id(), area_);
  }
  __device__ std::byte* area_of(int rank) const {
    const auto address = reinterpret_cast<unsigned long long>(area_);
    return reinterpret_cast<std::byte*>(__shfl_sync(kAllLanes, address, rank));
  }
  __device__ void load(int token);
  __device__ void drop_bad_ids();
  __device__ std::uint64_t pack(int word) const;
  __device__ void send(std::uint64_t epoch, int token) const;

  std::int32_t id_[kLlFewTopk];
  std::uint32_t bad_ = 0;      // bad ids of this thread's tokens
  std::uint64_t told_ = 0;     // the operation whose first tokens have been told
  std::byte* area_ = nullptr;  // of the rank with this lane's number
};

__device__ inline void LlFewTeller::load(int token) {
#pragma unroll
  for (int k = 0; k < kLlFewTopk; ++k) id_[k] = -1;
  if (!has(token / 32 * 32)) return;
  const int topk = has(token) ? static_cast<int>(p_.record.topk) : 0;
  const std::int64_t first = static_cast<std::int64_t>(token) * p_.record.topk;
  if (p_.wide_ids) {
    const auto* ids = static_cast<const std::int64_t*>(p_.topk_idx) + first;
#pragma unroll
    for (int k = 0; k < kLlFewTopk; ++k) {
      const std::int64_t id = k < topk ? ids[k] : -1;
      id_[k] = id < -1 || id >= g_.experts ? kOut : static_cast<std::int32_t>(id);
    }
  } else {
    const auto* ids = static_cast<const std::int32_t*>(p_.topk_idx) + first;
#pragma unroll
    for (int k = 0; k < kLlFewTopk; ++k) id_[k] = k < topk ? ids[k] : -1;
  }
}

// A bad id is -1 from then on. An expert's second mention is bad, unless the group collapses them.
__device__ inline void LlFewTeller::drop_bad_ids() {
  std::uint32_t dropped = 0;
#pragma unroll
  for (int k = 0; k < kLlFewTopk; ++k) {
    const bool out = id_[k] < -1 || id_[k] >= g_.experts;
    bool repeated = false;
#pragma unroll
    for (int j = 0; j < k; ++j) repeated |= id_[j] == id_[k];
    repeated &= id_[k] >= 0 && !out;
    if (out || (repeated && !g_.collapse)) ++bad_;
    if (out || repeated) dropped |= 1u << k;
  }
#pragma unroll
  for (int k = 0; k < kLlFewTopk; ++k) {
    if ((dropped >> k & 1) != 0) id_[k] = -1;
  }
}

// One of a token's words without its tag.
__device__ inline std::uint64_t LlFewTeller::pack(int word) const {
  const LlIdWords& form = g_.ids;
  std::uint64_t packed = 0;
#pragma unroll
  for (int k = 0; k < kLlFewTopk; ++k) {
    const int place = k - word * form.per_word;
    const std::uint32_t id = static_cast<std::uint32_t>(id_[k]) & form.none();
    if (place >= 0 && place < form.per_word) packed |= std::uint64_t{id} << (place * form.bits);
  }
  return packed;
}

// All lanes.
__device__ inline void LlFewTeller::send(std::uint64_t epoch, int token) const {
  const std::uint64_t tag = static_cast<std::uint64_t>(ll_tag(epoch)) << 48;
  const std::uint64_t offset = offset_of(epoch, token);
#pragma unroll 1
  for (int pair = 0; pair < g_.ids.words; pair += 2) {
    ulonglong2 words;
    if (g_.ids.few()) {
      const auto low = [&](int k) { return static_cast<std::uint64_t>(id_[k] & 0xFFF); };
      words = make_ulonglong2(low(0) | low(1) << 12 | low(2) << 24 | low(3) << 36 | tag,
                              low(4) | low(5) << 12 | low(6) << 24 | low(7) << 36 | tag);
    } else {
      words = make_ulonglong2(pack(pair) | tag, pack(pair + 1) | tag);
    }
#pragma unroll 1
    for (int n = 1; n <= g_.ranks(); ++n) {
      const int d = g_.rank() + n < g_.ranks() ? g_.rank() + n : g_.rank() + n - g_.ranks();
      std::byte* const area = area_of(d);
      if (token >= g_.max_tokens || (g_.masks && s_.masked.has(d))) continue;
      ptx::st_relaxed_sys_pair(area + offset + pair * 8, words);
    }
  }
}

// More choices: a warp has a token, and each lane one of its ids.
class LlManyTeller : LlTellerBase {
 public:
  using LlTellerBase::LlTellerBase;

  // Before the block's first barrier.
  __device__ void begin(const LlDispatchTurn&) {
    load(warp_in_block());
    drop_bad_id();
  }
  __device__ void tell(std::uint64_t epoch) {
#pragma unroll 1
    for (int t = warp_in_block(); t < g_.max_tokens; t += kLlTellers) {
      if (t != warp_in_block()) {
        load(t);
        drop_bad_id();
      }
      send(epoch, t);
    }
    add_bad_ids(epoch, bad_, kLlTellers);
  }

 private:
  __device__ void load(int token) {
    id_ = -1;
    if (!has(token) || lane_id() >= static_cast<int>(p_.record.topk)) return;
    id_ = ll_id_at(p_, static_cast<std::int64_t>(token) * p_.record.topk + lane_id());
  }
  __device__ void drop_bad_id();
  __device__ ulonglong2 pack(int pair) const;
  __device__ void send(std::uint64_t epoch, int token) const;

  std::int64_t id_ = -1;
  std::uint32_t bad_ = 0;  // bad ids of this warp's tokens
};

__device__ inline void LlManyTeller::drop_bad_id() {
  const bool out = id_ < -1 || id_ >= g_.experts;
  const bool named = id_ >= 0 && !out;
  const unsigned equal = equal_lanes(static_cast<unsigned>(id_), named);
  const bool repeated = named && (equal & lower_lanes()) != 0;
  const bool bad = out || (repeated && !g_.collapse);
  bad_ += static_cast<std::uint32_t>(__popc(__ballot_sync(kAllLanes, bad)));
  if (out || repeated) id_ = -1;
}

// Two of a token's words without their tags, in all lanes.
__device__ inline ulonglong2 LlManyTeller::pack(int pair) const {
  const LlIdWords& form = g_.ids;
  const int place = lane_id() - pair * form.per_word;
  const bool second = place >= form.per_word;
  const int at = second ? place - form.per_word : place;
  std::uint64_t id = id_ < 0 ? form.none() : static_cast<std::uint32_t>(id_);
  id = place < 0 || at >= form.per_word ? 0 : id << (at * form.bits);
  unsigned long long x = second ? 0 : id, y = second ? id : 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x |= __shfl_xor_sync(kAllLanes, x, step);
    y |= __shfl_xor_sync(kAllLanes, y, step);
  }
  return make_ulonglong2(x, y);
}

__device__ inline void LlManyTeller::send(std::uint64_t epoch, int token) const {
  const std::uint64_t tag = static_cast<std::uint64_t>(ll_tag(epoch)) << 48;
  const std::uint64_t offset = offset_of(epoch, token);
#pragma unroll 1
  for (int pair = 0; pair < g_.ids.words; pair += 2) {
    const ulonglong2 words = pack(pair);
#pragma unroll 1
    for (int n = 1 + lane_id(); n <= g_.ranks(); n += 32) {
      const int d = g_.rank() + n < g_.ranks() ? g_.rank() + n : g_.rank() + n - g_.ranks();
      if (g_.masks && s_.masked.has(d)) continue;
      ptx::st_relaxed_sys_pair(s_.area[d].base + offset + pair * 8,
                               make_ulonglong2(words.x | tag, words.y | tag));
    }
    __syncwarp();
  }
}

}  // namespace xd::ep::cuda
