// The receive half of a combine: the partial sums of this rank's tokens, added by ascending rank,
// or by host where ranks have named several.
//
//   memory                     written by             read by
//   partials[stage][t][order]  the ranks with rows    the movers of the token's block, each its 16
//                              of the token           bytes, which leave ones behind
//   out                        the same movers        the caller
//
// A mover takes no word before the verdict is there: where nothing is delivered, they stay.
#pragma once

#include "ep/slots/cuda/combine/push.cuh"

namespace xd::ep::cuda {

inline constexpr int kLlSumBarrier = 1;

// The number of ranks in a set that are lower than `rank`.
__device__ inline int order_of(const RankBits& ranks, int rank) {
  const std::uint64_t below = (std::uint64_t{1} << (rank % 64)) - 1;
  return rank < 64 ? __popcll(ranks.word[0] & below)
                   : __popcll(ranks.word[0]) + __popcll(ranks.word[1] & below);
}

// The lowest rank of a set that is not empty.
__device__ inline int lowest_of(const RankBits& ranks) {
  return ranks.word[0] != 0 ? __ffsll(static_cast<long long>(ranks.word[0])) - 1
                            : 63 + __ffsll(static_cast<long long>(ranks.word[1]));
}

// All threads of a block, once, where it waits for an operation: true if that is delivered. The
// control warp knows; `go` of all others is true.
__device__ inline bool ll_meet_verdict(bool go) { return __syncthreads_or(go ? 0 : 1) == 0; }

// A block's tokens from one on that sum_all() leaves: those that have to be waited for, that have
// many sums, or that need this rank's own part. It is no part of sum_all(): it would take registers
// of that.
template <class F, bool kByHost>
__device__ __noinline__ void ll_sum_rest(const LlCombineParams& p, LlCombineShared& s,
                                         std::uint64_t epoch, int unit, bool own, bool has_sum,
                                         uint4 sum);

template <class F, bool kByHost>
class LlSummer {
 public:
  static constexpr int kAtOnce = 4;  // partial sums of a token that are waited for together

  __device__ LlSummer(const LlCombineParams& params, LlCombineTurn& turn, LlCombineShared& shared,
                      const LlPlanParts& parts, LlPusher<F>& pusher, bool go)
      : p_(params),
        g_(params.group),
        turn_(turn),
        s_(shared),
        parts_(parts),
        pusher_(pusher),
        vectors_(params.row_bytes / F::kBytes),
        pieces_((vectors_ + kLlCombineMovers - 1) / kLlCombineMovers),
        go_(go) {}

  // Movers. `own`: this launch also pushes, so this rank's own part is not in memory; `sum` is that
  // of the block's first token.
  __device__ void sum_all(std::uint64_t epoch, bool own, const uint4& sum);
  // The units from one on, behind the verdict; `has_sum`: `sum` is this rank's part of the first.
  __device__ void sum_from(std::uint64_t epoch, int unit, bool own, bool has_sum, uint4 sum);
  // In groups that mask, instead: the tokens from one on. A row goes without the same ranks as a
  // whole, so one block has all of it, and takes no word before all have come or are given up.
  __device__ void sum_whole_rows(std::uint64_t epoch, int token, bool own, bool has_sum, uint4 sum);

 private:
  // All movers of a block, once: the control warp's verdict, true if it is to deliver. It comes to
  // one also where waits have failed. Warps that wait here take no instructions from those that
  // work, as they would where they polled.
  __device__ bool await_verdict() { return go_ = ll_meet_verdict(true); }

  // Kernels of wires ask the group.
  __device__ bool by_host() const {
    if constexpr (F::kWire) return g_.num_hosts > 1;
    return kByHost;
  }
  // Behind a wait of each thread: words of others may be put back.
  __device__ static void meet_in_warp() {
    if constexpr (F::kShared) __syncwarp();
  }

