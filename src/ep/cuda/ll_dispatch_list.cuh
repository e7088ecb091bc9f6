// The list of a receiver block's rows: every block reads the expert ids of all sources, counts the
// rows of its experts, and finds which rows come, in the order in which they are likely to.
//
//   shared memory        written by                     read by, behind the list's barrier
//   counts[s][e]         movers, by atomics             all: first slots of a source in an expert
//   ids[s][t][k]         the mover that has token t     movers: where a token's row lies
//   hits[round][warp]    a lane of each warp            movers: positions in the list
//   orders[candidate]    the mover that has it          the same mover
//   units[]              movers                         movers, behind the second barrier
//   LlShared::record     one warp                       all
//
// A row's slot in expert e is the number of rows of e from lower sources, and from lower tokens of
// its own source. So no place crosses: all ranks count the same ids.
#pragma once

#include "ep/cuda/ll_dispatch_tell.cuh"
#include "ep/cuda/ll_kernels.h"

namespace xd::ep::cuda {

inline constexpr std::uint32_t kNoExpert = 0xFFFF;

// What lies behind an LlItem, in a plan with room for `room_topk` choices.
__device__ inline std::int32_t* ll_rows_of(std::byte* item) {
  return reinterpret_cast<std::int32_t*>(item + sizeof(LlItem));
}
__device__ inline float* ll_weights_of(std::byte* item, int room_topk) {
  return reinterpret_cast<float*>(ll_rows_of(item) + room_topk);
}

// A row that comes: source rank, token, and how many lower ranks have rows of the token.
struct LlUnit {
  std::uint32_t word;
  __device__ int source() const { return static_cast<int>(word >> 16 & 0xFF); }
  __device__ int token() const { return static_cast<int>(word & 0xFFFF); }
  __device__ int order() const { return static_cast<int>(word >> 24); }
};

struct LlListShared {
  int own_units, total_units;
  int items_of[kMaxDeviceRanks];
  int pending;  // warps of movers that still wait for ids (groups that mask)
};

// The parts of dynamic shared memory.
struct LlRoomParts {
  const LlDispatchRoom& room;
  std::byte* base;

  __device__ std::uint32_t* counts() const { return at<std::uint32_t>(room.counts); }
  __device__ std::uint16_t* ids() const { return at<std::uint16_t>(room.ids); }
  __device__ std::uint32_t* hits() const { return at<std::uint32_t>(room.hits); }
  __device__ std::uint8_t* orders() const { return at<std::uint8_t>(room.orders); }
  __device__ LlUnit* units() const { return at<LlUnit>(room.units); }
  __device__ std::byte* tails() const { return base + room.tails; }
  template <class T>
  __device__ T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
};

template <bool kMany>
class LlList {
 public:
  __device__ LlList(const LlDispatchParams& params, LlDispatchTurn& turn, LlListShared& list,
                    const LlRoomParts& parts, const std::uint32_t* places)
      : p_(params), g_(params.group), turn_(turn), s_(list), parts_(parts), places_(places) {}

  // Receiver blocks, in front of a barrier of the block. All threads.
  __device__ void clear() {
    const int words = (g_.ranks() * g_.local_experts + 1) / 2;
#pragma unroll 1
    for (int i = thread_in_block(); i < words; i += kLlThreads) parts_.counts()[i] = 0;
#pragma unroll 1
    for (int r = thread_in_block(); r < g_.ranks(); r += kLlThreads) s_.items_of[r] = 0;
    if (thread_in_block() == 0) {
      s_.own_units = 0;
      s_.pending = kLlMovers / 32;
    }
  }
  __device__ void load_first() {
    if (thread_in_block() < candidates()) first_.word = g_.order[thread_in_block()];
  }
  // Movers. Behind the list's barrier the ids and hits of all tokens are there.
  __device__ void collect(std::uint64_t epoch);
  // Movers, between the list's two barriers.
  __device__ void list();
  // Movers, in front of list(), where the operation goes without some source: forgets its rows.
  __device__ void drop_gone();

  __device__ int receivers() const { return static_cast<int>(gridDim.x) - p_.senders; }
  __device__ int receiver() const { return static_cast<int>(blockIdx.x) - p_.senders; }
  // The rows of this block.
  __device__ int units() const {
    return (s_.total_units - receiver() + receivers() - 1) / receivers();
  }

