// The send half of a dispatch: rows, by blocks that do nothing else.
//
//   memory                      written by                 read by
//   tokens, topk_idx, weights   the caller, before         sender blocks
//   rows[stage][rank][t] there  a group of 224 threads     the owner's receiver blocks
//
// A token's row goes once to every rank that has an expert of it. The next row is loaded before
// this one is stored, since loads behind stores wait for the links. Sender blocks store nothing
// else, and receiver blocks store no word to peers while rows are on their way: a multiprocessor
// whose stores the links hold back also gets its loads late.
#pragma once

#include "ep/slots/cuda/dispatch/given.cuh"
#include "ep/slots/cuda/quantise.cuh"
#include "ep/slots/cuda/shape.h"
#include "ep/slots/cuda/turn.cuh"
#include "ep/slots/cuda/words.cuh"

namespace xd::ep::cuda {

inline constexpr int kLlGroupWarps = kLlGroupThreads / 32;
inline constexpr int kLlMovers = kLlDispatchMovers, kLlThreads = kLlDispatchThreads;
// In receiver blocks a group also has a tail warp; behind those are a warp that helps, and one that
// begins the launch's turn and watches for records.
inline constexpr int kLlGroupMembers = kLlGroupThreads + 32;
inline constexpr int kLlHelper = kLlThreads / 32 - 2, kLlWatch = kLlThreads / 32 - 1;
static_assert(kLlGroups * kLlGroupMembers == kLlHelper * 32);
// Vectors of a row that a thread, and a group, moves at once.
inline constexpr int kLlVectors = 4;
inline constexpr std::uint32_t kLlPiece = kLlVectors * kLlGroupThreads;
// Numbers of named barriers.
enum LlBarrier { kLlGroupBarrier = 1, kLlListBarrier = 3, kLlHeadBarrier = 4, kLlEndBarrier = 5 };

// The parts of dynamic shared memory.
struct LlSmemParts {
  const LlSmemLayout& room;
  std::byte* base;

  __device__ std::uint32_t* places() const { return at<std::uint32_t>(room.places); }
  __device__ std::uint32_t* counts() const { return at<std::uint32_t>(room.counts); }
  __device__ std::uint16_t* ids() const { return at<std::uint16_t>(room.ids); }
  __device__ std::uint32_t* hits() const { return at<std::uint32_t>(room.hits); }
  __device__ std::uint8_t* orders() const { return at<std::uint8_t>(room.orders); }
  __device__ std::uint32_t* names() const { return at<std::uint32_t>(room.names); }
  __device__ std::byte* tails() const { return base + room.tails; }
  __device__ std::int32_t* zones() const { return at<std::int32_t>(room.zones); }
  template <class T>
  __device__ T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
};

// The ranks of a token's experts: one word for up to 32 ranks, else three.
template <bool kMany>
struct LlRanks {
  static constexpr int kWords = kMany ? 3 : 1;
  std::uint32_t word[kWords];

  // All lanes: the ranks that the lanes name; -1 = none.
  __device__ static LlRanks of_lanes(int rank) {
    LlRanks ranks;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      ranks.word[w] =
          __reduce_or_sync(kAllLanes, rank >= 0 && rank / 32 == w ? 1u << (rank % 32) : 0u);
    }
    return ranks;
  }
  __device__ void add(int rank) {
    if constexpr (kMany) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) word[w] |= rank / 32 == w ? 1u << (rank % 32) : 0u;
    } else {
      word[0] |= 1u << rank;
    }
  }
  __device__ bool has(int rank) const {
    if constexpr (kMany) {
      bool found = false;
#pragma unroll
      for (int w = 0; w < kWords; ++w) found |= rank / 32 == w && (word[w] >> (rank % 32) & 1) != 0;
      return found;
    } else {
      return (word[0] >> rank & 1) != 0;
    }
  }
  __device__ int count_below(int rank) const {
    if constexpr (kMany) {
      int count = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int bits = rank - w * 32;
        count += __popc(bits <= 0 ? 0u : bits >= 32 ? word[w] : word[w] & ((1u << bits) - 1));
      }
      return count;
    } else {
      return __popc(word[0] & ((1u << rank) - 1));
    }
  }
};

// A dispatch's numbers that follow from its parameters.
using LlDispatchTurn = LlTurn<LlDispatchParams>;