  // Tokens times pieces of their rows.
  __device__ int units() const { return p_.out_rows * static_cast<int>(pieces_); }
  struct Token {
    int token, count, own;  // own: order of this rank's part; -1 = in memory like the others
    RankBits absent;        // places without a sum that is waited for
    std::uint32_t vector;
  };
  __device__ std::uint64_t place_of(int token, int order, std::uint64_t epoch) const {
    return ll_partial_offset(g_, turn_.stage(epoch),
                             static_cast<std::uint32_t>(token * g_.partials_per_token() + order));
  }
  // A mover's words of the sums from a place on.
  __device__ typename F::Place words_at(const Token& t, int order, std::uint64_t epoch) const {
    return {g_.own_area + place_of(t.token, order, epoch), t.vector, p_};
  }
  __device__ Token look_at(int unit, bool own, bool first) const;
  // Behind the verdict: looks at a unit, and makes this rank's part of it unless `has_sum`.
  __device__ Token begin(std::uint64_t epoch, int unit, bool own, bool& has_sum, uint4& sum);
  __device__ bool wait_words(std::uint64_t epoch, const Token& t, int first, unsigned& wanted,
                             ulonglong2 (&words)[kAtOnce]);
  __device__ void wait_all_words(std::uint64_t epoch, const Token& t);
  __device__ unsigned places_from(const Token& t, int first) const;
  __device__ static unsigned own_place_from(const Token& t, int first) {
    return t.own >= first && t.own < first + kAtOnce ? 1u << (t.own - first) : 0u;
  }
  __device__ unsigned lost_places(const Token& t, int first) const;
  __device__ bool add_few(const Token& t, std::uint64_t epoch, const uint4& own, bool first);
  __device__ uint4 sum_of(const Token& t, const ulonglong2 (&words)[kAtOnce],
                          const uint4& own) const;
  __device__ void add(const Token& t, std::uint64_t epoch, const uint4& own) {
    if (by_host()) {
      add_by_host(t, epoch, own);
    } else {
      add_by_rank(t, epoch, own);
    }
  }
  __device__ void add_by_rank(const Token& t, std::uint64_t epoch, const uint4& own);
  __device__ void add_by_host(const Token& t, std::uint64_t epoch, const uint4& own);
  __device__ bool take_one(const Token& t, std::uint64_t epoch, int place, const uint4& own,
                           uint4& taken, bool& all_good);
  __device__ void put(const Token& t, const uint4& sum) const {
    F::put(p_.out + static_cast<std::uint64_t>(t.token) * p_.row_bytes + t.vector * F::kBytes, sum);
  }
  __device__ int rank_of(const Token& t, int order) const;

