// The list of the rows that come: every receiver block reads the expert ids of all sources, counts
// the rows of its experts, and marks which candidates, all tokens of all sources in the order in
// which they are likely to come, have rows here. Each warp then finds the units of its block.
//
//   shared memory        written by                     read by, behind the list's barrier
//   counts[s][e]         movers, by atomics             all: first slots of a source in an expert
//   ids[s][t][k]         the mover that has token t     movers: where a token's row lies
//   hits[round][warp]    a lane of each warp            all: positions in the list
//   orders[candidate]    the mover that has it          all: a unit's order
//   own_units, ..        a lane of each warp            all
//   zones[z]             the first tail warp, behind    all, behind another barrier
//                        the list's barrier
//
// A row's slot in expert e is the number of rows of e from lower sources, and from lower tokens of
// its own source. So no place crosses: all ranks count the same ids. Where rows lie without gaps
// that is the place in the expert's zone, and the zones follow from all counts.
#pragma once

#include "ep/slots/cuda/dispatch/tell.cuh"
#include "ep/slots/cuda/kernels.h"

namespace xd::ep::cuda {

inline constexpr std::uint32_t kNoExpert = 0xFFFF;

// The arrays that lie behind an LlItem, in a plan with room for `room_topk` choices.
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
  int pending;  // warps of movers that still wait for ids (groups that mask)
};

// Where a source stands whose words do not come: ids travel beside the record, so it stands in
// front of its rows only if the record is there.
inline __device__ __noinline__ int ll_late_phase(const LlDispatchParams& p, LlShared& shared,
                                                 int source, std::uint64_t epoch) {
  LlRecord record;
  const bool here =
      LlDispatchTurn(p, shared, kLlDispatch).pipeline().read_record(source, epoch, record);
  return here ? XD_PHASE_ROWS : XD_PHASE_ENTRY;
}

// Where a warp's search for its block's units has come to.
struct LlListCursor {
  int rounds_done = 0, before = 0;  // `before`: units of those rounds
};

// Where a row goes; expert -1 = nowhere.
struct LlPlace {
  int expert, slot;
};

// Waits for a pair of words of ids, without an end of its own where ranks are masked: there the
// warp that has the sources decides for all. False: they have been given up.
inline __device__ __noinline__ bool ll_wait_ids(const LlDispatchParams& p, LlShared& shared,
                                                std::uint64_t epoch, int source,
                                                const std::byte* at) {
  LlDispatchTurn turn(p, shared, kLlDispatch);
  const std::uint64_t tag = ll_tag(epoch);
  turn::LongWait wait;
  return turn::poll_until(
      [&] {
        const ulonglong2 pair = ptx::ld_relaxed_sys_pair(at);
        return pair.x >> 48 == tag && pair.y >> 48 == tag;
      },
      [&] {
        if (p.group.masks) {
          return *static_cast<volatile int*>(&shared.gone[source]) == 0 &&
                 *static_cast<volatile int*>(&shared.failed) == 0;
        }
        return turn.goes_on(ll_late_phase(p, shared, source, epoch), epoch, source, wait);
      });
}

// collect_any() in kernels where it is rare: it would take registers of all other steps.
template <bool kMany, bool kRows>
__device__ __noinline__ bool ll_collect_any(const LlDispatchParams& p, LlShared& turn,
                                            LlListShared& list, std::uint64_t epoch);

// `kRows`: rows lie without gaps, in [N,H], else in slots.
template <bool kMany, bool kRows>
class LlList {
 public:
  __device__ LlList(const LlDispatchParams& params, LlDispatchTurn& turn, LlListShared& list,
                    const LlSmemParts& parts)
      : p_(params), g_(params.group), turn_(turn), s_(list), parts_(parts) {}

  // Movers of receiver blocks, in front of a barrier of the block.
  __device__ void clear() {
    const int words = (g_.ranks() * columns() + 1) / 2;
#pragma unroll 1
    for (int i = thread_in_block(); i < words; i += kLlMovers) parts_.counts()[i] = 0;
    if (thread_in_block() != 0) return;
    if (is_short()) parts_.hits()[0] = 0;
    s_.own_units = s_.total_units = 0;
    s_.pending = kLlMovers / 32;
  }
  // Movers. Behind the list's barrier the ids and hits of all tokens are there. False: a wait has
  // failed.
  __device__ bool collect(std::uint64_t epoch);
  __device__ bool collect_any(std::uint64_t epoch);
  // Movers, in front of that barrier, where the operation goes without some source: forgets its
  // rows.
  __device__ void drop_gone();

