// The send half of a combine: this rank's rows of each token are summed, and go home as one row.
//
//   memory                         written by              read by
//   expert_out, the plan           the caller, before      all movers
//   partials[stage][t][order]      a quarter of a block    the movers of the token's rank
//   there
//   weights[stage][rank][t] there  the control warp of     the movers of the rows' ranks
//                                  the token's block
//
// A unit is a part of a row of 224 vectors, by 7 warps, so that all multiprocessors have nearly the
// same to send. The next unit's rows are loaded before this unit's words are stored: loads behind
// stores wait for the links. The sum of this rank's own rows of the block's first token comes last
// and stays in registers. In a launch of the send half alone own tokens' units cross as well, into
// this rank's memory; blocks of their own have those, so that they do not stand behind the links.
#pragma once

#include "ep/slots/cuda/combine/form.cuh"
#include "ep/slots/cuda/dispatch/list.cuh"

namespace xd::ep::cuda {

inline constexpr int kLlCombineMovers = kLlMoverThreads, kLlCombineControls = 64;
inline constexpr int kLlCombineThreads = kLlCombineMovers + kLlCombineControls;
static_assert(kLlCombineThreads == kLlCombineBlockThreads);
inline constexpr int kLlPartThreads = kLlPartVectors;

using LlCombineTurn = LlTurn<LlCombineParams>;

// One item of a plan as the lanes of a warp have it: lane k has choice k.
struct LlChoice {
  LlItem item;
  int row;  // of expert_out; -1 = none
  float weight;
};

struct LlCombineShared {
  LlShared turn;
  // Of the plan, by the warp that checks it:
  alignas(16) PlanHeader plan;
  RankBits first_home;     // home() of the block's first token
  LlChoice first_own[32];  // lane k's part of that token's own item, with this call's weights

  std::uint64_t stage_offset;  // of the partial sums of the operation that is sent, in all areas
  unsigned unusual;            // 1 = a thread of the block tells what the operation has met
};

// True if the call has weights. Weights of no tokens have no address.
__device__ inline bool has_weights(const LlCombineParams& p) {
  return (p.record.flags & kWeighted) != 0;
}

// The plan of a call. Its parts have fixed places (LlDevice::plan).
struct LlPlanParts {
  const LlCombineParams& p;

