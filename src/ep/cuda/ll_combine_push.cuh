// The send half of a combine: this rank's rows of each token are summed, and go home as one row.
//
//   memory                        written by              read by
//   expert_out, the plan          the caller, before      all movers
//   partials[slot][t][order]      a quarter of a block    the movers of the token's rank
//   there
//   weights[slot][rank][t] there  the control warp of     the movers of the rows' ranks
//                                 the token's block
//
// A unit is a part of a row of 224 vectors, by 7 warps, so that all multiprocessors have nearly the
// same to send. The next unit's rows are loaded before this unit's words are stored: loads behind
// stores wait for the links. The sum of this rank's own rows of the block's first token comes last
// and stays in registers.
#pragma once

#include "ep/cuda/ll_dispatch_list.cuh"
#include "ep/cuda/sums.cuh"

namespace xd::ep::cuda {

inline constexpr int kLlCombineMovers = kLlMoverThreads, kLlCombineControls = 64;
inline constexpr int kLlCombineThreads = kLlCombineMovers + kLlCombineControls;
static_assert(kLlCombineThreads == kLlCombineBlockThreads);
inline constexpr int kLlPartThreads = kLlCombineMovers / 4;

using LlCombineTurn = LlTurn<LlCombineParams>;

struct LlCombineShared {
  LlShared turn;
  PlanHeader plan;
  std::uint64_t decided;  // said_by() of the operation whose verdict is there
  int drains;             // 1 = all movers drain the operation
  unsigned long long drained;
};

// An operation and its verdict in one word, so that a mover that reads it needs no order.
__device__ inline std::uint64_t said_by(std::uint64_t epoch, int verdict) {
  return epoch << 2 | static_cast<std::uint64_t>(verdict);
}
__device__ inline bool says(const volatile std::uint64_t& decided, std::uint64_t epoch,
                            LlVerdict verdict) {
  return decided == said_by(epoch, static_cast<int>(verdict));
}

// The plan of a call. Its parts have fixed places (LlDevice::plan).
struct LlPlanParts {
  const LlCombineParams& p;

  __device__ explicit LlPlanParts(const LlCombineParams& params) : p(params) {}
  __device__ int remote_items() const {
    return static_cast<int>(
        reinterpret_cast<const LlPlanFacts*>(p.plan + p.group.plan.facts)->remote_items);
  }
  __device__ bool weighted() const {
    return reinterpret_cast<const LlPlanFacts*>(p.plan + p.group.plan.facts)->weighted != 0;
  }
  __device__ int items_of(int source) const {
    return reinterpret_cast<const std::int32_t*>(p.plan + p.group.plan.items_of)[source];
  }
  __device__ RankBits home(int token) const {
    return reinterpret_cast<const RankBits*>(p.plan + p.group.plan.home)[token];
  }
  __device__ std::byte* item(const LlDevice& g, std::uint32_t i) const {
    return const_cast<std::byte*>(p.plan) + p.group.plan.items +
           std::uint64_t{i} * ll_item_bytes(g.max_topk);
  }
};

// `place`: token * partials_per_token() + order.
__device__ inline std::uint64_t ll_partial_offset(const LlDevice& g, std::uint32_t slot,
                                                  std::uint32_t place) {
  const std::uint32_t row = slot * g.max_tokens * g.partials_per_token() + place;
  return g.map.partials + std::uint64_t{row} * static_cast<std::uint32_t>(g.map.partial_stride);
}

__device__ inline std::uint64_t ll_weight_offset(const LlDevice& g, std::uint32_t slot, int source,
                                                 int token) {
  const std::uint32_t row = (slot * g.ranks() + source) * g.max_tokens + token;
  return g.map.weights + std::uint64_t{row} * g.max_topk * sizeof(std::uint64_t);
}

// The place of this lane's weight of a token, if this call has weights.
__device__ inline const std::uint64_t* ll_weight_at(const LlCombineParams& p, std::uint64_t epoch,
                                                    const LlItem& item) {
  const LlDevice& g = p.group;
  const std::uint64_t offset =
      ll_weight_offset(g, turn::lane_slot(epoch, g.slots), item.source(), item.token());
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
        if (turn.lane().read_record(item.source(), epoch, record) &&
            (record.call.status != XD_SUCCESS || (record.flags & kHasWeights) == 0)) {
          return false;
        }
        return turn.goes_on(XD_PHASE_ROWS, epoch, item.source(), wait);
      });
  return __uint_as_float(count_of(word));
}