  // The first receiver block writes the plan's head. It takes no rows where there are many others.
  __device__ bool heads() const { return static_cast<int>(blockIdx.x) == p_.senders; }
  __device__ int takers() const { return receivers() - first_taker(); }
  __device__ int taker() const {
    const int at = static_cast<int>(blockIdx.x) - p_.senders - first_taker();
    return at >= 0 ? at : kNoTaker;
  }
  // Behind the barrier: the unit at a place of the list, which is behind all places that the cursor
  // has been at. False: the list is shorter. All lanes of a warp.
  __device__ bool find(int at, LlListCursor& cursor, LlUnit& unit) const;
  __device__ int units() const { return s_.total_units; }

  __device__ int count(int source, int expert) const {
    const std::uint32_t at = source * columns() + expert;
    return static_cast<int>(parts_.counts()[at / 2] >> (at % 2 * 16) & 0xFFFFu);
  }
  // The place of a unit's choice. All lanes of a warp.
  __device__ LlPlace place_in(std::uint64_t epoch, const LlUnit& unit, int k) const;
  // Where the ids are in shared memory: no step of it makes a call.
  __device__ LlPlace place_in_shared(const LlUnit& unit, int k) const;

  // Where rows lie without gaps, behind that barrier.
  //
  // zones[z] is the first row of a local expert's zone, or where a row stands for all experts, of a
  // source; behind the last it is the end of all rows. One warp makes them, and a barrier follows.
  __device__ void make_zones() const;
  __device__ int num_zones() const { return by_rank() ? g_.ranks() : g_.local_experts; }
  __device__ std::int32_t zone(int z) const { return parts_.zones()[z]; }
  // The rows of a zone, without padding.
  __device__ int rows_in_zone(int z) const;
  // Damaged ids can add up to more rows than there are, or than an int can count.
  __device__ bool has_row(int row) const {
    return static_cast<unsigned>(row) < static_cast<unsigned>(p_.rows.rows);
  }
  // The row of a unit's choice, which is one zone's. All lanes of a warp.
  __device__ LlPlace row_of(const LlPlace& place) const {
    if (place.expert < 0) return place;
    const int row = zone(place.expert) + place.slot;
    return {has_row(row) ? 0 : -1, row};
  }
  // The row that stands for all of a unit's choices here. All lanes of a warp.
  __device__ int row_in(std::uint64_t epoch, const LlUnit& unit) const {
    return p_.smem.has_ids ? row_in_shared(unit) : row_in_words(epoch, unit);
  }
  __device__ int row_in_shared(const LlUnit& unit) const;
  // The local expert of a choice; -1 = none. Any lanes.
  __device__ int expert_in(std::uint64_t epoch, const LlUnit& unit, int k) const;
  __device__ bool by_rank() const { return p_.rows.by_rank; }

 private:
  static constexpr int kManyReceivers = 16, kNoTaker = 1 << 30;