  __device__ explicit LlPlanParts(const LlCombineParams& params) : p(params) {}
  __device__ LlPlanFacts facts() const {
    return *reinterpret_cast<const LlPlanFacts*>(p.plan + p.group.plan.facts);
  }
  __device__ RankBits home(int token) const {
    const auto words = reinterpret_cast<const ulonglong2*>(p.plan + p.group.plan.home)[token];
    return {words.x, words.y};
  }
  // The part of home() that has a rank's bit.
  __device__ std::uint32_t home_word(int token, int rank) const {
    return reinterpret_cast<const std::uint32_t*>(p.plan +
                                                  p.group.plan.home)[token * 4 + rank / 32];
  }
  __device__ std::byte* item(const LlDevice& g, std::uint32_t i) const {
    return const_cast<std::byte*>(p.plan) + p.group.plan.items +
           std::uint64_t{i} * ll_item_bytes(g.max_topk);
  }
  // Items of own tokens lie behind those of all that may come from other ranks.
  __device__ std::uint32_t own_first() const {
    return static_cast<std::uint32_t>((p.group.ranks() - 1) * p.group.max_tokens);
  }
  __device__ LlChoice choice_at(std::uint32_t index) const {
    std::byte* at = item(p.group, index);
    LlChoice choice{*reinterpret_cast<const LlItem*>(at), -1, 0.0f};
    if (lane_id() < p.group.max_topk) {
      choice.row = ll_rows_of(at)[lane_id()];
      choice.weight = ll_weights_of(at, p.group.max_topk)[lane_id()];
    }
    return choice;
  }
  __device__ LlChoice own_choice(int token) const {
    return own(choice_at(own_first() + static_cast<std::uint32_t>(token)), token);
  }
  // An own token's item as it lies there. Its weights are those of the call, if it has some.
  __device__ LlChoice own(LlChoice choice, int token) const {
    choice.item.source_token = LlItem::name(p.group.rank(), token);
    if (has_weights(p) && token < p.weight_rows && lane_id() < p.weight_cols) {
      choice.weight = p.topk_weights[token * p.weight_cols + lane_id()];
    }
    return choice;
  }
};

// `place`: token * partials_per_token() + order.
__device__ inline std::uint64_t ll_partial_offset(const LlDevice& g, std::uint32_t stage,
                                                  std::uint32_t place) {
  const std::uint32_t row = stage * g.max_tokens * g.partials_per_token() + place;
  return g.map.partials + std::uint64_t{row} * static_cast<std::uint32_t>(g.map.partial_stride);
}

__device__ inline std::uint64_t ll_weight_offset(const LlDevice& g, std::uint32_t stage, int source,
                                                 int token) {
  const std::uint32_t row = (stage * g.ranks() + source) * g.max_tokens + token;
  return g.map.weights + std::uint64_t{row} * g.max_topk * sizeof(std::uint64_t);
}

// The place of this lane's weight of a token, if this call has weights.
__device__ inline const std::uint64_t* ll_weight_at(const LlCombineParams& p, std::uint64_t epoch,
                                                    const LlItem& item) {
  const LlDevice& g = p.group;
  const std::uint64_t offset =
      ll_weight_offset(g, turn::pipeline_stage(epoch, g.stages), item.source(), item.token());
  return reinterpret_cast<const std::uint64_t*>(g.own_area + offset) + lane_id();
}

// The weight of this lane's choice, for which it waits. It is no part of the code that sums, whose
// registers it would take.
inline __device__ __noinline__ float ll_late_weight(const LlCombineParams& p, LlShared& shared,
                                                    std::uint64_t epoch, LlItem item) {
  const LlCombineTurn turn(p, shared, kLlCombine);
  const std::uint64_t* at = ll_weight_at(p, epoch, item);
  std::uint64_t word = 0;
  turn::LongWait wait;
  turn::poll_until(
      [&] {
        word = ptx::ld_relaxed_sys(at);
        return count_is_of(word, epoch);
      },
      [&] {
        // A rank whose call has no weights sends none. Its record says so, and nobody takes the
        // sum.
        LlRecord record;
        if (turn.pipeline().read_record(item.source(), epoch, record) &&
            (record.call.status != XD_SUCCESS || (record.flags & kWeighted) == 0)) {
          return false;
        }
        return turn.goes_on(XD_PHASE_ROWS, epoch, item.source(), wait);
      });
  return __uint_as_float(count_of(word));
}

// The blocks of a launch that send units of one kind, and this block's place among them.
struct LlPushBlocks {
  std::uint32_t block, blocks;
  bool own;  // units of own tokens, else of other ranks'

  __device__ static LlPushBlocks of(const LlCombineParams& p) {
    if (p.step.receive) return {blockIdx.x, gridDim.x, false};
    const auto ranks = static_cast<std::uint32_t>(p.group.ranks());
    const std::uint32_t own = max(gridDim.x / ranks, 1u), others = gridDim.x - own;
    if (blockIdx.x < others) return {blockIdx.x, others, false};
    return {blockIdx.x - others, own, true};
  }
  // A warp's first unit, and the way to its next.
  __device__ std::uint32_t first() const {
    return warp_in_block() / (kLlPartThreads / 32) * blocks + block;
  }
  __device__ std::uint32_t step() const { return kLlCombineMovers / kLlPartThreads * blocks; }
};

// One row of partial sums, or a part of one, as the lanes of a warp hold it: lane k has choice k.
struct LlSum {
  static constexpr int kAhead = 3;  // rows that are loaded ahead