__device__ inline std::int64_t ll_id_at(const LlDispatchParams& p, std::int64_t choice) {
  return p.wide_ids ? static_cast<const std::int64_t*>(p.topk_idx)[choice]
                    : static_cast<const std::int32_t*>(p.topk_idx)[choice];
}

// Rows in a rank's memory.
__device__ inline std::uint64_t ll_row_offset(const LlDevice& g, std::uint32_t stage, int source,
                                              int token) {
  const std::uint32_t row = (stage * g.ranks() + source) * g.max_tokens + token;
  return g.map.rows +
         static_cast<std::uint64_t>(row) * static_cast<std::uint32_t>(g.map.row_stride);
}

// The vectors of 16 bytes of a piece of a row that one thread loads: a group's vectors apart, in
// pairs that follow one another where these are quantised together.
template <bool kTogether>
struct LlVectors {
  uint4 v[kLlVectors];

  __device__ static std::uint32_t at(std::uint32_t piece, std::uint32_t thread, int i) {
    const std::uint32_t lane_of_pair = (i / 2) * kLlGroupThreads + thread;
    return piece * kLlPiece + (kTogether ? 2 * lane_of_pair + i % 2 : i * kLlGroupThreads + thread);
  }
  // Of the vector that the i-th pair becomes.
  __device__ static std::uint32_t at_quantised(std::uint32_t piece, std::uint32_t thread, int i) {
    return piece * (kLlPiece / 2) + i * kLlGroupThreads + thread;
  }
  __device__ void load(const std::byte* row, std::uint32_t vectors, std::uint32_t piece,
                       std::uint32_t thread) {
#pragma unroll
    for (int i = 0; i < kLlVectors; ++i) {
      v[i] = make_uint4(0, 0, 0, 0);
      if (at(piece, thread, i) < vectors) v[i] = ptx::ld_streaming(row + at(piece, thread, i) * 16);
    }
  }
};

// Weights of a token as a word of a row's tail.
__device__ inline std::uint64_t ll_weight_word(const float* weights, int topk, std::uint32_t word) {
  const std::uint32_t low = __float_as_uint(weights[2 * word]);
  const bool two = static_cast<int>(2 * word) + 1 < topk;
  const std::uint32_t high = two ? __float_as_uint(weights[2 * word + 1]) : 0;
  return static_cast<std::uint64_t>(high) << 32 | low;
}

// One group of a sender block.
template <class Quantiser, bool kMany>
class LlSender {
 public:
  static constexpr bool kQuantises = Quantiser::kQuantises;

  __device__ LlSender(const LlDispatchParams& params, LlShared& shared, const std::uint32_t* places,
                      std::byte* tails)
      : p_(params),
        g_(params.group),
        s_(shared),
        places_(places),
        group_(warp_in_block() / kLlGroupWarps),
        thread_(threadIdx.x % kLlGroupThreads),
        tails_(tails + group_ * 2 * params.smem.tail_stride),
        topk_(static_cast<int>(params.record.topk)) {}

  // Before the block's first barrier: the first row is on its way.
  __device__ void load_first() {
    token_ = group_ * p_.senders + static_cast<int>(blockIdx.x);
    if (token_ < tokens()) load(token_, 0, next_);
  }
  // Behind it.
  __device__ void send_all(std::uint64_t epoch);

 private:
  struct Loaded {
    LlVectors<kQuantises> row;
    std::int64_t id;        // of lane k
    std::uint64_t weights;  // this thread's word of the row's tail, if it has some
  };