  __device__ int receivers() const { return static_cast<int>(gridDim.x) - p_.senders; }
  __device__ int first_taker() const { return receivers() >= kManyReceivers ? 1 : 0; }
  __device__ int candidates() const { return g_.ranks() * g_.max_tokens; }
  // Of counts[]: local experts, and where rows lie without gaps, the tokens with rows here.
  __device__ int columns() const { return kRows ? g_.local_experts + 1 : g_.local_experts; }
  __device__ int rounds() const { return (candidates() + kLlMovers - 1) / kLlMovers; }
  __device__ std::uint32_t name(int candidate) const {
    return p_.smem.has_names ? parts_.names()[candidate] : g_.order[candidate];
  }
  __device__ std::uint32_t place_of(std::uint32_t id) const {
    return p_.smem.has_places ? parts_.places()[id] : g_.places[id];
  }
  __device__ std::uint16_t* ids_of(const LlUnit& unit) const {
    return parts_.ids() + unit.source() * p_.smem.ids_stride + unit.token() * p_.smem.ids_topk;
  }
  __device__ const std::byte* words_of_token(std::uint64_t epoch, const LlUnit& unit) const {
    const std::uint32_t row =
        (turn_.stage(epoch) * g_.ranks() + unit.source()) * g_.max_tokens + unit.token();
    return g_.own_area + g_.map.ids + std::uint64_t{row} * (g_.ids.words * 8);
  }
  template <class Take>
  __device__ bool collect_by(Take take);
  __device__ bool collect_few(std::uint64_t epoch);
  __device__ bool collect_fewest(std::uint64_t epoch);
  __device__ bool is_short() const { return candidates() <= 32; }
  __device__ void mark(int round, const LlUnit& unit, bool here);
  __device__ void mark_some(const LlUnit& unit, bool here);
  __device__ LlUnit unit_of(int warp, unsigned hits, int at) const;
  // One wait that has failed is enough, unless ranks are masked.
  __device__ bool waits(bool good) const { return good || g_.masks; }
  // In groups that mask, a wait that has ended is no failure: the sources have been decided.
  __device__ bool leave(bool good) {
    if (g_.masks && lane_id() == 0) atomicSub(&s_.pending, 1);
    return good || g_.masks;
  }
  __device__ bool take_ids(std::uint64_t epoch, const LlUnit& unit, LlRanks<kMany>& home,
                           bool& here);
  __device__ bool take_few(const LlUnit& unit, const ulonglong2& words, LlRanks<kMany>& home);
  __device__ bool take_choice(const LlUnit& unit, int k, std::uint32_t id, LlRanks<kMany>& home);
  __device__ void count_row(bool counts, const LlUnit& unit, std::uint32_t expert) const {
    const std::uint32_t at = counts ? unit.source() * columns() + expert : 0;
    ptx::add_shared_if(counts, parts_.counts() + at / 2, at % 2 != 0 ? 0x10000u : 1u);
  }
  __device__ void count_token(bool here, const LlUnit& unit) const;
  template <int kZones>
  __device__ void add_counts(int z, int (&rows)[kZones]) const;
  __device__ void note_home(const LlUnit& unit, const LlRanks<kMany>& home) const;
  // Waits for a pair of words of ids. False: they have been given up.
  __device__ bool take_pair(std::uint64_t epoch, int source, const std::byte* at,
                            ulonglong2& words) const {
    const std::uint64_t tag = ll_tag(epoch);
    const auto come = [&] {
      words = ptx::ld_relaxed_sys_pair(at);
      return words.x >> 48 == tag && words.y >> 48 == tag;
    };
    if (turn::poll_until(come, [] { return false; })) return true;
    return ll_wait_ids(p_, turn_.shared(), epoch, source, at) && come();
  }
  __device__ int lower_sources(const LlUnit& unit, int expert) const;
  __device__ LlPlace place_in_words(std::uint64_t epoch, const LlUnit& unit, int k) const;
  __device__ int earlier_few(const LlUnit& unit, int expert) const;
  __device__ int earlier_in_shared(const LlUnit& unit, int expert) const;
  __device__ int earlier_in_words(std::uint64_t epoch, const LlUnit& unit, std::uint32_t id) const;
  __device__ int row_in_words(std::uint64_t epoch, const LlUnit& unit) const;
  // The local expert with an id; -1 = it is another rank's, or none.
  __device__ int local_of(std::uint32_t id) const {
    const std::uint32_t place = id != g_.ids.none() ? place_of(id) : ~0u;
    return place >> 16 == static_cast<std::uint32_t>(g_.rank()) ? static_cast<int>(place & 0xFFFFu)
                                                                : -1;
  }

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlDispatchTurn& turn_;
  LlListShared& s_;
  const LlSmemParts parts_;
};

#define XD_LL_LIST(type)            \
  template <bool kMany, bool kRows> \
  __device__ inline type LlList<kMany, kRows>

// ---- Ids ---------------------------------------------------------------------------------------

XD_LL_LIST(bool)::collect(std::uint64_t epoch) {
  if constexpr (kMany) {
    return collect_any(epoch);
  } else {
    if (g_.ids.few() && p_.smem.has_ids && p_.smem.has_places) {
      return is_short() && !g_.masks ? collect_fewest(epoch) : collect_few(epoch);
    }
    return ll_collect_any<kMany, kRows>(p_, turn_.shared(), s_, epoch);
  }
}