// One row of partial sums, or a part of one, as the lanes of a warp hold it: lane k has choice k.
template <class T>
struct LlSum {
  static constexpr int kAhead = 3;  // rows that are loaded ahead

  LlItem item;
  std::int64_t offset;  // of the choice's row in expert_out
  float weight;
  unsigned here;  // the lanes with rows
  std::uint32_t vector;
  uint4 row[kAhead];
};

template <class T>
class LlPusher {
 public:
  __device__ LlPusher(const LlCombineParams& params, LlCombineTurn& turn, const LlPlanParts& parts)
      : p_(params),
        g_(params.group),
        turn_(turn),
        parts_(parts),
        vectors_(params.row_bytes / 16),
        row_parts_((vectors_ + kLlPartThreads - 1) / kLlPartThreads),
        remote_(pushes() ? static_cast<std::uint32_t>(
                               min(max(parts.remote_items(), 0), (g_.ranks() - 1) * g_.max_tokens))
                         : 0) {}

  // Before the block's first barrier: the first unit's rows are on their way.
  __device__ void load_first() {
    // Units of this rank's own tokens cross only where a later launch takes them.
    own_units_ = p_.step.receive ? 0 : g_.max_tokens;
    unit_ = warp_in_block() / (kLlPartThreads / 32) * gridDim.x + blockIdx.x;
    load_next();
  }
  // Behind it. Afterwards `sum` is this rank's own part of the block's first token, if a launch
  // does both halves.
  __device__ void push_all(std::uint64_t epoch, uint4& sum);

  // This rank's own part of a token: its rows are on their way.
  __device__ void load_own(int token, std::uint32_t vector) {
    load((g_.ranks() - 1) * g_.max_tokens + token, vector, true);
  }
  __device__ uint4 add_up(std::uint64_t epoch);

 private:
  // A call that has failed may have no plan.
  __device__ bool pushes() const { return p_.step.send && !p_.step.failed; }
  __device__ bool is_over() const { return unit_ >= (remote_ + own_units_) * row_parts_; }
  __device__ void load_next();
  __device__ void load(std::uint32_t item, std::uint32_t vector, bool there);
  __device__ void load_item(std::uint32_t index, std::uint32_t vector);
  __device__ void load_rows();
  __device__ void take_weight(std::uint64_t epoch);
  __device__ const std::byte* row_at(int k) const {
    const long long offset = __shfl_sync(kAllLanes, static_cast<long long>(now_.offset), k);
    return p_.expert_out.data + offset + now_.vector * 16;
  }

  const LlCombineParams& p_;
  const LlDevice& g_;
  LlCombineTurn& turn_;
  const LlPlanParts& parts_;
  const std::uint32_t vectors_, row_parts_, remote_;
  std::uint32_t own_units_ = 0, unit_ = 0;
  LlSum<T> now_{};
};

#define XD_LL_PUSHER(type) \
  template <class T>       \
  __device__ inline type LlPusher<T>

XD_LL_PUSHER(void)::load_next() {
  const std::uint32_t own_first = (g_.ranks() - 1) * g_.max_tokens;
  std::uint32_t item = own_first + blockIdx.x, vector = threadIdx.x;
  bool there = p_.step.receive && static_cast<int>(blockIdx.x) < p_.out_rows;
  if (!is_over()) {
    item = unit_ / row_parts_;
    const std::uint32_t part = unit_ - item * row_parts_;
    vector = part * kLlPartThreads + threadIdx.x % kLlPartThreads;
    there = true;
    if (item >= remote_) item += own_first - remote_;
  }
  load(item, vector, there);
}

// An own token's item is there if this rank has rows of it.
XD_LL_PUSHER(void)::load(std::uint32_t item, std::uint32_t vector, bool there) {
  const auto own_first = static_cast<std::uint32_t>((g_.ranks() - 1) * g_.max_tokens);
  now_.here = 0;
  if (there) load_item(item, vector);
  if (there && item >= own_first &&
      !parts_.home(static_cast<int>(item - own_first)).has(g_.rank())) {
    now_.here = 0;
  }
  load_rows();
}