  __device__ int tokens() const { return static_cast<int>(p_.record.tokens); }
  __device__ std::uint32_t row_vectors() const { return p_.record.row_bytes / 16; }
  __device__ std::uint32_t pieces() const { return (row_vectors() + kLlPiece - 1) / kLlPiece; }
  __device__ void load(int token, std::uint32_t piece, Loaded& to) const {
    const std::uint64_t at = static_cast<std::uint64_t>(token);
    to.id = -1;
    if (lane_id() < topk_) to.id = ll_id_at(p_, static_cast<std::int64_t>(at) * topk_ + lane_id());
    to.row.load(p_.tokens + at * p_.record.row_bytes, row_vectors(), piece, thread_);
    to.weights = 0;
    if (thread_ >= p_.form.scale_words && thread_ < p_.form.tail_words()) {
      to.weights = weight_word(token, thread_);
    }
  }
  __device__ LlRanks<kMany> ranks_of(std::int64_t id) const {
    const bool good = id >= 0 && id < g_.experts;
    return LlRanks<kMany>::of_lanes(good ? static_cast<int>(places_[id] >> 16) : -1);
  }
  __device__ void send(const LlRanks<kMany>& to, std::uint64_t offset, int token,
                       std::uint32_t piece, const Loaded& loaded);
  template <class Body>
  __device__ void for_each_row_of(const LlRanks<kMany>& to, std::uint64_t offset,
                                  Body&& body) const;
  __device__ void send_given(const LlRanks<kMany>& to, std::uint64_t offset, int token,
                             std::uint32_t piece, const Loaded& loaded);
  __device__ void send_given_tail(const LlRanks<kMany>& to, std::uint64_t offset, int token);
  __device__ std::uint64_t weight_word(int token, std::uint32_t word) const {
    return ll_weight_word(p_.topk_weights + static_cast<std::int64_t>(token) * topk_, topk_,
                          word - p_.form.scale_words);
  }
  __device__ std::uint64_t scale_word(std::uint32_t word) const {
    return reinterpret_cast<const std::uint64_t*>(tails_)[word];
  }

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlShared& s_;
  const std::uint32_t* places_;
  const int group_;
  const std::uint32_t thread_;
  std::byte* tails_;  // of this row
  const int topk_;
  int token_ = 0;
  Loaded next_{};
};

template <class Quantiser, bool kMany>
__device__ void LlSender<Quantiser, kMany>::send_all(std::uint64_t epoch) {
  const std::uint32_t stage = turn::pipeline_stage(epoch, g_.stages);
  std::byte* const tails[2] = {tails_, tails_ + p_.smem.tail_stride};
  std::uint32_t piece = 0;
  int parity = 0;
  LlRanks<kMany> ranks{};
#pragma unroll 1
  for (int t = token_; t < tokens();) {
    const Loaded now = next_;
    const bool last = piece + 1 == pieces();
    const int then = last ? t + kLlGroups * p_.senders : t;
    if (then < tokens()) load(then, last ? 0 : piece + 1, next_);
    if (piece == 0) ranks = ranks_of(now.id);
    tails_ = parity == 0 ? tails[0] : tails[1];
    send(ranks, ll_row_offset(g_, stage, g_.rank(), t), t, piece, now);
    if (last) parity ^= 1;
    piece = last ? 0 : piece + 1;
    t = then;
  }
}

template <class Quantiser, bool kMany>
__device__ void LlSender<Quantiser, kMany>::send(const LlRanks<kMany>& to, std::uint64_t offset,
                                                 int token, std::uint32_t piece,
                                                 const Loaded& loaded) {
  if constexpr (kIsGiven<Quantiser>) return send_given(to, offset, token, piece, loaded);
  constexpr int kSent = kQuantises ? kLlVectors / 2 : kLlVectors;
  const bool last = piece + 1 == pieces();
  ulonglong2 words[kSent];
  std::uint32_t at[kSent];
#pragma unroll
  for (int i = 0; i < kSent; ++i) {
    if constexpr (kQuantises) {
      const LlQuantised q =
          quantise_columns<Quantiser>(loaded.row.v[2 * i], loaded.row.v[2 * i + 1], p_.format);
      words[i] = words_of(q.elements);
      at[i] = LlVectors<true>::at_quantised(piece, thread_, i);
      if (thread_ % kLanesPerScale == 0 && at[i] < p_.form.vectors) {
        put_scale(tails_, at[i] / kLanesPerScale, q.scale, p_.format);
      }
    } else {
      words[i] = words_of(loaded.row.v[i]);
      at[i] = LlVectors<false>::at(piece, thread_, i);
    }
  }
  // The scales of a row are complete; tails of two rows take turns.
  if (kQuantises && last) ptx::barrier_sync(kLlGroupBarrier + group_, kLlGroupThreads);
  const bool has_tail = last && thread_ < p_.form.tail_words();
  std::uint64_t tail = loaded.weights;
  if (kQuantises && has_tail && thread_ < p_.form.scale_words) tail = scale_word(thread_);
  // Own rows cross only where a later launch takes them.
  const int count = s_.course.receives ? g_.ranks() - 1 : g_.ranks();
#pragma unroll 1
  for (int n = 1; n <= count; ++n) {
    int d = g_.rank() + n;
    if (d >= g_.ranks()) d -= g_.ranks();
    if (!to.has(d) || (g_.masks && s_.masked.has(d))) continue;
    std::byte* row = s_.area[d].base + offset;
#pragma unroll
    for (int i = 0; i < kSent; ++i) {
      if (at[i] < p_.form.vectors) send_pair(row + at[i] * 16, words[i]);
    }
    if (!has_tail) continue;
    std::byte* const to_tail = row + p_.form.payload();
    send_word(to_tail + thread_ * 8, tail);
#pragma unroll 1
    for (std::uint32_t w = thread_ + kLlGroupThreads; w < p_.form.tail_words();
         w += kLlGroupThreads) {
      const bool scales = kQuantises && w < p_.form.scale_words;
      send_word(to_tail + w * 8, scales ? scale_word(w) : weight_word(token, w));
    }
  }
}