// Every mover takes the ids of its candidates: take(unit, home, here) waits for them.
template <bool kMany, bool kRows>
template <class Take>
__device__ inline bool LlList<kMany, kRows>::collect_by(Take take) {
  bool good = true;
#pragma unroll 1
  for (int k = 0; k < rounds(); ++k) {
    const int q = k * kLlMovers + thread_in_block();
    bool here = false;
    LlUnit unit{0};
    if (q < candidates()) {
      unit.word = name(q);
      LlRanks<kMany> home{};
      if (waits(good) && turn_.is_source(unit.source())) good &= take(unit, home, here);
      if (here) parts_.orders()[q] = static_cast<std::uint8_t>(home.count_below(g_.rank()));
      if (heads()) note_home(unit, home);
    }
    if constexpr (kRows) count_token(here, unit);
    mark(k, unit, here);
  }
  return leave(good);
}

// Up to eight ids in two words: all ranks wait for this step.
XD_LL_LIST(bool)::collect_few(std::uint64_t epoch) {
  return collect_by([&](const LlUnit& unit, LlRanks<kMany>& home, bool& here) {
    ulonglong2 words{};
    if (!take_pair(epoch, unit.source(), words_of_token(epoch, unit), words)) return false;
    here = take_few(unit, words, home);
    return true;
  });
}

// The same where one word has the hits of all candidates: eight lanes have a candidate, and each of
// them one of its ids.
XD_LL_LIST(bool)::collect_fewest(std::uint64_t epoch) {
  constexpr int kEach = kLlFewTopk, kOfWarp = 32 / kEach;
  constexpr std::uint32_t kNone = (1u << LlIdWords::kFewBits) - 1;
  if (warp_in_block() * kOfWarp >= candidates()) return true;
  const int q = thread_in_block() / kEach, k = lane_id() % kEach;
  const bool is_one = q < candidates();
  const LlUnit unit{is_one ? name(q) : 0};
  ulonglong2 words{};
  const bool good = !is_one || take_pair(epoch, unit.source(), words_of_token(epoch, unit), words);
  const std::uint64_t word = k < LlIdWords::kFewPerWord ? words.x : words.y;
  const int bit = k % LlIdWords::kFewPerWord * LlIdWords::kFewBits;
  const std::uint32_t id = is_one && good ? static_cast<std::uint32_t>(word >> bit) & kNone : kNone;
  const std::uint32_t place = id != kNone ? parts_.places()[id] : ~0u;
  const bool mine = place >> 16 == static_cast<std::uint32_t>(g_.rank());
  const std::uint32_t expert = mine ? place & 0xFFFFu : kNoExpert;
  count_row(mine, unit, expert);
  if (is_one) ids_of(unit)[k] = static_cast<std::uint16_t>(expert);
  LlRanks<kMany> home{};
  if (place != ~0u) home.add(static_cast<int>(place >> 16));
#pragma unroll
  for (int step = kEach / 2; step > 0; step /= 2) {
    home.word[0] |= __shfl_xor_sync(kAllLanes, home.word[0], step);
  }
  const bool here = is_one && k == 0 && home.has(g_.rank());
  if (here) parts_.orders()[q] = static_cast<std::uint8_t>(home.count_below(g_.rank()));
  if constexpr (kRows) count_token(here, unit);
  if (heads() && is_one && k == 0 && good) note_home(unit, home);
  mark_some(unit, here);
  return good;
}

XD_LL_LIST(bool)::collect_any(std::uint64_t epoch) {
  return collect_by([&](const LlUnit& unit, LlRanks<kMany>& home, bool& here) {
    return take_ids(epoch, unit, home, here);
  });
}

template <bool kMany, bool kRows>
__device__ __noinline__ bool ll_collect_any(const LlDispatchParams& p, LlShared& turn,
                                            LlListShared& list, std::uint64_t epoch) {
  LlDispatchTurn launch(p, turn, kLlDispatch);
  return LlList<kMany, kRows>(p, launch, list, {p.smem, ptx::dynamic_shared()}).collect_any(epoch);
}