  const LlCombineParams& p_;
  const LlDevice& g_;
  LlCombineTurn& turn_;
  LlCombineShared& s_;
  const LlPlanParts& parts_;
  LlPusher<F>& pusher_;
  const std::uint32_t vectors_, pieces_;
  bool go_;  // the verdict that this warp has met last
};

#define XD_LL_SUMMER(type)         \
  template <class F, bool kByHost> \
  __device__ inline type LlSummer<F, kByHost>

XD_LL_SUMMER(void)::sum_all(std::uint64_t epoch, bool own, const uint4& sum) {
  auto unit = static_cast<int>(blockIdx.x);
  bool first = true;
  // The part that push_all() has left belongs to the first token's first piece.
  bool has_sum = own && pieces_ == 1;
#pragma unroll 1
  for (; !by_host() && unit < units() && !g_.masks; unit += static_cast<int>(gridDim.x)) {
    const Token t = look_at(unit, own, first);
    if (t.count > kAtOnce || (own && !has_sum)) break;
    const bool done = add_few(t, epoch, sum, first);
    first = false;
    if (!go_) return;
    if (!done) break;
    has_sum = false;
  }
  if (first) await_verdict();
  if (unit < units() && go_) ll_sum_rest<F, kByHost>(p_, s_, epoch, unit, own, has_sum, sum);
}

XD_LL_SUMMER(void)::sum_from(std::uint64_t epoch, int unit, bool own, bool has_sum, uint4 sum) {
#pragma unroll 1
  for (; unit < units(); unit += static_cast<int>(gridDim.x)) {
    const Token t = begin(epoch, unit, own, has_sum, sum);
    const bool few = !by_host() && t.count <= kAtOnce;
    if (!few || !add_few(t, epoch, sum, false)) add(t, epoch, sum);
    if (!go_) return;
  }
}

XD_LL_SUMMER(void)::sum_whole_rows(std::uint64_t epoch, int token, bool own, bool has_sum,
                                   uint4 sum) {
  const int pieces = static_cast<int>(pieces_);
#pragma unroll 1
  for (; token < p_.out_rows; token += static_cast<int>(gridDim.x)) {
#pragma unroll 1
    for (int unit = token * pieces; pieces > 1 && unit < (token + 1) * pieces; ++unit) {
      wait_all_words(epoch, look_at(unit, own, false));
    }
#pragma unroll 1
    for (int unit = token * pieces; unit < (token + 1) * pieces; ++unit) {
      const Token t = begin(epoch, unit, own, has_sum, sum);
      add(t, epoch, sum);
    }
  }
}

template <class F, bool kByHost>
__device__ __noinline__ void ll_sum_rest(const LlCombineParams& p, LlCombineShared& s,
                                         std::uint64_t epoch, int unit, bool own, bool has_sum,
                                         uint4 sum) {
  LlCombineTurn turn(p, s.turn, kLlCombine);
  const LlPlanParts parts(p);
  LlPusher<F> pusher(p, turn, s, parts);
  pusher.look_at_facts();
  LlSummer<F, kByHost> summer(p, turn, s, parts, pusher, true);
  if (p.group.masks) return summer.sum_whole_rows(epoch, unit, own, has_sum, sum);
  summer.sum_from(epoch, unit, own, has_sum, sum);
}

XD_LL_SUMMER(auto)::look_at(int unit, bool own, bool first) const -> Token {
  const int token = pieces_ == 1 ? unit : unit / static_cast<int>(pieces_);
  const int piece = unit - token * static_cast<int>(pieces_);
  const RankBits home = first && pieces_ == 1 ? s_.first_home : parts_.home(token);
  Token t{};
  t.token = token;
  t.vector = static_cast<std::uint32_t>(piece) * kLlCombineMovers + threadIdx.x;
  t.own = -1;
  if (g_.masks) {
    // A place for each rank.
    t.count = g_.ranks();
    t.absent = ~(home & turn_.shared().company);
    if (own && home.has(g_.rank())) t.own = g_.rank();
  } else {
    t.count = min(__popcll(home.word[0]) + __popcll(home.word[1]), g_.partials_per_token());
    if (own && home.has(g_.rank())) t.own = order_of(home, g_.rank());
  }
  return t;
}

XD_LL_SUMMER(auto)::begin(std::uint64_t epoch, int unit, bool own, bool& has_sum, uint4& sum)
    -> Token {
  const Token t = look_at(unit, own, false);
  if (own && !has_sum) {
    pusher_.load_own(t.token, t.vector);
    sum = pusher_.add_up(epoch);
  }
  has_sum = false;
  return t;
}

// The rank whose partial sum has that order.
XD_LL_SUMMER(int)::rank_of(const Token& t, int order) const {
  if (g_.masks) return order;
  const RankBits home = parts_.home(t.token);
#pragma unroll 1
  for (int r = 0; r < g_.ranks(); ++r) {
    if (home.has(r) && order_of(home, r) == order) return r;
  }
  return g_.rank();
}

// Polls this thread's words of up to four partial sums, those whose bit is set in `wanted`, if the
// verdict is to deliver. Sums that have been given up lose their bit. False: there is nothing to
// take.
XD_LL_SUMMER(bool)::wait_words(std::uint64_t epoch, const Token& t, int first, unsigned& wanted,
                               ulonglong2 (&words)[kAtOnce]) {
  const typename F::Place at = words_at(t, first, epoch);
  if (!go_) return false;
  unsigned missing = wanted;
  turn::LongWait wait;
  return turn::poll_until(
      [&] {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if ((missing >> j & 1) != 0) {
            words[j] = at.load(j * g_.map.partial_stride);
          }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if ((missing >> j & 1) != 0 && has_come(words[j])) missing &= ~(1u << j);
        }
        return missing == 0;
      },
      [&] {
        // All words are read again behind the call, over which they would have to lie in memory.
        const int late = first + __ffs(static_cast<int>(missing)) - 1;
        if (turn_.goes_on(XD_PHASE_ROWS, epoch, rank_of(t, late), wait)) {
          missing = wanted;
          return true;
        }
        // The sum goes without that rank, and waits for the others.
        wanted &= ~(1u << (late - first));
        missing = wanted;
        wait.peer_is_lost = false;
        return g_.masks && *static_cast<volatile int*>(&s_.turn.failed) == 0;
      });
}