// ---- Rows that are given -----------------------------------------------------------------------

// Calls body(row) for the row's place at each of the ranks, as send() does.
template <class Quantiser, bool kMany>
template <class Body>
__device__ void LlSender<Quantiser, kMany>::for_each_row_of(const LlRanks<kMany>& to,
                                                            std::uint64_t offset,
                                                            Body&& body) const {
  const int count = s_.course.receives ? g_.ranks() - 1 : g_.ranks();
#pragma unroll 1
  for (int n = 1; n <= count; ++n) {
    int d = g_.rank() + n;
    if (d >= g_.ranks()) d -= g_.ranks();
    if (to.has(d) && !(g_.masks && s_.masked.has(d))) body(s_.area[d].base + offset);
  }
}

// The lanes of a warp have neighbouring vectors, whose first is a multiple of 32: all words of two
// escapes.
template <class Quantiser, bool kMany>
__device__ void LlSender<Quantiser, kMany>::send_given(const LlRanks<kMany>& to,
                                                       std::uint64_t offset, int token,
                                                       std::uint32_t piece, const Loaded& loaded) {
  static_assert(LlGivenForm::kEach == 32 && kLlGroupThreads % 32 == 0);
  const LlGivenForm& form = ll_given(p_).given_form;
  const auto lane = static_cast<std::uint32_t>(lane_id());
#pragma unroll
  for (int i = 0; i < kLlVectors; ++i) {
    const ulonglong2 words = words_of(loaded.row.v[i]);
    const std::uint32_t at = LlVectors<false>::at(piece, thread_, i);
    const unsigned lower = __ballot_sync(kAllLanes, words.x == kFree);
    const unsigned upper = __ballot_sync(kAllLanes, words.y == kFree);
    const bool has_escapes = lane < 2 && at - lane < p_.form.vectors;
    for_each_row_of(to, offset, [&](std::byte* row) {
      if (at < p_.form.vectors) send_pair(row + at * 16, words);
      if (!has_escapes) return;
      send_word(row + p_.form.payload() + form.escapes_of_vector(at, lane) * 8,
                lane == 0 ? lower : upper);
    });
  }
  if (piece + 1 == pieces()) send_given_tail(to, offset, token);
}

template <class Quantiser, bool kMany>
__device__ void LlSender<Quantiser, kMany>::send_given_tail(const LlRanks<kMany>& to,
                                                            std::uint64_t offset, int token) {
  const LlGivenForm& form = ll_given(p_).given_form;
  const auto lane = static_cast<std::uint32_t>(lane_id());
#pragma unroll 1
  for (std::uint32_t first = thread_ - lane; first < form.scale_words; first += kLlGroupThreads) {
    const std::uint32_t w = first + lane;
    std::uint64_t word = 0;
    if (w < form.scale_words) word = ll_given_scale_word(ll_given(p_), token, w);
    const unsigned ones = __ballot_sync(kAllLanes, word == kFree);
    for_each_row_of(to, offset, [&](std::byte* row) {
      std::byte* const tail = row + p_.form.payload();
      if (w < form.scale_words) send_word(tail + w * 8, word);
      if (lane == 0) send_word(tail + form.escapes_of_scales(first) * 8, ones);
    });
  }
#pragma unroll 1
  for (std::uint32_t w = p_.form.scale_words + thread_; w < p_.form.tail_words();
       w += kLlGroupThreads) {
    const std::uint64_t word = weight_word(token, w);
    for_each_row_of(to, offset,
                    [&](std::byte* row) { send_word(row + p_.form.payload() + w * 8, word); });
  }
}

}  // namespace xd::ep::cuda