// All lanes: which of a warp's candidates have rows here.
XD_LL_LIST(void)::mark(int round, const LlUnit& unit, bool here) {
  const unsigned found = __ballot_sync(kAllLanes, here);
  const unsigned own = __ballot_sync(kAllLanes, here && unit.source() == g_.rank());
  if (lane_id() != 0) return;
  parts_.hits()[round * (kLlMovers / 32) + warp_in_block()] = found;
  if (found != 0) atomicAdd(&s_.total_units, __popc(found));
  if (own != 0) atomicAdd(&s_.own_units, __popc(own));
}

// The same for candidates that have eight lanes each, of which the first knows.
XD_LL_LIST(void)::mark_some(const LlUnit& unit, bool here) {
  const unsigned found = __ballot_sync(kAllLanes, here);
  const unsigned own = __ballot_sync(kAllLanes, here && unit.source() == g_.rank());
  if (lane_id() != 0 || found == 0) return;
  const unsigned hits = (found | found >> 7 | found >> 14 | found >> 21) & 0xFu;
  atomicOr(parts_.hits(), hits << (4 * warp_in_block()));
  atomicAdd(&s_.total_units, __popc(found));
  if (own != 0) atomicAdd(&s_.own_units, __popc(own));
}

// Writes the ranks of an own token to the plan. One receiver block.
XD_LL_LIST(void)::note_home(const LlUnit& unit, const LlRanks<kMany>& home) const {
  if (unit.source() != g_.rank()) return;
  RankBits bits{};
  bits.word[0] = home.word[0];
  if constexpr (kMany) {
    bits.word[0] |= static_cast<std::uint64_t>(home.word[1]) << 32;
    bits.word[1] = home.word[2];
  }
  reinterpret_cast<RankBits*>(p_.plan + g_.plan.home)[unit.token()] = bits;
}