// The places from `first` on in which sums of the token lie, as bits; this rank's own is one of
// them.
XD_LL_SUMMER(unsigned)::places_from(const Token& t, int first) const {
  unsigned places = 0;
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    if (first + j < t.count && !(g_.masks && t.absent.has(first + j))) places |= 1u << j;
  }
  return places;
}

// Waits until all of this thread's words of a piece of a token have come or are given up, and takes
// none.
XD_LL_SUMMER(void)::wait_all_words(std::uint64_t epoch, const Token& t) {
#pragma unroll 1
  for (int first = 0; t.vector < vectors_ && first < t.count; first += kAtOnce) {
    unsigned wanted = places_from(t, first) & ~own_place_from(t, first);
    ulonglong2 words[kAtOnce];
    wait_words(epoch, t, first, wanted, words);
  }
}

// A token with up to four sums, in groups that do not mask: nearly all tokens are such. With the
// block's first token the verdict comes, while its words do. False: they have not come for long,
// and none has been taken. Here is no call, over which the words would have to lie in memory.
XD_LL_SUMMER(bool)::add_few(const Token& t, std::uint64_t epoch, const uint4& own, bool first) {
  const bool active = t.vector < vectors_;
  const typename F::Place at = words_at(t, 0, epoch);
  const unsigned places = (1u << t.count) - 1, own_place = t.own >= 0 ? 1u << t.own : 0;
  unsigned missing = active ? places & ~own_place : 0;
  bool come = false;
  ulonglong2 words[kAtOnce];
#pragma unroll 1
  for (int i = 0; i < turn::kPollsBetweenLooks; ++i) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if ((missing >> j & 1) != 0) {
        words[j] = at.load(j * g_.map.partial_stride);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if ((missing >> j & 1) != 0 && has_come(words[j])) missing &= ~(1u << j);
    }
    // A warp stays together.
    come = __all_sync(kAllLanes, missing == 0) != 0;
    if (come) break;
  }
  if (first) await_verdict();
  // Where nothing is delivered, nothing is taken.
  if (!go_) return true;
  if (!come) return false;
  if (!active) return true;
  put(t, sum_of(t, words, own));
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    if (j < t.count && j != t.own) at.put_back(j * g_.map.partial_stride);
  }
  return true;
}

// The sum of a token's partial sums, of which one may be this rank's own.
XD_LL_SUMMER(uint4)::sum_of(const Token& t, const ulonglong2 (&words)[kAtOnce],
                            const uint4& own) const {
  const uint4 first = t.own == 0 ? own : vector_of(words[0]);
  if (t.count == 0) return make_uint4(0, 0, 0, 0);
  if (t.count == 1) return F::round_one(first);
  float sum[F::kColumns];
  F::unpack(first, sum);
#pragma unroll
  for (int j = 1; j < kAtOnce; ++j) {
    if (j < t.count) F::add(sum, j == t.own ? own : vector_of(words[j]));
  }
  return F::round(sum);
}

