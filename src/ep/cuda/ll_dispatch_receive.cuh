// The receive half of a dispatch: rows from staging memory, and this rank's own, to the slots of
// all their experts.
//
//   memory                      written by              read by
//   rows[slot][source][t]       the source's senders    one group of a receiver block, which leaves
//                                                       ones behind
//   tokens                      the caller              the same group: own rows, in a launch that
//                                                       does both halves
//   recv_tokens, recv_scales    that group              the caller
//   item[] of the plan          that group              combine
//
// A row belongs to one group of one block; in it a thread polls 32 bytes and a word of the tail,
// stores them to all slots of the row, and puts the ones back. Nothing else passes between groups.
#pragma once

#include "ep/cuda/ll_dispatch_list.cuh"

namespace xd::ep::cuda {

struct LlReceiveShared {
  struct Place {
    int expert, slot;  // expert -1 = none
  };
  Place place[kLlGroups][2][kMaxTopk];
  // The number of a row whose words have been given up: its slots become zeros.
  int lost[kLlGroups][2];
};

template <class Quantiser, bool kMany>
class LlReceiver {
 public:
  static constexpr bool kQuantises = Quantiser::kQuantises;

  __device__ LlReceiver(const LlDispatchParams& params, LlDispatchTurn& turn,
                        const LlList<kMany>& list, const LlRoomParts& parts,
                        LlReceiveShared& shared)
      : p_(params),
        g_(params.group),
        turn_(turn),
        list_(list),
        parts_(parts),
        r_(shared),
        group_(warp_in_block() / kLlGroupWarps),
        thread_(threadIdx.x % kLlGroupThreads) {}

  // Movers, behind the list's barriers. `own`: own rows are read from `tokens`.
  __device__ void take_all(std::uint64_t epoch, bool drains, bool own, int own_units);

 private:
  // What a thread holds of a row.
  struct Held {
    ulonglong2 a, b;
    std::uint64_t tail;
  };
  // A row's places in the caller's tensors, by choice: of lane k.
  struct Target {
    unsigned here;  // lanes with a row
    LlReceiveShared::Place place;
  };