// Takes one token's ids. `here`: some of its experts are this rank's.
XD_LL_LIST(bool)::take_ids(std::uint64_t epoch, const LlUnit& unit, LlRanks<kMany>& home,
                           bool& here) {
  const std::byte* at = words_of_token(epoch, unit);
  int k = 0;
#pragma unroll 1
  for (int pair = 0; pair < g_.ids.words; pair += 2) {
    ulonglong2 words{};
    if (!take_pair(epoch, unit.source(), at + pair * 8, words)) {
      here = false;
      return false;
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
  if (!p_.smem.has_ids) return true;
#pragma unroll 1
  for (; k < static_cast<int>(p_.smem.ids_topk); ++k) {
    ids_of(unit)[k] = static_cast<std::uint16_t>(kNoExpert);
  }
  return true;
}

// All places of a token's choices are read at once.
XD_LL_LIST(bool)::take_few(const LlUnit& unit, const ulonglong2& words, LlRanks<kMany>& home) {
  constexpr std::uint32_t kNone = (1u << LlIdWords::kFewBits) - 1;
  constexpr std::uint64_t kAllNone = (std::uint64_t{1} << 4 * LlIdWords::kFewBits) - 1;
  auto* const taken = reinterpret_cast<uint4*>(ids_of(unit));
  if (((words.x & words.y) & kAllNone) == kAllNone) {
    *taken = make_uint4(~0u, ~0u, ~0u, ~0u);
    return false;
  }
  const std::uint32_t* places = parts_.places();
  std::uint32_t place[kLlFewTopk];
#pragma unroll
  for (int k = 0; k < kLlFewTopk; ++k) {
    const std::uint64_t word = k < LlIdWords::kFewPerWord ? words.x : words.y;
    const std::uint32_t id =
        static_cast<std::uint32_t>(word >> (k % LlIdWords::kFewPerWord * LlIdWords::kFewBits)) &
        kNone;
    place[k] = id != kNone ? places[id] : ~0u;
  }
  std::uint32_t ids[kLlFewTopk];
  bool here = false;
#pragma unroll
  for (int k = 0; k < kLlFewTopk; ++k) {
    const bool mine = place[k] >> 16 == static_cast<std::uint32_t>(g_.rank());
    if (place[k] != ~0u) home.add(static_cast<int>(place[k] >> 16));
    count_row(mine, unit, place[k] & 0xFFFFu);
    here |= mine;
    ids[k] = mine ? place[k] & 0xFFFFu : kNoExpert;
  }
  *taken = make_uint4(ids[0] | ids[1] << 16, ids[2] | ids[3] << 16, ids[4] | ids[5] << 16,
                      ids[6] | ids[7] << 16);
  return here;
}

XD_LL_LIST(bool)::take_choice(const LlUnit& unit, int k, std::uint32_t id, LlRanks<kMany>& home) {
  std::uint32_t expert = kNoExpert;
  if (id != g_.ids.none()) {
    const std::uint32_t place = place_of(id);
    const int rank = static_cast<int>(place >> 16);
    home.add(rank);
    if (rank == g_.rank()) {
      expert = place & 0xFFFFu;
      count_row(true, unit, expert);
    }
  }
  if (p_.smem.has_ids) ids_of(unit)[k] = static_cast<std::uint16_t>(expert);
  return expert != kNoExpert;
}

// ---- The list ----------------------------------------------------------------------------------

XD_LL_LIST(bool)::find(int at, LlListCursor& cursor, LlUnit& unit) const {
  constexpr int kWarps = kLlMovers / 32;
  if (at >= units()) return false;
  if (is_short()) {
    unit = unit_of(0, parts_.hits()[0], at);
    return true;
  }
#pragma unroll 1
  for (; cursor.rounds_done < rounds(); ++cursor.rounds_done) {
    const unsigned hits =
        lane_id() < kWarps ? parts_.hits()[cursor.rounds_done * kWarps + lane_id()] : 0;
    // The units of this lane's warp of candidates and of those below it.
    int upto = __popc(hits);
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2) {
      const int lower = __shfl_up_sync(kAllLanes, upto, step);
      if (lane_id() >= step) upto += lower;
    }
    const int wanted = at - cursor.before;
    const unsigned beyond = __ballot_sync(kAllLanes, upto > wanted);
    if (beyond == 0) {
      cursor.before += __shfl_sync(kAllLanes, upto, kWarps - 1);
      continue;
    }
    const int warp = __ffs(static_cast<int>(beyond)) - 1;
    const unsigned those = __shfl_sync(kAllLanes, hits, warp);
    const int of_warp = wanted - (__shfl_sync(kAllLanes, upto, warp) - __popc(those));
    unit = unit_of(cursor.rounds_done * kWarps + warp, those, of_warp);
    return true;
  }
  return false;
}

// The unit at a place among those of a warp of candidates.
XD_LL_LIST(LlUnit)::unit_of(int warp, unsigned hits, int at) const {
  const bool it = (hits >> lane_id() & 1) != 0 && __popc(hits & lower_lanes()) == at;
  const int q = warp * 32 + __ffs(static_cast<int>(__ballot_sync(kAllLanes, it))) - 1;
  return {name(q) | static_cast<std::uint32_t>(parts_.orders()[q]) << 24};
}

XD_LL_LIST(void)::drop_gone() {
#pragma unroll 1
  for (int k = 0; k < rounds(); ++k) {
    const int q = k * kLlMovers + thread_in_block();
    std::uint32_t* const place = parts_.hits() + k * (kLlMovers / 32) + warp_in_block();
    const std::uint32_t hits = *place;
    LlUnit unit{0};
    if (q < candidates()) unit.word = name(q);
    const bool kept = (hits >> lane_id() & 1) != 0 && turn_.shared().gone[unit.source()] == 0;
    const unsigned found = __ballot_sync(kAllLanes, kept);
    __syncwarp();  // all lanes have read the word
    if (lane_id() == 0 && found != hits) {
      atomicSub(&s_.total_units, __popc(hits & ~found));
      *place = found;
    }
  }
}

// ---- Places ------------------------------------------------------------------------------------

XD_LL_LIST(LlPlace)::place_in(std::uint64_t epoch, const LlUnit& unit, int k) const {
  return p_.smem.has_ids ? place_in_shared(unit, k) : place_in_words(epoch, unit, k);
}

XD_LL_LIST(LlPlace)::place_in_shared(const LlUnit& unit, int k) const {
  const std::uint32_t expert = ids_of(unit)[k];
  if (expert == kNoExpert) return {-1, 0};
  const int at = static_cast<int>(expert);
  const int earlier = kMany ? earlier_in_shared(unit, at) : earlier_few(unit, at);
  return {at, __reduce_add_sync(kAllLanes, lower_sources(unit, at) + earlier)};
}

// This lane's share of the rows that an expert has of lower sources.
XD_LL_LIST(int)::lower_sources(const LlUnit& unit, int expert) const {
  int rows = 0;
#pragma unroll 1
  for (int s = lane_id(); s < unit.source(); s += 32) {
    if (!g_.masks || turn_.shared().gone[s] == 0) rows += count(s, expert);
  }
  return rows;
}

// This lane's share of the rows that an expert has of lower tokens of the unit's source. A token
// has at most one of them.
XD_LL_LIST(int)::earlier_few(const LlUnit& unit, int expert) const {
  const auto* tokens =
      reinterpret_cast<const uint4*>(parts_.ids() + unit.source() * p_.smem.ids_stride);
  const std::uint32_t wanted = static_cast<std::uint32_t>(expert) * 0x10001u;
  int rows = 0;
#pragma unroll 1
  for (int t = lane_id(); t < unit.token(); t += 32) {
    const uint4 v = tokens[t];
    // A half of x that is zero has its top bit set in (x - 1) & ~x; none is set where no half is.
    const auto has = [wanted](std::uint32_t two) {
      const std::uint32_t x = two ^ wanted;
      return (x - 0x10001u) & ~x;
    };
    const std::uint32_t found = (has(v.x) | has(v.y) | has(v.z) | has(v.w)) & 0x80008000u;
    rows += found != 0 ? 1 : 0;
  }
  return rows;
}

// The same where a token has more choices.
XD_LL_LIST(int)::earlier_in_shared(const LlUnit& unit, int expert) const {
  const std::uint16_t* ids = parts_.ids() + unit.source() * p_.smem.ids_stride;
  const std::uint32_t wanted = static_cast<std::uint32_t>(expert) * 0x10001u;
  const int end = unit.token() * static_cast<int>(p_.smem.ids_topk);
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

// The place from the ids as they came, where they are too many for shared memory.
XD_LL_LIST(LlPlace)::place_in_words(std::uint64_t epoch, const LlUnit& unit, int k) const {
  const auto* words = reinterpret_cast<const std::uint64_t*>(words_of_token(epoch, unit));
  const int word = k / g_.ids.per_word;
  const std::uint32_t id = g_.ids.id(ptx::ld_relaxed_sys(words + word), k - word * g_.ids.per_word);
  if (id == g_.ids.none()) return {-1, 0};
  const std::uint32_t place = place_of(id);
  if (place >> 16 != static_cast<std::uint32_t>(g_.rank())) return {-1, 0};
  const auto expert = static_cast<int>(place & 0xFFFFu);
  const int rows = lower_sources(unit, expert) + earlier_in_words(epoch, unit, id);
  return {expert, __reduce_add_sync(kAllLanes, rows)};
}

// The lane's share of earlier rows there.
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

// ---- Rows without gaps -------------------------------------------------------------------------

XD_LL_LIST(int)::rows_in_zone(int z) const {
  if (by_rank()) return g_.masks && turn_.shared().gone[z] != 0 ? 0 : count(z, g_.local_experts);
  int rows = 0;
#pragma unroll 1
  for (int s = 0; s < g_.ranks(); ++s) {
    if (!g_.masks || turn_.shared().gone[s] == 0) rows += count(s, z);
  }
  return rows;
}

// All lanes: counts the tokens of each source that have rows here. A warp has few sources, and
// lanes that add to one word would do so one after another.
XD_LL_LIST(void)::count_token(bool here, const LlUnit& unit) const {
  if (!by_rank()) return;
  unsigned left = __ballot_sync(kAllLanes, here);
#pragma unroll 1
  while (left != 0) {
    const int source = __shfl_sync(kAllLanes, unit.source(), __ffs(static_cast<int>(left)) - 1);
    const unsigned same = __ballot_sync(kAllLanes, here && unit.source() == source);
    const std::uint32_t at = source * columns() + g_.local_experts;
    ptx::add_shared_if(lane_id() == 0, parts_.counts() + at / 2,
                       static_cast<std::uint32_t>(__popc(same)) << (at % 2 * 16));
    left &= ~same;
  }
}

// All lanes: all groups wait for it. A lane has every 32nd zone, four of them at a time, so that
// their counts are read, and added up, beside one another.
XD_LL_LIST(void)::make_zones() const {
  constexpr int kAtOnce = 4;
  const int zones = num_zones(), alignment = p_.rows.alignment;
  int before = 0;  // rows of all zones so far
#pragma unroll 1
  for (int base = 0; base < zones; base += kAtOnce * 32) {
    int rows[kAtOnce], upto[kAtOnce];
    add_counts<kAtOnce>(base + lane_id(), rows);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      rows[j] = (rows[j] + alignment - 1) & -alignment;
      upto[j] = rows[j];
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int lower = __shfl_up_sync(kAllLanes, upto[j], step);
        if (lane_id() >= step) upto[j] += lower;
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int z = base + j * 32 + lane_id();
      if (z < zones) parts_.zones()[z] = before + upto[j] - rows[j];
      before += __shfl_sync(kAllLanes, upto[j], 31);
    }
  }
  if (lane_id() == 0) parts_.zones()[zones] = before;
}

// The rows, without padding, of the zones z, z + 32, ..; of zones that are not there 0.
template <bool kMany, bool kRows>
template <int kZones>
__device__ inline void LlList<kMany, kRows>::add_counts(int z, int (&rows)[kZones]) const {
  const int zones = num_zones();
#pragma unroll
  for (int j = 0; j < kZones; ++j) rows[j] = 0;
  if (by_rank()) {
#pragma unroll
    for (int j = 0; j < kZones; ++j) {
      if (z + j * 32 < zones) rows[j] = rows_in_zone(z + j * 32);
    }
    return;
  }
#pragma unroll 1
  for (int s = 0; s < g_.ranks(); ++s) {
    if (g_.masks && turn_.shared().gone[s] != 0) continue;
#pragma unroll
    for (int j = 0; j < kZones; ++j) {
      if (z + j * 32 < zones) rows[j] += count(s, z + j * 32);
    }
  }
}

XD_LL_LIST(int)::row_in_shared(const LlUnit& unit) const {
  const std::uint16_t* ids = parts_.ids() + unit.source() * p_.smem.ids_stride;
  int rows = 0;
#pragma unroll 1
  for (int t = lane_id(); t < unit.token(); t += 32) {
    bool here = false;
    if constexpr (kMany) {
#pragma unroll 1
      for (int k = 0; k < static_cast<int>(p_.smem.ids_topk); ++k) {
        here |= ids[t * static_cast<int>(p_.smem.ids_topk) + k] != kNoExpert;
      }
    } else {
      const uint4 v = reinterpret_cast<const uint4*>(ids)[t];
      here = (v.x & v.y & v.z & v.w) != ~0u;
    }
    rows += here ? 1 : 0;
  }
  return zone(unit.source()) + __reduce_add_sync(kAllLanes, rows);
}

XD_LL_LIST(int)::row_in_words(std::uint64_t epoch, const LlUnit& unit) const {
  int rows = 0;
#pragma unroll 1
  for (int t = lane_id(); t < unit.token(); t += 32) {
    const LlUnit other{static_cast<std::uint32_t>(unit.source()) << 16 |
                       static_cast<std::uint32_t>(t)};
    bool here = false;
#pragma unroll 1
    for (int k = 0; k < g_.max_topk && !here; ++k) here = expert_in(epoch, other, k) >= 0;
    rows += here ? 1 : 0;
  }
  return zone(unit.source()) + __reduce_add_sync(kAllLanes, rows);
}

XD_LL_LIST(int)::expert_in(std::uint64_t epoch, const LlUnit& unit, int k) const {
  if (p_.smem.has_ids) {
    const std::uint32_t expert = ids_of(unit)[k];
    return expert != kNoExpert ? static_cast<int>(expert) : -1;
  }
  const auto* words = reinterpret_cast<const std::uint64_t*>(words_of_token(epoch, unit));
  const int word = k / g_.ids.per_word;
  return local_of(g_.ids.id(ptx::ld_relaxed_sys(words + word), k - word * g_.ids.per_word));
}

#undef XD_LL_LIST

}  // namespace xd::ep::cuda