XD_LL_SUMMER(void)::add_by_rank(const Token& t, std::uint64_t epoch, const uint4& own) {
  const bool active = t.vector < vectors_;
  float sum[F::kColumns];
#pragma unroll
  for (int n = 0; n < F::kColumns; ++n) sum[n] = -0.0f;
  int added = 0;
  uint4 only = make_uint4(0, 0, 0, 0);
  bool all_good = true;
#pragma unroll 1
  for (int first = 0; first < max(t.count, 1); first += kAtOnce) {
    unsigned places = places_from(t, first);
    const unsigned own_place = own_place_from(t, first);
    unsigned wanted = active ? places & ~own_place : 0;
    ulonglong2 words[kAtOnce];
    const bool good = wait_words(epoch, t, first, wanted, words);
    if (g_.masks) places &= ~lost_places(t, first);
    meet_in_warp();
    all_good &= good;
    if (!good || !active) continue;
    const typename F::Place at = words_at(t, first, epoch);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if ((places >> j & 1) == 0) continue;
      const bool mine = (own_place >> j & 1) != 0;
      only = mine ? own : vector_of(words[j]);
      ++added;
      F::add(sum, only);
      if (!mine) at.put_back(j * g_.map.partial_stride);
    }
  }
  if (!active || !all_good) return;
  if (added > 1) only = F::round(sum);
  if (added == 1) only = F::round_one(only);
  put(t, only);
}

// Takes the partial sum at one place of a token. False: none lies there, or it has not come.
XD_LL_SUMMER(bool)::take_one(const Token& t, std::uint64_t epoch, int place, const uint4& own,
                             uint4& taken, bool& all_good) {
  const bool active = t.vector < vectors_, mine = place == t.own;
  unsigned here = places_from(t, place) & 1u;
  unsigned wanted = active && !mine ? here : 0;
  ulonglong2 words[kAtOnce];
  const bool good = wait_words(epoch, t, place, wanted, words);
  if (g_.masks) here &= ~lost_places(t, place);
  meet_in_warp();
  all_good &= good;
  if (!good || !active || here == 0) return false;
  taken = mine ? own : vector_of(words[0]);
  if (!mine) words_at(t, place, epoch).put_back(0);
  return true;
}

// A token's partial sums by host. They are waited for one after another: all movers of a block go
// the same way through hosts and ranks.
XD_LL_SUMMER(void)::add_by_host(const Token& t, std::uint64_t epoch, const uint4& own) {
  const RankBits home = parts_.home(t.token);
  float total[F::kColumns], of_host[F::kColumns];
#pragma unroll
  for (int n = 0; n < F::kColumns; ++n) total[n] = -0.0f;
  int added = 0;
  uint4 only = make_uint4(0, 0, 0, 0);
  bool all_good = true;
#pragma unroll 1
  for (int h = 0; h < g_.num_hosts; ++h) {
#pragma unroll
    for (int n = 0; n < F::kColumns; ++n) of_host[n] = -0.0f;
    const int before = added;
    RankBits left = home & g_.hosts[h];
#pragma unroll 1
    while (!left.empty()) {
      const int rank = lowest_of(left);
      left.remove(rank);
      const int place = g_.masks ? rank : order_of(home, rank);
      if (place >= t.count || !take_one(t, epoch, place, own, only, all_good)) continue;
      ++added;
      F::add(of_host, only);
    }
    if (added > before) F::add_host(total, of_host);
  }
  if (t.vector >= vectors_ || !all_good) return;
  if (added > 1) only = F::round(total);
  if (added == 1) only = F::round_one(only);
  put(t, only);
}

// Of four places of a token, those of ranks that have been lost. All columns of a token go without
// the same ranks, so all movers ask at the same time.
XD_LL_SUMMER(unsigned)::lost_places(const Token& t, int first) const {
  ptx::barrier_sync(kLlSumBarrier, kLlCombineMovers);
  const volatile unsigned long long* lost = s_.turn.lost;
  const RankBits ranks{lost[0], lost[1]};
  ptx::barrier_sync(kLlSumBarrier, kLlCombineMovers);
  unsigned places = 0;
  for (int j = 0; j < kAtOnce; ++j) {
    if (first + j < t.count && ranks.has(first + j)) places |= 1u << j;
  }
  return places;
}

#undef XD_LL_SUMMER

}  // namespace xd::ep::cuda