// A plan's items are not under its checksum, so they are held within the bounds of all memory.
XD_LL_PUSHER(void)::load_item(std::uint32_t index, std::uint32_t vector) {
  std::byte* item = parts_.item(g_, index);
  now_.item = *reinterpret_cast<const LlItem*>(item);
  now_.vector = vector;
  const bool named = lane_id() < g_.max_topk;
  const int row = named ? ll_rows_of(item)[lane_id()] : -1;
  now_.weight = named ? ll_weights_of(item, g_.max_topk)[lane_id()] : 0.0f;
  const auto slots = static_cast<std::uint32_t>(g_.slots_per_expert());
  const std::uint32_t expert = static_cast<std::uint32_t>(row) / slots;
  const bool good =
      row >= 0 && expert < static_cast<std::uint32_t>(g_.local_experts) &&
      now_.item.source() < g_.ranks() && now_.item.token() < g_.max_tokens &&
      now_.item.place < static_cast<std::uint32_t>(g_.max_tokens * g_.partials_per_token());
  now_.offset =
      good ? expert * p_.expert_out.expert_stride +
                 (static_cast<std::uint32_t>(row) - expert * slots) * p_.expert_out.slot_stride
           : 0;
  now_.here = __ballot_sync(kAllLanes, good);
}

// Every row gets a value, so that none has to be kept from the unit before.
XD_LL_PUSHER(void)::load_rows() {
  unsigned left = now_.here;
#pragma unroll
  for (int q = 0; q < LlSum<T>::kAhead; ++q, left &= left - 1) {
    now_.row[q] = make_uint4(0, 0, 0, 0);
    if (left == 0) continue;
    const std::byte* at = row_at(__ffs(static_cast<int>(left)) - 1);
    if (now_.vector < vectors_) now_.row[q] = ptx::ld_streaming(at);
  }
}

// The weight of this lane's choice, of this call. All lanes. A wait that becomes long is a call,
// behind which the rows are loaded again: over a call they would have to lie in memory, and so a
// load ahead would be waited for where it is made.
XD_LL_PUSHER(void)::take_weight(std::uint64_t epoch) {
  const bool mine = (now_.here >> lane_id() & 1) != 0 && lane_id() < p_.weight_cols;
  if (now_.item.source() == g_.rank()) {
    if (mine) now_.weight = p_.topk_weights[now_.item.token() * p_.weight_cols + lane_id()];
    return;
  }
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

// The sum of the unit's rows by ascending k, rounded once. All lanes.
XD_LL_PUSHER(uint4)::add_up(std::uint64_t epoch) {
  if (now_.here == 0) return make_uint4(0, 0, 0, 0);
  const bool weighted = p_.topk_weights != nullptr || parts_.weighted();
  if (!weighted && (now_.here & (now_.here - 1)) == 0) return quiet<T>(now_.row[0]);
  if (p_.topk_weights != nullptr) take_weight(epoch);
  const float weight = now_.weight;
  float sum[T::kPerVector];
#pragma unroll
  for (int n = 0; n < T::kPerVector; ++n) sum[n] = -0.0f;
  unsigned left = now_.here;
#pragma unroll
  for (int q = 0; q < LlSum<T>::kAhead; ++q, left &= left - 1) {
    if (left == 0) continue;
    add_term<T>(sum, now_.row[q],
                __shfl_sync(kAllLanes, weight, __ffs(static_cast<int>(left)) - 1));
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
    if (now_.vector < vectors_) x = ptx::ld_streaming(first);
    if (two && now_.vector < vectors_) y = ptx::ld_streaming(second);
    add_term<T>(sum, x, __shfl_sync(kAllLanes, weight, a));
    const float other = __shfl_sync(kAllLanes, weight, b);
    if (two) add_term<T>(sum, y, other);
  }
  return pack<T>(sum);
}

XD_LL_PUSHER(void)::push_all(std::uint64_t epoch, uint4& sum) {
  const std::uint32_t step = 4 * gridDim.x;
#pragma unroll 1
  for (;;) {
    sum = add_up(epoch);
    if (is_over()) return;
    const LlItem item = now_.item;
    const std::uint32_t vector = now_.vector;
    const bool sends = now_.here != 0 && vector < vectors_ && !turn_.leaves_out(item.source());
    unit_ += step;
    load_next();
    if (!sends) continue;
    std::byte* to = turn_.shared().area[item.source()].base +
                    ll_partial_offset(g_, turn_.slot(epoch), item.place);
    send_pair(to + vector * 16, words_of(sum));
  }
}

#undef XD_LL_PUSHER

}  // namespace xd::ep::cuda