  __device__ int count(int source, int expert) const {
    const int at = source * g_.local_experts + expert;
    return static_cast<int>(parts_.counts()[at / 2] >> (at % 2 * 16) & 0xFFFFu);
  }
  // The items of a source: its tokens with rows here. One thread.
  __device__ int items_of(int source) const { return s_.items_of[source]; }
  // The slot of a unit's row in an expert. All lanes of a warp.
  __device__ int slot_in(std::uint64_t epoch, const LlUnit& unit, int k, int expert) const;
  // The local expert of a unit's choice, or kNoExpert.
  __device__ std::uint32_t expert_of(std::uint64_t epoch, const LlUnit& unit, int k) const;

 private:
  __device__ int candidates() const { return g_.ranks() * g_.max_tokens; }
  __device__ int rounds() const { return (candidates() + kLlMovers - 1) / kLlMovers; }
  __device__ const std::byte* words_of_token(std::uint64_t epoch, const LlUnit& unit) const {
    const std::uint64_t row = (turn_.slot(epoch) * g_.ranks() + unit.source()) *
                                  static_cast<std::uint64_t>(g_.max_tokens) +
                              unit.token();
    return g_.own_area + g_.map.ids + row * g_.ids.words * 8;
  }
  __device__ bool take_ids(std::uint64_t epoch, const LlUnit& unit, std::uint8_t& order);
  __device__ bool take_few(const LlUnit& unit, const ulonglong2& words, LlRanks<kMany>& home);
  __device__ bool take_choice(const LlUnit& unit, int k, std::uint32_t id, LlRanks<kMany>& home);
  __device__ bool wait_pair(std::uint64_t epoch, int source, const std::byte* at,
                            ulonglong2& pair) const;
  __device__ std::uint32_t id_of(std::uint64_t epoch, const LlUnit& unit, int k) const;
  __device__ int earlier_in_shared(const LlUnit& unit, int expert) const;
  __device__ int earlier_in_words(std::uint64_t epoch, const LlUnit& unit, std::uint32_t id) const;

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlDispatchTurn& turn_;
  LlListShared& s_;
  const LlRoomParts parts_;
  const std::uint32_t* places_;
  LlUnit first_{};
};

#define XD_LL_LIST(type) \
  template <bool kMany>  \
  __device__ inline type LlList<kMany>

// ---- Ids ---------------------------------------------------------------------------------------

XD_LL_LIST(void)::collect(std::uint64_t epoch) {
  int own = 0;
#pragma unroll 1
  for (int k = 0; k < rounds(); ++k) {
    const int q = k * kLlMovers + thread_in_block();
    bool here = false;
    LlUnit unit = first_;
    if (q < candidates()) {
      if (k > 0) unit.word = g_.order[q];
      if (!turn_.leaves_out(unit.source())) here = take_ids(epoch, unit, parts_.orders()[q]);
    }
    if (here && receiver() == 0) atomicAdd(&s_.items_of[unit.source()], 1);
    const unsigned found = __ballot_sync(kAllLanes, here);
    own += __popc(__ballot_sync(kAllLanes, here && unit.source() == g_.rank()));
    if (lane_id() == 0) parts_.hits()[k * (kLlMovers / 32) + warp_in_block()] = found;
  }
  if (lane_id() != 0) return;
  if (own != 0) atomicAdd(&s_.own_units, own);
  if (g_.masks) atomicSub(&s_.pending, 1);
}

// Takes one token's ids; true if some of its experts are this rank's. `order`: how many lower ranks
// have some.
XD_LL_LIST(bool)::take_ids(std::uint64_t epoch, const LlUnit& unit, std::uint8_t& order) {
  const std::byte* at = words_of_token(epoch, unit);
  bool here = false;
  LlRanks<kMany> home{};
  int k = 0;
#pragma unroll 1
  for (int pair = 0; pair < g_.ids.words; pair += 2) {
    ulonglong2 words;
    if (!wait_pair(epoch, unit.source(), at + pair * 8, words)) return false;
    if (!kMany && g_.ids.words == 2) {
      here = take_few(unit, words, home);
      break;
    }
#pragma unroll 1
    for (int j = 0; j < g_.ids.per_word && k < g_.max_topk; ++j, ++k) {
      here |= take_choice(unit, k, g_.ids.id(words.x, j), home);
    }
#pragma unroll 1
    for (int j = 0; j < g_.ids.per_word && k < g_.max_topk; ++j, ++k) {
      here |= take_choice(unit, k, g_.ids.id(words.y, j), home);
    }
  }
  order = static_cast<std::uint8_t>(home.count_below(g_.rank()));
  if (unit.source() == g_.rank() && receiver() == 0 && p_.plan != nullptr && !p_.step.silent) {
    auto* to = reinterpret_cast<RankBits*>(p_.plan + g_.plan.home) + unit.token();
    RankBits bits{};
    bits.word[0] = home.word[0];
    if constexpr (kMany) {
      bits.word[0] |= static_cast<std::uint64_t>(home.word[1]) << 32;
      bits.word[1] = home.word[2];
    }
    *to = bits;
  }
  return here;
}

// The same for few choices, all in two words: their places are read at once, since every rank waits
// for this step.
XD_LL_LIST(bool)::take_few(const LlUnit& unit, const ulonglong2& words, LlRanks<kMany>& home) {
  std::uint32_t place[kLlFewTopk];
#pragma unroll
  for (int k = 0; k < kLlFewTopk; ++k) {
    place[k] = ~0u;
    if (k >= g_.max_topk) continue;
    const bool second = k >= g_.ids.per_word;
    const int at = second ? k - g_.ids.per_word : k;
    const std::uint32_t id = g_.ids.id(second ? words.y : words.x, at);
    if (id != g_.ids.none()) place[k] = places_[id];
  }
  bool here = false;
  std::uint16_t* ids =
      parts_.ids() + unit.source() * p_.room.ids_stride + unit.token() * g_.max_topk;
#pragma unroll
  for (int k = 0; k < kLlFewTopk; ++k) {
    const bool named = place[k] != ~0u;
    const int rank = static_cast<int>(place[k] >> 16);
    const std::uint32_t expert = place[k] & 0xFFFFu;
    const bool mine = named && rank == g_.rank();
    if (named) home.add(rank);
    if (mine) {
      const int cell = unit.source() * g_.local_experts + static_cast<int>(expert);
      atomicAdd(parts_.counts() + cell / 2, 1u << (cell % 2 * 16));
    }
    here |= mine;
    if (p_.room.has_ids && k < g_.max_topk) {
      ids[k] = static_cast<std::uint16_t>(mine ? expert : kNoExpert);
    }
  }
  return here;
}

XD_LL_LIST(bool)::take_choice(const LlUnit& unit, int k, std::uint32_t id, LlRanks<kMany>& home) {
  std::uint32_t expert = kNoExpert;
  bool here = false;
  if (id != g_.ids.none()) {
    const std::uint32_t place = places_[id];
    const int rank = static_cast<int>(place >> 16);
    home.add(rank);
    here = rank == g_.rank();
    if (here) {
      expert = place & 0xFFFFu;
      const int at = unit.source() * g_.local_experts + static_cast<int>(expert);
      atomicAdd(parts_.counts() + at / 2, 1u << (at % 2 * 16));
    }
  }
  if (p_.room.has_ids) {
    parts_.ids()[unit.source() * p_.room.ids_stride + unit.token() * g_.max_topk + k] =
        static_cast<std::uint16_t>(expert);
  }
  return here;
}

XD_LL_LIST(bool)::wait_pair(std::uint64_t epoch, int source, const std::byte* at,
                            ulonglong2& pair) const {
  const std::uint64_t tag = ll_tag(epoch);
  const volatile int* gone = &turn_.shared().gone[source];
  turn::LongWait wait;
  return turn::poll_until(
      [&] {
        pair = ptx::ld_relaxed_sys_pair(at);
        return pair.x >> 48 == tag && pair.y >> 48 == tag;
      },
      [&] {
        // Where ranks are masked, the warp that has the sources decides for all.
        if (g_.masks) return *gone == 0 && *static_cast<volatile int*>(&turn_.shared().failed) == 0;
        return turn_.goes_on(XD_PHASE_ROWS, epoch, source, wait);
      });
}

// ---- The list ----------------------------------------------------------------------------------

XD_LL_LIST(void)::list() {
  int before = 0;
#pragma unroll 1
  for (int k = 0; k < rounds(); ++k) {
    const std::uint32_t* hits = parts_.hits() + k * (kLlMovers / 32);
    const int rows = lane_id() < kLlMovers / 32 ? __popc(hits[lane_id()]) : 0;
    const int lower = __reduce_add_sync(kAllLanes, lane_id() < warp_in_block() ? rows : 0);
    const std::uint32_t mine = hits[warp_in_block()];
    if ((mine >> lane_id() & 1) != 0) {
      const int at = before + lower + __popc(mine & lower_lanes());
      const int of_block = at / receivers();
      if (at - of_block * receivers() == receiver()) {
        LlUnit unit = first_;
        const int q = k * kLlMovers + thread_in_block();
        if (k > 0) unit.word = g_.order[q];
        unit.word |= static_cast<std::uint32_t>(parts_.orders()[q]) << 24;
        parts_.units()[of_block] = unit;
      }
    }
    before += __reduce_add_sync(kAllLanes, rows);
  }
  if (thread_in_block() == 0) s_.total_units = before;
}

XD_LL_LIST(void)::drop_gone() {
#pragma unroll 1
  for (int k = 0; k < rounds(); ++k) {
    const int q = k * kLlMovers + thread_in_block();
    std::uint32_t& hits = parts_.hits()[k * (kLlMovers / 32) + warp_in_block()];
    LlUnit unit{0};
    if (q < candidates()) unit.word = g_.order[q];
    const bool kept = (hits >> lane_id() & 1) != 0 && turn_.shared().gone[unit.source()] == 0;
    const unsigned found = __ballot_sync(kAllLanes, kept);
    if (lane_id() == 0) hits = found;
    __syncwarp();
  }
}

// ---- Places ------------------------------------------------------------------------------------

// The id of a unit's choice, whose words have come.
XD_LL_LIST(std::uint32_t)::id_of(std::uint64_t epoch, const LlUnit& unit, int k) const {
  const auto* words = reinterpret_cast<const std::uint64_t*>(words_of_token(epoch, unit));
  const int word = k / g_.ids.per_word;
  return g_.ids.id(ptx::ld_relaxed_sys(words + word), k - word * g_.ids.per_word);
}

XD_LL_LIST(std::uint32_t)::expert_of(std::uint64_t epoch, const LlUnit& unit, int k) const {
  if (p_.room.has_ids) {
    return parts_.ids()[unit.source() * p_.room.ids_stride + unit.token() * g_.max_topk + k];
  }
  const std::uint32_t id = id_of(epoch, unit, k);
  if (id == g_.ids.none()) return kNoExpert;
  const std::uint32_t place = places_[id];
  return place >> 16 == static_cast<std::uint32_t>(g_.rank()) ? place & 0xFFFFu : kNoExpert;
}

XD_LL_LIST(int)::slot_in(std::uint64_t epoch, const LlUnit& unit, int k, int expert) const {
  int rows = 0;
  if (p_.room.has_ids) {
    rows = earlier_in_shared(unit, expert);
  } else {
    rows = earlier_in_words(epoch, unit, id_of(epoch, unit, k));
  }
#pragma unroll 1
  for (int s = lane_id(); s < unit.source(); s += 32) {
    if (turn_.shared().gone[s] == 0) rows += count(s, expert);
  }
  return __reduce_add_sync(kAllLanes, rows);
}

// This lane's share of the rows that an expert has of lower tokens of the unit's source.
XD_LL_LIST(int)::earlier_in_shared(const LlUnit& unit, int expert) const {
  const std::uint16_t* ids = parts_.ids() + unit.source() * p_.room.ids_stride;
  const std::uint32_t wanted = static_cast<std::uint32_t>(expert) * 0x10001u;
  const int end = unit.token() * g_.max_topk;
  int bits = 0;
#pragma unroll 1
  for (int j = lane_id() * 8; j < end; j += 256) {
    const uint4 v = *reinterpret_cast<const uint4*>(ids + j);
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int left = end - j - 2 * i;  // ids of this word that count
      const std::uint32_t counted = left >= 2 ? ~0u : left == 1 ? 0xFFFFu : 0u;
      bits += __popc(__vcmpeq2(words[i], wanted) & counted);
    }
  }
  return bits / 16;
}

// The same from the ids as they came, where they are too many for shared memory.
XD_LL_LIST(int)::earlier_in_words(std::uint64_t epoch, const LlUnit& unit, std::uint32_t id) const {
  int rows = 0;
#pragma unroll 1
  for (int t = lane_id(); t < unit.token(); t += 32) {
    const LlUnit other{static_cast<std::uint32_t>(unit.source()) << 16 |
                       static_cast<std::uint32_t>(t)};
    const std::byte* at = words_of_token(epoch, other);
    int k = 0;
#pragma unroll 1
    for (int pair = 0; pair < g_.ids.words; pair += 2) {
      const ulonglong2 words = ptx::ld_relaxed_sys_pair(at + pair * 8);
#pragma unroll 1
      for (int j = 0; j < g_.ids.per_word && k < g_.max_topk; ++j, ++k) {
        rows += g_.ids.id(words.x, j) == id ? 1 : 0;
      }
#pragma unroll 1
      for (int j = 0; j < g_.ids.per_word && k < g_.max_topk; ++j, ++k) {
        rows += g_.ids.id(words.y, j) == id ? 1 : 0;
      }
    }
  }
  return rows;
}

#undef XD_LL_LIST

}  // namespace xd::ep::cuda
