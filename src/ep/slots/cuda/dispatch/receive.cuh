// The receive half of a dispatch: rows from staging memory, and this rank's own, to the slots of
// all their experts.
//
//   memory                      written by              read by
//   rows[stage][source][t]      the source's senders    one group of a receiver block, which leaves
//                                                       ones behind
//   tokens                      the caller              the same group: own rows, in a launch that
//                                                       does both halves
//   recv_tokens                 movers of that group    the caller
//   recv_scales, source_tokens, its tail warp           the caller
//   recv_weights, recv_topk_idx
//   item[] of the plan          its tail warp           combine
//
// A row belongs to one group of one block: 7 warps of movers and a tail warp. A mover polls 64
// bytes of the row, stores them to all slots of the row, and puts the ones back; the tail warp does
// so with the row's scales and weights. Nothing passes between groups.
//
// Where rows lie without gaps (kRows) a row's places are rows of [N,H], which are slots of one
// expert here; and what lies behind the rows is filled at the end, by all groups (fill.cuh).
#pragma once

#include "ep/slots/cuda/dispatch/list.cuh"

namespace xd::ep::cuda {

// The form of the rows that a receive half takes.
struct LlTaken {
  LlRowForm form;
  int topk;

  __device__ static LlTaken of(const LlRecord& record) {
    const QuantiseFormat format = quantise_format(static_cast<xd_ep_quantise>(record.quantise));
    const std::uint32_t scales =
        format ? record.row_bytes / 2 / format.block * format.scale_bytes : 0;
    return {ll_row_form(record.row_bytes, scales, static_cast<bool>(format),
                        (record.flags & kWeighted) != 0 ? static_cast<int>(record.topk) : 0),
            static_cast<int>(record.topk)};
  }
  // Of rows that are given: scales are as this rank's receive half has them.
  __device__ static LlTaken of_given(const LlRecord& record, const LlGivenForm& form) {
    return {{.vectors = record.row_bytes / 16,
             .scale_words = form.words(),
             .weight_words = (record.flags & kWeighted) != 0 ? (record.topk + 1) / 2 : 0},
            static_cast<int>(record.topk)};
  }
};

struct LlReceiveShared {
  LlPlace place[kLlGroups][2][kMaxTopk];
  std::int64_t offset[kLlGroups][2][kMaxTopk];  // of the place in recv_tokens, in bytes
  // The number of a row whose words have been given up: its slots become zeros.
  int lost[kLlGroups][2];
  LlTaken taken;  // written by the helper, or by the warp that judges
};

// True if no wait of the block is worth beginning: one has failed.
__device__ inline bool ll_has_failed(const LlDevice& g, const LlShared& shared) {
  return !g.masks && *static_cast<const volatile int*>(&shared.failed) != 0;
}

// Where a group's warp has come to: the place of its unit in the list, the number of its row, and
// the piece that it takes next; kFromStart = the row's places have not been looked for.
struct LlRowStep {
  static constexpr int kFromStart = -1;
  int at, row, piece;
};

// `kMoves`: for movers, else for tail warps. `kSlow`: the steps of all that is rare. Values that
// they keep over calls would take registers of the others, and lie in memory; so those make no
// call, and where they would wait for long, they hand over.
// `kRows`: as LlList's.
template <class Quantiser, bool kMany, bool kRows, bool kMoves, bool kSlow>
class LlReceiver;

// Takes a warp's units from a step on, behind the verdict.
template <class Quantiser, bool kMany, bool kRows, bool kMoves>
__device__ __noinline__ void ll_take_slowly(const LlDispatchParams& p, LlShared& shared,
                                            LlListShared& of_list, LlReceiveShared& receive,
                                            std::uint64_t epoch, LlRowStep from);

template <class Quantiser, bool kMany, bool kRows, bool kMoves, bool kSlow>
class LlReceiver {
 public:
  static constexpr bool kQuantises = Quantiser::kQuantises;

  __device__ LlReceiver(const LlDispatchParams& params, LlDispatchTurn& turn,
                        const LlList<kMany, kRows>& list, LlListShared& of_list,
                        LlReceiveShared& receive, std::uint64_t epoch)
      : p_(params),
        g_(params.group),
        turn_(turn),
        list_(list),
        parts_{params.smem, ptx::dynamic_shared()},
        l_(of_list),
        r_(receive),
        group_(kMoves ? warp_in_block() / kLlGroupWarps : warp_in_block() - kLlMovers / 32),
        thread_(kMoves ? thread_in_block() - group_ * kLlGroupThreads
                       : kLlGroupThreads + lane_id()),
        epoch_(epoch),
        stage_(turn.stage(epoch)) {}