  __device__ static LlRowForm form_of(const LlRecord& record) {
    const QuantiseFormat format = quantise_format(static_cast<xd_ep_quantise>(record.quantise));
    const std::uint32_t scales =
        format ? record.row_bytes / 2 / format.block * format.scale_bytes : 0;
    return ll_row_form(record.row_bytes, scales, static_cast<bool>(format),
                       (record.flags & kHasWeights) != 0 ? static_cast<int>(record.topk) : 0);
  }
  __device__ int parity() const { return row_ & 1; }
  __device__ std::byte* staged(const LlUnit& unit) const {
    return g_.own_area + ll_row_offset(g_, turn_.slot(epoch_), unit.source(), unit.token());
  }
  __device__ void take(const LlUnit& unit, int list_at, bool own);
  __device__ void drain(const LlUnit& unit);
  __device__ void find_places(const LlUnit& unit);
  __device__ Target target() const;
  __device__ void load_words(const LlUnit& unit, const LlRowForm& form, std::uint32_t piece,
                             Held& held) const;
  __device__ bool take_words(const LlUnit& unit, const LlRowForm& form, std::uint32_t piece,
                             Held& held);
  __device__ void put_back(std::byte* row, const LlRowForm& form, std::uint32_t piece) const;
  __device__ void load_own(const LlUnit& unit, std::uint32_t piece, Held& held) const;
  __device__ void take_remote(const LlUnit& unit, const Target& to, Held& held);
  __device__ void take_own(const LlUnit& unit, const Target& to, Held& held);
  __device__ void store(const Target& to, std::uint32_t vector, const ulonglong2& words) const;
  __device__ void store_scales(const Target& to, std::uint64_t word) const;
  __device__ void write_item(const LlUnit& unit, const Target& to, int list_at) const;
  __device__ void write_weights(std::byte* item, std::uint64_t tail) const;
  __device__ std::byte* item_of(const LlUnit& unit, int list_at) const;
  __device__ void zero_lost(int row);

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlDispatchTurn& turn_;
  const LlList<kMany>& list_;
  const LlRoomParts parts_;
  LlReceiveShared& r_;
  const int group_;
  const std::uint32_t thread_;
  std::uint64_t epoch_ = 0;
  int row_ = 0;  // number of this group's row
  int own_units_ = 0;
  LlRowForm form_{};
  int topk_ = 0;
};

#define XD_LL_RECEIVER(type)             \
  template <class Quantiser, bool kMany> \
  __device__ inline type LlReceiver<Quantiser, kMany>

XD_LL_RECEIVER(void)::take_all(std::uint64_t epoch, bool drains, bool own, int own_units) {
  epoch_ = epoch;
  own_units_ = own_units;
  const LlRecord& record = turn_.shared().record[g_.rank()];
  // Rows of a launch that does both halves have the form that it sends.
  form_ = own ? p_.form : form_of(record);
  topk_ = static_cast<int>(record.topk);
  const int units = list_.units();
#pragma unroll 1
  for (int i = group_; i < units; i += kLlGroups) {
    const LlUnit unit = parts_.units()[i];
    const bool read_here = own && unit.source() == g_.rank();
    if (drains) {
      if (!read_here) drain(unit);
    } else {
      ++row_;
      take(unit, list_.receiver() + i * list_.receivers(), read_here);
    }
  }
  if (!g_.masks || drains) return;
  ptx::barrier_sync(kLlGroupBarrier + group_, kLlGroupThreads);
  zero_lost(row_);
}

XD_LL_RECEIVER(void)::take(const LlUnit& unit, int list_at, bool own) {
  // Words are on their way while their places are found; mostly they have come.
  Held held{};
  if (own) {
    load_own(unit, 0, held);
  } else {
    load_words(unit, form_, 0, held);
  }
  find_places(unit);
  ptx::barrier_sync(kLlGroupBarrier + group_, kLlGroupThreads);
  if (g_.masks) zero_lost(row_ - 1);
  const Target to = target();
  if (own) {
    take_own(unit, to, held);
  } else {
    take_remote(unit, to, held);
  }
  if (thread_ < form_.scale_words) store_scales(to, held.tail);
  if (thread_ < 32) write_item(unit, to, list_at);
  write_weights(item_of(unit, list_at), held.tail);
}

// Warps of the group, each for some choices.
XD_LL_RECEIVER(void)::find_places(const LlUnit& unit) {
#pragma unroll 1
  for (int k = static_cast<int>(thread_ / 32); k < topk_; k += kLlGroupWarps) {
    const std::uint32_t expert = list_.expert_of(epoch_, unit, k);
    LlReceiveShared::Place place{-1, 0};
    if (expert != kNoExpert) {
      place.expert = static_cast<int>(expert);
      place.slot = list_.slot_in(epoch_, unit, k, place.expert);
    }
    if (lane_id() == 0) r_.place[group_][parity()][k] = place;
  }
}

XD_LL_RECEIVER(auto)::target() const -> Target {
  Target to{0, {-1, 0}};
  if (lane_id() < topk_) to.place = r_.place[group_][parity()][lane_id()];
  to.here = __ballot_sync(kAllLanes, to.place.expert >= 0);
  return to;
}

// ---- Words -------------------------------------------------------------------------------------

// Loads this thread's words of a piece; with piece 0 also its word of the tail.
XD_LL_RECEIVER(void)::load_words(const LlUnit& unit, const LlRowForm& form, std::uint32_t piece,
                                 Held& held) const {
  const std::byte* row = staged(unit);
  const std::uint32_t first = LlVectors<false>::first(piece, thread_);
  const std::uint32_t second = LlVectors<false>::second(piece, thread_);
  held.a = held.b = make_ulonglong2(0, 0);
  if (first < form.vectors) held.a = ptx::ld_relaxed_sys_pair(row + first * 16);
  if (second < form.vectors) held.b = ptx::ld_relaxed_sys_pair(row + second * 16);
  if (piece != 0) return;
  held.tail = 0;
  if (thread_ < form.tail_words()) {
    held.tail =
        ptx::ld_relaxed_sys(reinterpret_cast<const std::uint64_t*>(row + form.payload()) + thread_);
  }
}

// Polls the words until they have come, beginning with those that have been loaded. False: they
// have been given up. A warp stays together.
XD_LL_RECEIVER(bool)::take_words(const LlUnit& unit, const LlRowForm& form, std::uint32_t piece,
                                 Held& held) {
  bool loaded = true;
  turn::LongWait wait;
  return turn::poll_until(
      [&] {
        if (!loaded) load_words(unit, form, piece, held);
        const bool here = has_come(held.a) && has_come(held.b) && held.tail != kFree;
        loaded = here;
        return __all_sync(kAllLanes, here) != 0;
      },
      [&] {
        const bool on = loaded || turn_.goes_on(XD_PHASE_ROWS, epoch_, unit.source(), wait);
        loaded = false;  // words are read again: over a call they would have to lie in memory
        return __all_sync(kAllLanes, on) != 0;
      });
}

XD_LL_RECEIVER(void)::put_back(std::byte* row, const LlRowForm& form, std::uint32_t piece) const {
  const std::uint32_t first = LlVectors<false>::first(piece, thread_);
  const std::uint32_t second = LlVectors<false>::second(piece, thread_);
  if (first < form.vectors) put_back_pair(row + first * 16);
  if (second < form.vectors) put_back_pair(row + second * 16);
  if (piece == 0 && thread_ < form.tail_words()) {
    put_back_word(row + form.payload() + thread_ * 8);
  }
}

XD_LL_RECEIVER(void)::take_remote(const LlUnit& unit, const Target& to, Held& held) {
#pragma unroll 1
  for (std::uint32_t piece = 0; piece * kLlPiece < form_.vectors; ++piece) {
    if (piece > 0) load_words(unit, form_, piece, held);
    if (!take_words(unit, form_, piece, held)) {
      *static_cast<volatile int*>(&r_.lost[group_][parity()]) = row_;
      held.tail = 0;
      return;
    }
    const std::uint32_t first = LlVectors<false>::first(piece, thread_);
    const std::uint32_t second = LlVectors<false>::second(piece, thread_);
    store(to, first, held.a);
    store(to, second, held.b);
    put_back(staged(unit), form_, piece);
  }
}

// Takes the words of a row that is not delivered.
XD_LL_RECEIVER(void)::drain(const LlUnit& unit) {
  const LlRowForm form = form_of(turn_.shared().record[unit.source()]);
  Held held{};
#pragma unroll 1
  for (std::uint32_t piece = 0; piece * kLlPiece < form.vectors; ++piece) {
    load_words(unit, form, piece, held);
    if (!take_words(unit, form, piece, held)) return;
    put_back(staged(unit), form, piece);
  }
}

// ---- Own rows ----------------------------------------------------------------------------------

XD_LL_RECEIVER(void)::load_own(const LlUnit& unit, std::uint32_t piece, Held& held) const {
  const auto token = static_cast<std::uint64_t>(unit.token());
  LlVectors<kQuantises> row;
  row.load(p_.tokens + token * p_.record.row_bytes, p_.record.row_bytes / 16, piece, thread_);
  held.a = words_of(row.a);
  held.b = words_of(row.b);
}

XD_LL_RECEIVER(void)::take_own(const LlUnit& unit, const Target& to, Held& held) {
  const std::uint32_t vectors = p_.record.row_bytes / 16;
  std::byte* tail = parts_.tails() + (group_ * 2 + parity()) * p_.room.tail_stride;
#pragma unroll 1
  for (std::uint32_t piece = 0; piece * kLlPiece < vectors; ++piece) {
    if (piece > 0) load_own(unit, piece, held);
    const LlVectors<kQuantises> row{vector_of(held.a), vector_of(held.b)};
    if constexpr (kQuantises) {
      const LlQuantised q = quantise_columns<Quantiser>(row.a, row.b, p_.format);
      const std::uint32_t at = piece * kLlGroupThreads + thread_;
      if (thread_ % kLanesPerScale == 0 && at < form_.vectors) {
        put_scale(tail, at / kLanesPerScale, q.scale, p_.format);
      }
      const ulonglong2 words = words_of(q.elements);
      store(to, at, make_ulonglong2(canon(words.x), canon(words.y)));
    } else {
      store(to, LlVectors<false>::first(piece, thread_), words_of(row.a));
      store(to, LlVectors<false>::second(piece, thread_), words_of(row.b));
    }
  }
  if constexpr (kQuantises) ptx::barrier_sync(kLlGroupBarrier + group_, kLlGroupThreads);
  if (thread_ < form_.scale_words) {
    held.tail = reinterpret_cast<const std::uint64_t*>(tail)[thread_];
  } else if (thread_ < form_.tail_words()) {
    held.tail =
        ll_weight_word(p_.topk_weights + unit.token() * topk_, topk_, thread_ - form_.scale_words);
  }
}

// ---- Outputs -----------------------------------------------------------------------------------

// Stores 16 bytes of the row to all its slots. All lanes of a warp.
XD_LL_RECEIVER(void)::store(const Target& to, std::uint32_t vector, const ulonglong2& words) const {
  const LlSlots& tensor = p_.recv_tokens;
  const long long own = to.place.expert * tensor.expert_stride + to.place.slot * tensor.slot_stride;
#pragma unroll 1
  for (unsigned left = to.here; left != 0; left &= left - 1) {
    const long long offset = __shfl_sync(kAllLanes, own, __ffs(static_cast<int>(left)) - 1);
    if (vector < form_.vectors) {
      ptx::st_streaming_pair(tensor.data + offset + vector * 16, words);
    }
  }
}

// Stores this thread's word of scales to all slots. Threads below `scale_words`.
XD_LL_RECEIVER(void)::store_scales(const Target& to, std::uint64_t word) const {
  const int each = 8 / static_cast<int>(p_.scale_element);
  const auto columns =
      static_cast<int>(p_.format.scale_row_bytes(p_.recv_row_bytes) / p_.scale_element);
#pragma unroll 1
  for (unsigned left = to.here; left != 0; left &= left - 1) {
    const LlReceiveShared::Place place =
        r_.place[group_][parity()][__ffs(static_cast<int>(left)) - 1];
    std::byte* row = p_.recv_scales.row(place.expert, place.slot);
#pragma unroll 1
    for (int i = 0; i < each; ++i) {
      const int column = static_cast<int>(thread_) * each + i;
      if (column >= columns) break;
      std::byte* at = row + column * p_.recv_scales.col_stride;
      if (p_.scale_element == 4) {
        *reinterpret_cast<std::uint32_t*>(at) = static_cast<std::uint32_t>(word >> (32 * i));
      } else {
        *at = static_cast<std::byte>(word >> (8 * i));
      }
    }
  }
}

// Items of own tokens lie behind those of all others, each at its token: combine finds them there.
XD_LL_RECEIVER(std::byte*)::item_of(const LlUnit& unit, int list_at) const {
  const int at = unit.source() == g_.rank() ? (g_.ranks() - 1) * g_.max_tokens + unit.token()
                                            : list_at - own_units_;
  return p_.plan + g_.plan.items + static_cast<std::uint64_t>(at) * ll_item_bytes(g_.max_topk);
}

// The first warp of the group.
XD_LL_RECEIVER(void)::write_item(const LlUnit& unit, const Target& to, int list_at) const {
  std::byte* item = item_of(unit, list_at);
  const bool here = lane_id() < topk_ && to.place.expert >= 0;
  if (lane_id() == 0) {
    const int order = g_.masks ? g_.rank() : unit.order();
    const int place = unit.token() * g_.partials_per_token() + order;
    *reinterpret_cast<LlItem*>(item) = {LlItem::name(unit.source(), unit.token()),
                                        static_cast<std::uint32_t>(place)};
  }
  if (lane_id() < g_.max_topk) {
    ll_rows_of(item)[lane_id()] =
        here ? row_of_slot(to.place.expert, to.place.slot, g_.slots_per_expert()) : -1;
  }
  if (here && p_.source_tokens != nullptr) {
    p_.source_tokens[to.place.expert * g_.slots_per_expert() + to.place.slot] = unit.token();
  }
}

XD_LL_RECEIVER(void)::write_weights(std::byte* item, std::uint64_t tail) const {
  float* to = ll_weights_of(item, g_.max_topk);
  if (form_.weight_words == 0) {
    if (static_cast<int>(thread_) < g_.max_topk) to[thread_] = 1.0f;
    return;
  }
  if (thread_ < form_.scale_words || thread_ >= form_.tail_words()) return;
  const int k = static_cast<int>(2 * (thread_ - form_.scale_words));
  to[k] = __uint_as_float(static_cast<std::uint32_t>(tail));
  if (k + 1 < topk_) to[k + 1] = __uint_as_float(static_cast<std::uint32_t>(tail >> 32));
}

// Zeroes the slots of this group's row of that number, if a thread has given up words of it. All
// threads of the group, behind the barrier that follows the row.
XD_LL_RECEIVER(void)::zero_lost(int row) {
  if (row == 0 || *static_cast<volatile int*>(&r_.lost[group_][row & 1]) != row) return;
  Target to{0, {-1, 0}};
  if (lane_id() < topk_) to.place = r_.place[group_][row & 1][lane_id()];
  to.here = __ballot_sync(kAllLanes, to.place.expert >= 0);
#pragma unroll 1
  for (std::uint32_t v = thread_; v < (form_.vectors + 31) / 32 * 32; v += kLlGroupThreads) {
    store(to, v, make_ulonglong2(0, 0));
  }
  // The places are written again for the row after the next.
  ptx::barrier_sync(kLlGroupBarrier + group_, kLlGroupThreads);
}

#undef XD_LL_RECEIVER

}  // namespace xd::ep::cuda