  LlItem item;
  std::int64_t offset;  // of the choice's row in expert_out
  float weight;
  unsigned here;  // the lanes with rows
  std::uint32_t vector;
  uint4 row[kAhead];
};

template <class F>
class LlPusher {
 public:
  __device__ LlPusher(const LlCombineParams& params, LlCombineTurn& turn,
                      const LlCombineShared& shared, const LlPlanParts& parts)
      : p_(params),
        g_(params.group),
        turn_(turn),
        shared_(shared),
        parts_(parts),
        vectors_(params.row_bytes / F::kBytes),
        has_first_(params.step.receive && static_cast<int>(blockIdx.x) < params.out_rows),
        blocks_(LlPushBlocks::of(params)) {}

  // Before the block's first barrier: the rows of a unit, from which on all are sent, are on their
  // way.
  __device__ void load_first(std::uint32_t unit);
  // Behind it. Afterwards `sum` is this rank's own part of the block's first token, if a launch
  // does both halves.
  __device__ void push_all(std::uint64_t epoch, uint4& sum);

  // This rank's own part of a token: its rows are on their way.
  __device__ void load_own(int token, std::uint32_t vector) {
    const std::uint32_t home = parts_.home_word(token, g_.rank());
    take(parts_.own_choice(token), vector, (home >> (g_.rank() % 32) & 1) != 0);
  }
  __device__ uint4 add_up(std::uint64_t epoch);
  // Stands in front of load_own() where nothing has been pushed.
  __device__ void look_at_facts() { weighted_ = parts_.facts().weighted != 0; }

 private:
  __device__ bool is_over() const { return unit_ >= units_; }
  __device__ std::uint32_t vector_of_part(std::uint32_t part) const {
    return part * kLlPartThreads + threadIdx.x % kLlPartThreads;
  }
  // The words of a unit's item, one a lane, if a lane is enough for each, and of an own token
  // home_word(); of some item, where there is no such unit.
  struct Ahead {
    std::uint32_t words, home;
  };
  __device__ Ahead load_ahead(std::uint32_t unit) const;
  __device__ bool has_few_words() const { return 2 + 2 * g_.max_topk <= 32; }
  __device__ LlChoice choice_in(std::uint32_t words) const;
  __device__ void load_unit(const LlChoice& next, std::uint32_t home);
  __device__ void take(const LlChoice& choice, std::uint32_t vector, bool there);
  __device__ void load_rows();
  __device__ void take_weight(std::uint64_t epoch);
  __device__ const std::byte* row_at(int k) const {
    const long long offset = __shfl_sync(kAllLanes, static_cast<long long>(now_.offset), k);
    return p_.expert_out.data + offset + now_.vector * F::kBytes;
  }