  // All threads of the groups, behind the list's barrier. await() returns the verdict, which is
  // there already if `known`; all threads of the block call it once. Returns the verdict.
  template <class Await>
  __device__ LlVerdict take_all(bool known, LlVerdict verdict, Await await);
  // The same from a step on, behind a verdict that is to deliver.
  __device__ void take_from(LlRowStep from);

 private:
  // The part of a row that a mover holds: loaded vectors, of which two become one where they are
  // quantised.
  static constexpr int kTaken = kQuantises ? kLlVectors / 2 : kLlVectors;
  static constexpr std::uint32_t kPiece = kTaken * kLlGroupThreads;  // of a row as it travels
  struct Held {
    ulonglong2 v[kLlVectors];
  };

  // The i-th vector of a thread in a piece of a row as it travels.
  __device__ std::uint32_t at(std::uint32_t piece, int i) const {
    return piece * kPiece + i * kLlGroupThreads + thread_;
  }
  // A launch that does both halves reads own rows from `tokens`.
  __device__ bool reads_here(const LlUnit& unit) const {
    return turn_.shared().course.rows && unit.source() == g_.rank();
  }
  __device__ LlRowStep start() const {
    return {list_.taker() + group_ * list_.takers(), 0, LlRowStep::kFromStart};
  }
  __device__ void hand_over(LlRowStep from) const {
    ll_take_slowly<Quantiser, kMany, kRows, kMoves>(p_, turn_.shared(), l_, r_, epoch_, from);
  }
  __device__ int parity() const { return row_ & 1; }
  __device__ void meet() const { ptx::barrier_sync(kLlGroupBarrier + group_, kLlGroupMembers); }
  __device__ std::byte* staged(const LlUnit& unit) const {
    return g_.own_area + ll_row_offset(g_, stage_, unit.source(), unit.token());
  }
  __device__ void find_places(const LlUnit& unit);
  __device__ void find_row(const LlUnit& unit);
  __device__ LlPlace place_of_lane(int row) const {
    LlPlace place{-1, 0};
    if (lane_id() < r_.taken.topk) place = r_.place[group_][row & 1][lane_id()];
    return place;
  }
  __device__ void load_words(const std::byte* row, std::uint32_t piece, Held& held) const;
  __device__ void load_first(const LlUnit& unit, Held& held) const {
    if constexpr (kMoves) {
      if (reads_here(unit)) {
        load_own(unit, 0, held);
      } else {
        load_words(staged(unit), 0, held);
      }
    }
  }
  __device__ bool take_words(const LlUnit& unit, const std::byte* row, std::uint32_t piece,
                             Held& held);
  __device__ void load_own(const LlUnit& unit, std::uint32_t piece, Held& held) const;
  __device__ bool take(const LlUnit& unit, LlRowStep& step, Held& held);
  __device__ bool take_remote(const LlUnit& unit, LlRowStep& step, Held& held);
  __device__ void take_own(const LlUnit& unit, Held& held);
  __device__ void store(unsigned here, std::uint32_t piece, const Held& held) const;
  __device__ void note_lost() { *static_cast<volatile int*>(&r_.lost[group_][parity()]) = row_; }
  __device__ bool take_tail(const LlUnit& unit, int list_at);
  __device__ void take_long_tail(const LlUnit& unit, std::uint32_t first, std::byte* item,
                                 bool own);
  __device__ std::uint64_t own_tail_word(const LlUnit& unit, std::uint32_t w) const;
  // Rows that are given:
  template <class Await>
  __device__ LlVerdict take_given(bool known, LlVerdict verdict, Await await);
  __device__ std::uint64_t escapes_at(const std::byte* row, std::uint32_t number) const {
    const std::byte* const at = row + r_.taken.form.payload() + number * 8;
    return ptx::ld_relaxed_sys(reinterpret_cast<const std::uint64_t*>(at));
  }
  __device__ bool has_escapes(const std::byte* row, std::uint32_t piece, const Held& held) const;
  __device__ void put_ones(const std::byte* row, std::uint32_t piece, Held& held) const;
  __device__ void take_given_tail(const LlUnit& unit, std::byte* item, bool own);
  __device__ void take_given_scales(const LlUnit& unit, bool own);
  __device__ bool await_tail_word(const LlUnit& unit, const std::byte* at, std::uint64_t& word);
  __device__ bool wait_tail_word(const LlUnit& unit, std::byte* at, std::uint64_t& word);
  __device__ void deliver_tail_word(const LlUnit& unit, unsigned here, std::uint32_t w,
                                    std::uint64_t word, std::byte* item) const;
  __device__ void write_choices(const LlUnit& unit) const;
  __device__ void deliver_weight(const LlUnit& unit, int k, std::uint32_t weight) const;
  __device__ void store_scales(unsigned here, std::uint32_t w, std::uint64_t word) const;
  __device__ void write_item(const LlUnit& unit, std::byte* item) const;
  __device__ std::byte* item_of(const LlUnit& unit, int list_at) const;
  __device__ void zero_lost(int row);
  __device__ void zero_tail(int row, unsigned here) const;

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlDispatchTurn& turn_;
  const LlList<kMany, kRows>& list_;
  const LlSmemParts parts_;
  LlListShared& l_;
  LlReceiveShared& r_;
  const int group_;
  const std::uint32_t thread_;
  const std::uint64_t epoch_;
  const std::uint32_t stage_;
  int row_ = 0;  // number of this group's row
};

#define XD_LL_RECEIVER(type)                                                  \
  template <class Quantiser, bool kMany, bool kRows, bool kMoves, bool kSlow> \
  __device__ inline type LlReceiver<Quantiser, kMany, kRows, kMoves, kSlow>

template <class Quantiser, bool kMany, bool kRows, bool kMoves, bool kSlow>
template <class Await>
__device__ inline LlVerdict LlReceiver<Quantiser, kMany, kRows, kMoves, kSlow>::take_all(
    bool known, LlVerdict verdict, Await await) {
  static_assert(!kSlow);
  if constexpr (kIsGiven<Quantiser>) return take_given(known, verdict, await);
  const bool is_usual = !g_.masks && p_.smem.has_ids && r_.taken.form.tail_words() <= 32;
  LlListCursor cursor;
  LlRowStep step = start();
  LlUnit unit;
  // Every warp of the groups meets the one that makes the zones, once.
  bool has_zones = !kRows;
  const auto await_zones = [&has_zones] {
    if (!has_zones) ptx::barrier_sync(kLlListBarrier, kLlHelper * 32);
    has_zones = true;
  };
  while (is_usual && (!known || verdict == LlVerdict::go) && list_.find(step.at, cursor, unit)) {
    step.row = ++row_;
    // Words are on their way while their places are found; mostly they have come.
    Held held;
    load_first(unit, held);
    await_zones();
    find_places(unit);
    // The places are there behind either barrier.
    if (known) {
      meet();
    } else {
      verdict = await();
    }
    known = true;
    step.piece = 0;
    if (verdict != LlVerdict::go) break;
    if (!take(unit, step, held)) {
      hand_over(step);
      return verdict;
    }
    step.at += kLlGroups * list_.takers();
    step.piece = LlRowStep::kFromStart;
  }
  await_zones();
  if (!known) verdict = await();
  if (!is_usual && verdict == LlVerdict::go) hand_over(step);
  return verdict;
}

template <class Quantiser, bool kMany, bool kRows, bool kMoves>
__device__ __noinline__ void ll_take_slowly(const LlDispatchParams& p, LlShared& shared,
                                            LlListShared& of_list, LlReceiveShared& receive,
                                            std::uint64_t epoch, LlRowStep from) {
  LlDispatchTurn turn(p, shared, kLlDispatch);
  const LlList<kMany, kRows> list(p, turn, of_list, {p.smem, ptx::dynamic_shared()});
  LlReceiver<Quantiser, kMany, kRows, kMoves, true> receiver(p, turn, list, of_list, receive,
                                                             epoch);
  receiver.take_from(from);
}

XD_LL_RECEIVER(void)::take_from(LlRowStep step) {
  static_assert(kSlow);
  LlListCursor cursor;
  LlUnit unit;
  row_ = step.row;
#pragma unroll 1
  for (; list_.find(step.at, cursor, unit); step.at += kLlGroups * list_.takers()) {
    Held held;
    if (step.piece == LlRowStep::kFromStart) {
      step.row = ++row_;
      step.piece = 0;
      load_first(unit, held);
      find_places(unit);
      meet();
      if (g_.masks) zero_lost(row_ - 1);
    } else if (kMoves) {
      load_words(staged(unit), step.piece, held);
    }
    take(unit, step, held);
    step.piece = LlRowStep::kFromStart;
  }
  if (!g_.masks) return;
  meet();
  zero_lost(row_);
}

XD_LL_RECEIVER(bool)::take(const LlUnit& unit, LlRowStep& step, Held& held) {
  if constexpr (!kMoves) return take_tail(unit, step.at);
  if constexpr (kIsGiven<Quantiser>) {
    if (!reads_here(unit)) {
      const bool taken = take_remote(unit, step, held);
      meet();  // the tail warp frees the escapes
      return taken;
    }
  }
  if (!reads_here(unit)) return take_remote(unit, step, held);
  take_own(unit, held);
  return true;
}

// Warps of the group, each for some choices.
XD_LL_RECEIVER(void)::find_places(const LlUnit& unit) {
  if constexpr (kRows) {
    if (list_.by_rank()) return find_row(unit);
  }
#pragma unroll 1
  for (int k = static_cast<int>(thread_ / 32); k < r_.taken.topk; k += kLlGroupMembers / 32) {
    LlPlace place;
    if constexpr (kSlow) {
      place = list_.place_in(epoch_, unit, k);
    } else {
      place = list_.place_in_shared(unit, k);
    }
    if constexpr (kRows) place = list_.row_of(place);
    if (lane_id() != 0) continue;
    r_.place[group_][parity()][k] = place;
    r_.offset[group_][parity()][k] =
        place.expert * p_.recv_tokens.expert_stride + place.slot * p_.recv_tokens.slot_stride;
  }
}

// The row that stands for all choices has the first one's place. The group's first warp finds it.
XD_LL_RECEIVER(void)::find_row(const LlUnit& unit) {
  if (thread_ >= 32) return;
  const int row = kSlow ? list_.row_in(epoch_, unit) : list_.row_in_shared(unit);
  if (lane_id() >= r_.taken.topk) return;
  const bool here = lane_id() == 0 && list_.has_row(row);
  r_.place[group_][parity()][lane_id()] = {here ? 0 : -1, row};
  r_.offset[group_][parity()][lane_id()] = row * p_.recv_tokens.slot_stride;
}

// ---- Words -------------------------------------------------------------------------------------

// Loads this mover's words of a piece.
XD_LL_RECEIVER(void)::load_words(const std::byte* row, std::uint32_t piece, Held& held) const {
  const std::uint32_t vectors = r_.taken.form.vectors;
#pragma unroll
  for (int i = 0; i < kTaken; ++i) {
    held.v[i] = make_ulonglong2(0, 0);
    if (at(piece, i) < vectors) held.v[i] = ptx::ld_relaxed_sys_pair(row + at(piece, i) * 16);
  }
}

// Polls the words until they have come, beginning with those that have been loaded. False: they
// have not for a while, or have been given up. A warp stays together.
XD_LL_RECEIVER(bool)::take_words(const LlUnit& unit, const std::byte* row, std::uint32_t piece,
                                 Held& held) {
  bool loaded = true;
  const auto come = [&] {
    if (!loaded) load_words(row, piece, held);
    bool here = true;
#pragma unroll
    for (int i = 0; i < kTaken; ++i) here &= has_come(held.v[i]);
    if constexpr (kIsGiven<Quantiser>) here = here && has_escapes(row, piece, held);
    loaded = here;
    return __all_sync(kAllLanes, here) != 0;
  };
  if constexpr (kSlow) {
    if (ll_has_failed(g_, turn_.shared())) return false;
    turn::LongWait wait;
    return turn::poll_until(come, [&] {
      const bool on = loaded || turn_.goes_on(XD_PHASE_ROWS, epoch_, unit.source(), wait);
      loaded = false;  // words are read again: over a call they would have to lie in memory
      return __all_sync(kAllLanes, on) != 0;
    });
  }
  return turn::poll_until(come, [] { return false; });
}

// False: it waits for long.
XD_LL_RECEIVER(bool)::take_remote(const LlUnit& unit, LlRowStep& step, Held& held) {
  std::byte* row = staged(unit);
  const unsigned here = __ballot_sync(kAllLanes, place_of_lane(row_).expert >= 0);
  const std::uint32_t vectors = r_.taken.form.vectors;
#pragma unroll 1
  for (std::uint32_t piece = step.piece; piece * kPiece < vectors; ++piece) {
    if (piece > static_cast<std::uint32_t>(step.piece)) load_words(row, piece, held);
    if (!take_words(unit, row, piece, held)) {
      if (kSlow) note_lost();
      step.piece = static_cast<int>(piece);
      return false;
    }
    if constexpr (kIsGiven<Quantiser>) put_ones(row, piece, held);
    store(here, piece, held);
#pragma unroll
    for (int i = 0; i < kTaken; ++i) {
      if (at(piece, i) < vectors) put_back_pair(row + at(piece, i) * 16);
    }
  }
  return true;
}

// ---- Own rows ----------------------------------------------------------------------------------

XD_LL_RECEIVER(void)::load_own(const LlUnit& unit, std::uint32_t piece, Held& held) const {
  const auto token = static_cast<std::uint64_t>(unit.token());
  LlVectors<kQuantises> row;
  row.load(p_.tokens + token * p_.record.row_bytes, p_.record.row_bytes / 16, piece, thread_);
#pragma unroll
  for (int i = 0; i < kLlVectors; ++i) held.v[i] = words_of(row.v[i]);
}

XD_LL_RECEIVER(void)::take_own(const LlUnit& unit, Held& held) {
  const unsigned here = __ballot_sync(kAllLanes, place_of_lane(row_).expert >= 0);
  const std::uint32_t vectors = r_.taken.form.vectors;
#pragma unroll 1
  for (std::uint32_t piece = 0; piece * kPiece < vectors; ++piece) {
    if (piece > 0) load_own(unit, piece, held);
    if constexpr (kQuantises) {
      std::byte* tail = parts_.tails() + (group_ * 2 + parity()) * p_.smem.tail_stride;
#pragma unroll
      for (int i = 0; i < kTaken; ++i) {
        const LlQuantised q = quantise_columns<Quantiser>(vector_of(held.v[2 * i]),
                                                          vector_of(held.v[2 * i + 1]), p_.format);
        if (thread_ % kLanesPerScale == 0 && at(piece, i) < vectors) {
          put_scale(tail, at(piece, i) / kLanesPerScale, q.scale, p_.format);
        }
        const ulonglong2 words = words_of(q.elements);
        held.v[i] = make_ulonglong2(canon(words.x), canon(words.y));
      }
    }
    store(here, piece, held);
  }
  if constexpr (kQuantises) meet();
}

// ---- Outputs -----------------------------------------------------------------------------------

// Stores this mover's vectors of a piece to all slots of the row: `here` has the choices that have
// some.
XD_LL_RECEIVER(void)::store(unsigned here, std::uint32_t piece, const Held& held) const {
  const std::uint32_t vectors = r_.taken.form.vectors;
  std::byte* const to = p_.recv_tokens.data + at(piece, 0) * 16;
#pragma unroll 1
  for (unsigned left = here; left != 0; left &= left - 1) {
    const int k = __ffs(static_cast<int>(left)) - 1;
    std::byte* const slot = to + r_.offset[group_][parity()][k];
#pragma unroll
    for (int i = 0; i < kTaken; ++i) {
      if (at(piece, i) < vectors) {
        ptx::st_streaming_pair(slot + i * kLlGroupThreads * 16, held.v[i]);
      }
    }
  }
}

// The tail warp: scales, weights, and the row's item in the plan. False: it waits for long.
XD_LL_RECEIVER(bool)::take_tail(const LlUnit& unit, int list_at) {
  const bool own = reads_here(unit);
  std::byte* const item = item_of(unit, list_at);
  write_item(unit, item);
  // The movers of an own row find its scales.
  if (kQuantises && own) meet();
  if constexpr (kRows) write_choices(unit);
  // Weights that dispatch is given go into the plan only where rows have slots.
  if ((kRows || r_.taken.form.weight_words == 0) && lane_id() < g_.max_topk) {
    ll_weights_of(item, g_.max_topk)[lane_id()] = 1.0f;
  }
  if constexpr (kIsGiven<Quantiser>) {
    take_given_tail(unit, item, own);
    return true;
  }
  if constexpr (kSlow) {
    take_long_tail(unit, 0, item, own);
    return true;
  }
  const auto w = static_cast<std::uint32_t>(lane_id());
  const bool has_word = w < r_.taken.form.tail_words();
  auto* const at = staged(unit) + r_.taken.form.payload() + w * 8;
  std::uint64_t word = 0;
  if (!own) {
    const bool come = turn::poll_until(
        [&] {
          if (has_word) word = ptx::ld_relaxed_sys(reinterpret_cast<const std::uint64_t*>(at));
          return __all_sync(kAllLanes, word != kFree) != 0;
        },
        [] { return false; });
    if (!come) return false;
    if (has_word) put_back_word(at);
  } else if (has_word) {
    word = own_tail_word(unit, w);
  }
  const unsigned here = __ballot_sync(kAllLanes, place_of_lane(row_).expert >= 0);
  if (has_word) deliver_tail_word(unit, here, w, word, item);
  __syncwarp();
  return true;
}

// The tail's words from one on. Each lane waits for its words.
XD_LL_RECEIVER(void)::take_long_tail(const LlUnit& unit, std::uint32_t first, std::byte* item,
                                     bool own) {
  const unsigned here = __ballot_sync(kAllLanes, place_of_lane(row_).expert >= 0);
#pragma unroll 1
  for (std::uint32_t w = first + lane_id(); w < r_.taken.form.tail_words(); w += 32) {
    std::uint64_t word = 0;
    if (own) {
      word = own_tail_word(unit, w);
    } else if (!wait_tail_word(unit, staged(unit) + r_.taken.form.payload() + w * 8, word)) {
      note_lost();
      word = 0;
    }
    deliver_tail_word(unit, here, w, word, item);
  }
  __syncwarp();
}

XD_LL_RECEIVER(std::uint64_t)::own_tail_word(const LlUnit& unit, std::uint32_t w) const {
  if (kQuantises && w < r_.taken.form.scale_words) {
    const std::byte* tail = parts_.tails() + (group_ * 2 + parity()) * p_.smem.tail_stride;
    return reinterpret_cast<const std::uint64_t*>(tail)[w];
  }
  const int topk = r_.taken.topk;
  return ll_weight_word(p_.topk_weights + unit.token() * topk, topk, w - r_.taken.form.scale_words);
}

// Waits for a word. False: it has been given up.
XD_LL_RECEIVER(bool)::await_tail_word(const LlUnit& unit, const std::byte* at,
                                      std::uint64_t& word) {
  if (ll_has_failed(g_, turn_.shared())) return false;
  turn::LongWait wait;
  return turn::poll_until(
      [&] {
        word = ptx::ld_relaxed_sys(reinterpret_cast<const std::uint64_t*>(at));
        return word != kFree;
      },
      [&] { return turn_.goes_on(XD_PHASE_ROWS, epoch_, unit.source(), wait); });
}

// The same of a word that is taken.
XD_LL_RECEIVER(bool)::wait_tail_word(const LlUnit& unit, std::byte* at, std::uint64_t& word) {
  const bool come = await_tail_word(unit, at, word);
  if (come) put_back_word(at);
  return come;
}

XD_LL_RECEIVER(void)::deliver_tail_word(const LlUnit& unit, unsigned here, std::uint32_t w,
                                        std::uint64_t word, std::byte* item) const {
  if (w < r_.taken.form.scale_words) return store_scales(here, w, word);
  const int k = static_cast<int>(2 * (w - r_.taken.form.scale_words));
  if constexpr (kRows) {
    deliver_weight(unit, k, static_cast<std::uint32_t>(word));
    if (k + 1 < r_.taken.topk) deliver_weight(unit, k + 1, static_cast<std::uint32_t>(word >> 32));
    return;
  }
  float* const weights = ll_weights_of(item, g_.max_topk) + k;
  weights[0] = __uint_as_float(static_cast<std::uint32_t>(word));
  if (k + 1 < r_.taken.topk) {
    weights[1] = __uint_as_float(static_cast<std::uint32_t>(word >> 32));
  }
}

// Stores the weight of a unit's choice: beside the choice's row, or in the row's column of the
// choice, where other ranks' choices have 0.
XD_LL_RECEIVER(void)::deliver_weight(const LlUnit& unit, int k, std::uint32_t weight) const {
  auto* const weights = reinterpret_cast<std::uint32_t*>(p_.rows.recv_weights);
  const bool by_rank = list_.by_rank();
  const LlPlace place = r_.place[group_][parity()][by_rank ? 0 : k];
  if (weights == nullptr || place.expert < 0) return;
  if (!by_rank) {
    weights[place.slot] = weight;
  } else if (k < r_.taken.topk) {
    weights[std::int64_t{place.slot} * r_.taken.topk + k] =
        list_.expert_in(epoch_, unit, k) >= 0 ? weight : 0u;
  }
}

// Stores the local experts of the row that stands for all of them. The tail warp.
XD_LL_RECEIVER(void)::write_choices(const LlUnit& unit) const {
  if (!list_.by_rank() || p_.rows.recv_topk_idx == nullptr || lane_id() >= r_.taken.topk) return;
  const LlPlace place = r_.place[group_][parity()][0];
  if (place.expert < 0) return;
  const std::int64_t at = std::int64_t{place.slot} * r_.taken.topk + lane_id();
  const int expert = list_.expert_in(epoch_, unit, lane_id());
  if (p_.rows.wide_topk) {
    static_cast<std::int64_t*>(p_.rows.recv_topk_idx)[at] = expert;
  } else {
    static_cast<std::int32_t*>(p_.rows.recv_topk_idx)[at] = expert;
  }
}

// Stores a word of scales to all slots. Any lanes of the tail warp.
XD_LL_RECEIVER(void)::store_scales(unsigned here, std::uint32_t w, std::uint64_t word) const {
  const bool floats = p_.scale_element == 4;
  const std::uint32_t each = floats ? 2 : 8, first = w * each;
#pragma unroll 1
  for (unsigned left = here; left != 0; left &= left - 1) {
    const LlPlace place = r_.place[group_][parity()][__ffs(static_cast<int>(left)) - 1];
    std::byte* at =
        p_.recv_scales.row(place.expert, place.slot) + first * p_.recv_scales.col_stride;
    if (floats) {
      *reinterpret_cast<std::uint32_t*>(at) = static_cast<std::uint32_t>(word);
      if (first + 1 < p_.scale_columns) {
        *reinterpret_cast<std::uint32_t*>(at + p_.recv_scales.col_stride) =
            static_cast<std::uint32_t>(word >> 32);
      }
      continue;
    }
#pragma unroll 1
    for (std::uint32_t i = 0; i < each && first + i < p_.scale_columns; ++i) {
      *at = static_cast<std::byte>(word >> (8 * i));
      at += p_.recv_scales.col_stride;
    }
  }
}

// Items of own tokens lie behind those of all others, each at its token: combine finds them there.
XD_LL_RECEIVER(std::byte*)::item_of(const LlUnit& unit, int list_at) const {
  const int at = unit.source() == g_.rank() ? (g_.ranks() - 1) * g_.max_tokens + unit.token()
                                            : list_at - l_.own_units;
  return p_.plan + g_.plan.items + static_cast<std::uint64_t>(at) * ll_item_bytes(g_.max_topk);
}

// The tail warp.
XD_LL_RECEIVER(void)::write_item(const LlUnit& unit, std::byte* item) const {
  const LlPlace place = place_of_lane(row_);
  const bool here = place.expert >= 0;
  if (lane_id() == 0) {
    const int order = g_.masks ? g_.rank() : unit.order();
    const int home = unit.token() * g_.partials_per_token() + order;
    *reinterpret_cast<LlItem*>(item) = {LlItem::name(unit.source(), unit.token()),
                                        static_cast<std::uint32_t>(home)};
  }
  if (lane_id() < g_.max_topk) {
    ll_rows_of(item)[lane_id()] =
        here ? row_of_slot(place.expert, place.slot, g_.slots_per_expert()) : -1;
  }
  if (here && p_.source_tokens != nullptr) {
    p_.source_tokens[place.expert * g_.slots_per_expert() + place.slot] = unit.token();
  }
}

// Zeroes the slots of this group's row of that number, its scales, and the weights beside it, if a
// thread has given up words of it. All threads of the group, behind the barrier that follows the
// row.
XD_LL_RECEIVER(void)::zero_lost(int row) {
  if (row == 0 || *static_cast<volatile int*>(&r_.lost[group_][row & 1]) != row) return;
  const unsigned here = __ballot_sync(kAllLanes, place_of_lane(row).expert >= 0);
#pragma unroll 1
  for (std::uint32_t v = thread_; v < r_.taken.form.vectors && kMoves; v += kLlGroupThreads) {
    for (unsigned left = here; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      ptx::st_streaming_pair(p_.recv_tokens.data + r_.offset[group_][row & 1][k] + v * 16,
                             make_ulonglong2(0, 0));
    }
  }
  if constexpr (!kMoves) zero_tail(row, here);
  // The places are written again for the row after the next.
  meet();
}

// `here`: the choices of the row that have a place.
XD_LL_RECEIVER(void)::zero_tail(int row, unsigned here) const {
  const int each = list_.by_rank() ? r_.taken.topk : 1;  // weights
#pragma unroll 1
  for (unsigned left = here; left != 0; left &= left - 1) {
    const LlPlace place = r_.place[group_][row & 1][__ffs(static_cast<int>(left)) - 1];
    if constexpr (kQuantises || kIsGiven<Quantiser>) {
      std::byte* const scales = p_.recv_scales.row(place.expert, place.slot);
#pragma unroll 1
      for (std::uint32_t i = lane_id(); i < p_.scale_columns; i += 32) {
        std::byte* const at = scales + i * p_.recv_scales.col_stride;
        if (p_.scale_element == 4) {
          *reinterpret_cast<std::uint32_t*>(at) = 0;
        } else {
          *at = std::byte{0};
        }
      }
    }
    if (kRows && p_.rows.recv_weights != nullptr && lane_id() < each) {
      p_.rows.recv_weights[std::int64_t{place.slot} * each + lane_id()] = 0.0f;
    }
  }
}

// ---- Rows that are given -----------------------------------------------------------------------

// All of them are taken by the steps of rare launches.
template <class Quantiser, bool kMany, bool kRows, bool kMoves, bool kSlow>
template <class Await>
__device__ inline LlVerdict LlReceiver<Quantiser, kMany, kRows, kMoves, kSlow>::take_given(
    bool known, LlVerdict verdict, Await await) {
  if constexpr (kRows) ptx::barrier_sync(kLlListBarrier, kLlHelper * 32);  // the zones
  if (!known) verdict = await();
  if (verdict == LlVerdict::go) hand_over(start());
  return verdict;
}

// True if the escapes of all words that may stand for ones are here. A mover.
XD_LL_RECEIVER(bool)::has_escapes(const std::byte* row, std::uint32_t piece,
                                  const Held& held) const {
  const LlGivenForm& form = ll_given(p_).given_form;
  bool here = true;
#pragma unroll
  for (int i = 0; i < kTaken; ++i) {
    const std::uint32_t v = at(piece, i);
    if (held.v[i].x == kInPlaceOfOnes)
      here &= escapes_at(row, form.escapes_of_vector(v, 0)) != kFree;
    if (held.v[i].y == kInPlaceOfOnes)
      here &= escapes_at(row, form.escapes_of_vector(v, 1)) != kFree;
  }
  return here;
}

// Puts ones in the place of the words that stand for them. The escapes are here: nobody frees one
// before the group's barrier behind the row.
XD_LL_RECEIVER(void)::put_ones(const std::byte* row, std::uint32_t piece, Held& held) const {
  const LlGivenForm& form = ll_given(p_).given_form;
#pragma unroll
  for (int i = 0; i < kTaken; ++i) {
    const std::uint32_t v = at(piece, i), bit = v % LlGivenForm::kEach;
    const auto stands_for_ones = [&](std::uint64_t word, std::uint32_t half) {
      return word == kInPlaceOfOnes &&
             (escapes_at(row, form.escapes_of_vector(v, half)) >> bit & 1) != 0;
    };
    if (stands_for_ones(held.v[i].x, 0)) held.v[i].x = kFree;
    if (stands_for_ones(held.v[i].y, 1)) held.v[i].y = kFree;
  }
}

// The tail warp.
XD_LL_RECEIVER(void)::take_given_tail(const LlUnit& unit, std::byte* item, bool own) {
  const LlGivenForm& form = ll_given(p_).given_form;
  std::byte* const escapes = staged(unit) + r_.taken.form.payload() + form.scale_words * 8;
#pragma unroll 1
  for (std::uint32_t m = lane_id(); m < form.escapes() && !own; m += 32) {
    std::uint64_t word = 0;
    if (!await_tail_word(unit, escapes + m * 8, word)) note_lost();
  }
  __syncwarp();
  take_given_scales(unit, own);
  take_long_tail(unit, r_.taken.form.scale_words, item, own);
  if (own) return;
  meet();  // movers have looked at the escapes
#pragma unroll 1
  for (std::uint32_t m = lane_id(); m < form.escapes(); m += 32) {
    if (escapes_at(staged(unit), form.scale_words + m) != kFree) put_back_word(escapes + m * 8);
  }
  __syncwarp();
}

// Behind the escapes.
XD_LL_RECEIVER(void)::take_given_scales(const LlUnit& unit, bool own) {
  const LlGivenForm& form = ll_given(p_).given_form;
  const unsigned here = __ballot_sync(kAllLanes, place_of_lane(row_).expert >= 0);
  std::byte* const row = staged(unit);
#pragma unroll 1
  for (std::uint32_t w = lane_id(); w < form.scale_words; w += 32) {
    std::uint64_t word = 0;
    if (own) {
      word = ll_given_scale_word(ll_given(p_), unit.token(), w);
    } else if (!wait_tail_word(unit, row + r_.taken.form.payload() + w * 8, word)) {
      note_lost();
      word = 0;
    } else if (word == kInPlaceOfOnes) {
      const std::uint64_t escapes = escapes_at(row, form.escapes_of_scales(w));
      if ((escapes >> (w % LlGivenForm::kEach) & 1) != 0) word = kFree;
    }
    store_scales(here, w, word);
  }
  __syncwarp();
}

#undef XD_LL_RECEIVER

}  // namespace xd::ep::cuda