  const LlCombineParams& p_;
  const LlDevice& g_;
  LlCombineTurn& turn_;
  const LlCombineShared& shared_;
  const LlPlanParts& parts_;
  const std::uint32_t vectors_;
  const bool has_first_;  // this rank takes the block's first token
  const LlPushBlocks blocks_;
  std::uint32_t unit_ = 0, units_ = 0;  // among those of this block's kind
  bool weighted_ = false;               // the plan's items have weights
  LlSum now_{};
  Ahead next_{};  // of the unit behind this one
};

#define XD_LL_PUSHER(type) \
  template <class F>       \
  __device__ inline type LlPusher<F>

// A plan's items have places for all that may come, so they are loaded before it is known how many
// there are: one load's time for all.
XD_LL_PUSHER(void)::load_first(std::uint32_t unit) {
  unit_ = unit;
  const LlPlanFacts facts = parts_.facts();
  const Ahead first = load_ahead(unit_);
  next_ = load_ahead(unit_ + blocks_.step());
  // Before all that follows from the number: the compiler would load the item behind it otherwise.
  const LlChoice choice = choice_in(first.words);
  const auto most = static_cast<long long>(parts_.own_first());
  const auto items = static_cast<long long>(facts.peer_items);
  const auto remote = static_cast<std::uint32_t>(min(max(items, 0ll), most));
  weighted_ = facts.weighted != 0;
  const auto items_here = blocks_.own ? static_cast<std::uint32_t>(g_.max_tokens) : remote;
  units_ = items_here * p_.route.row_parts.by;
  if (!is_over()) load_unit(choice, first.home);
}

XD_LL_PUSHER(auto)::load_ahead(std::uint32_t unit) const -> Ahead {
  const std::uint32_t at = p_.route.row_parts.divides(unit);
  const std::uint32_t token = min(at, static_cast<std::uint32_t>(g_.max_tokens - 1));
  const std::uint32_t item = blocks_.own ? parts_.own_first() + token : min(at, parts_.own_first());
  const int word = min(lane_id(), 1 + 2 * g_.max_topk);
  Ahead ahead{reinterpret_cast<const std::uint32_t*>(parts_.item(g_, item))[word], 0};
  if (blocks_.own) ahead.home = parts_.home_word(static_cast<int>(token), g_.rank());
  return ahead;
}

XD_LL_PUSHER(LlChoice)::choice_in(std::uint32_t words) const {
  const int k = lane_id(), room = g_.max_topk;
  LlChoice choice{};
  choice.item.source_token = __shfl_sync(kAllLanes, words, 0);
  choice.item.place = __shfl_sync(kAllLanes, words, 1);
  choice.row = static_cast<int>(__shfl_sync(kAllLanes, words, 2 + k));
  choice.weight = __uint_as_float(__shfl_sync(kAllLanes, words, 2 + room + k));
  if (k >= room) choice.row = -1;
  return choice;
}

// The rows of this unit, whose item's words are `next` where they are few. Where all units are
// over, this rank's own part of the block's first token follows: behind the block's first barrier.
XD_LL_PUSHER(void)::load_unit(const LlChoice& next, std::uint32_t home) {
  std::uint32_t vector = threadIdx.x;
  bool there = true;
  LlChoice choice;
  if (is_over()) {
    const LlCombineShared& s = shared_;
    choice = s.first_own[lane_id()];
    there = has_first_ && s.first_home.has(g_.rank());
  } else {
    const std::uint32_t unit_item = p_.route.row_parts.divides(unit_);
    vector = vector_of_part(unit_ - unit_item * p_.route.row_parts.by);
    const std::uint32_t item = unit_item + (blocks_.own ? parts_.own_first() : 0);
    choice = has_few_words() ? next : parts_.choice_at(item);
    if (blocks_.own) {
      choice = parts_.own(choice, static_cast<int>(unit_item));
      there = (home >> (g_.rank() % 32) & 1) != 0;
    }
  }
  take(choice, vector, there);
}

// A plan's items are not under its checksum, so they are held within the bounds of all memory.
XD_LL_PUSHER(void)::take(const LlChoice& choice, std::uint32_t vector, bool there) {
  now_.item = choice.item;
  now_.weight = choice.weight;
  now_.vector = vector;
  const auto row = static_cast<std::uint32_t>(choice.row);
  const std::uint32_t expert = p_.slots.divides(row & 0x7FFFFFFFu);
  const bool good =
      there && choice.row >= 0 && expert < p_.route.local_experts &&
      choice.item.source() < g_.ranks() && choice.item.token() < g_.max_tokens &&
      choice.item.place < static_cast<std::uint32_t>(g_.max_tokens * g_.partials_per_token());
  now_.offset = good ? expert * p_.expert_out.expert_stride +
                           (row - expert * p_.slots.by) * p_.expert_out.slot_stride
                     : 0;
  now_.here = __ballot_sync(kAllLanes, good);
  load_rows();
}

// Every row gets a value, so that none has to be kept from the unit before.
XD_LL_PUSHER(void)::load_rows() {
  unsigned left = now_.here;
#pragma unroll
  for (int q = 0; q < LlSum::kAhead; ++q, left &= left - 1) {
    now_.row[q] = make_uint4(0, 0, 0, 0);
    if (left == 0) continue;
    const std::byte* at = row_at(__ffs(static_cast<int>(left)) - 1);
    if (now_.vector < vectors_) now_.row[q] = F::load_row(at);
  }
}

// The weight of this lane's choice of another rank's token, of this call. All lanes. A wait that
// becomes long is a call, behind which the rows are loaded again: over a call they would have to
// lie in memory, and so a load ahead would be waited for where it is made.
XD_LL_PUSHER(void)::take_weight(std::uint64_t epoch) {
  const bool mine = (now_.here >> lane_id() & 1) != 0 && lane_id() < p_.weight_cols;
  const std::uint64_t* at = ll_weight_at(p_, epoch, now_.item);
  std::uint64_t word = 0;
  bool there = false;
#pragma unroll 1
  for (int i = 0; i < turn::kPollsBetweenLooks && !there; ++i) {
    if (mine) word = ptx::ld_relaxed_sys(at);
    there = __all_sync(kAllLanes, !mine || count_is_of(word, epoch)) != 0;
  }
  if (there) {
    if (mine) now_.weight = __uint_as_float(count_of(word));
    return;
  }
  if (mine) now_.weight = ll_late_weight(p_, turn_.shared(), epoch, now_.item);
  __syncwarp();
  load_rows();
}

// The sum of the unit's rows by ascending k, as it travels. All lanes.
XD_LL_PUSHER(uint4)::add_up(std::uint64_t epoch) {
  if (now_.here == 0) return make_uint4(0, 0, 0, 0);
  const bool given = has_weights(p_);
  if (!given && !weighted_ && (now_.here & (now_.here - 1)) == 0) {
    return F::partial_of_row(p_, now_.row[0]);
  }
  const int source = now_.item.source();
  if (given && source != g_.rank() && !turn_.leaves_out(source)) take_weight(epoch);
  const float weight = now_.weight;
  float sum[F::kColumns];
#pragma unroll
  for (int n = 0; n < F::kColumns; ++n) sum[n] = -0.0f;
  unsigned left = now_.here;
#pragma unroll
  for (int q = 0; q < LlSum::kAhead; ++q, left &= left - 1) {
    if (left == 0) continue;
    F::add_row(sum, now_.row[q], __shfl_sync(kAllLanes, weight, __ffs(static_cast<int>(left)) - 1));
  }
#pragma unroll 1
  while (left != 0) {
    const int a = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    const bool two = left != 0;
    const int b = two ? __ffs(static_cast<int>(left)) - 1 : a;
    left &= left - 1;
    const std::byte *first = row_at(a), *second = row_at(b);
    uint4 x{}, y{};
    if (now_.vector < vectors_) x = F::load_row(first);
    if (two && now_.vector < vectors_) y = F::load_row(second);
    F::add_row(sum, x, __shfl_sync(kAllLanes, weight, a));
    const float other = __shfl_sync(kAllLanes, weight, b);
    if (two) F::add_row(sum, y, other);
  }
  return F::partial_of(p_, sum);
}

XD_LL_PUSHER(void)::push_all(std::uint64_t epoch, uint4& sum) {
  const std::uint32_t step = blocks_.step();
  // A unit's rows are there since load_first(); this rank's own part has not been known before.
  if (is_over()) load_unit({}, 0);
#pragma unroll 1
  for (;;) {
    sum = add_up(epoch);
    if (is_over()) return;
    const LlItem item = now_.item;
    const std::uint32_t vector = now_.vector;
    const bool sends = now_.here != 0 && vector < vectors_ && !turn_.leaves_out(item.source());
    unit_ += step;
    load_unit(choice_in(next_.words), next_.home);
    next_ = load_ahead(unit_ + step);
    if (!sends) continue;
    std::byte* to = turn_.shared().area[item.source()].base +
                    ll_partial_offset(g_, turn_.stage(epoch), item.place);
    typename F::Place(to, vector, p_).send(sum);
  }
}

#undef XD_LL_PUSHER

}  // namespace xd::ep::cuda
