// Words that an operation has left in its slot, since it was taken without being delivered: they
// are replaced by ones, and the slot is given back.
//
//   LlControl            written by       read by
//   left[lane][slot]     the last block   all blocks of later launches: the operation whose words
//                                         lie there, or 0
//   refilled[lane]       the last block   the other blocks of the launch that fills a slot and uses
//                                         it: its number
//
// A slot may be filled when all peers have said that they store nothing more there: their credits'
// `sent`. The last block of a launch that receives looks whether they have, when all else is over
// (ll_free_left), and gives the credit at once. Else the launch that uses the slot again waits for
// their word, fills it, and lets its other blocks go on then (ll_free_slot).
#pragma once

#include "ep/cuda/ll_agree.cuh"
#include "ep/cuda/ll_words.cuh"

namespace xd::ep::cuda {

// The operation that has left words in this lane's slot, if they lie there still, or 0. `sent`: how
// many operations have been sent.
__device__ inline std::uint64_t ll_left_in_slot(const LlDevice& g, int kind, std::uint64_t sent) {
  const std::uint64_t left =
      lane_id() < g.slots ? ptx::ld_relaxed_sys(&g.control->left[kind][lane_id()]) : 0;
  return left + static_cast<std::uint64_t>(g.slots) > sent ? left : 0;
}

// The lowest of the lanes' numbers that are not 0, less 1, but at most `taken`: so many operations'
// slots are free. All lanes.
__device__ inline std::uint64_t ll_freed_below(std::uint64_t left, std::uint64_t taken) {
  unsigned long long freed = left != 0 ? left - 1 : ~0ull;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    freed = min(freed, __shfl_xor_sync(kAllLanes, freed, step));
  }
  return min(freed, static_cast<unsigned long long>(taken));
}

// Fills the slot of an operation with ones. All lanes, behind the acquire of every peer's `sent`.
inline __device__ __noinline__ void ll_fill_slot(const LlDevice& g, int kind, std::uint64_t epoch) {
  const LlStaging staging = g.staging(kind, turn::lane_slot(epoch, g.slots));
#pragma unroll 1
  for (std::uint64_t i = static_cast<std::uint64_t>(lane_id()) * 16; i < staging.bytes; i += 512) {
    put_back_pair(staging.data + i);
  }
  __syncwarp();
}

// ---- In front of a launch that uses such a slot ------------------------------------------------

// All lanes of a warp of the last block: waits until nothing more is stored in the slot of the
// operation that the site names, and fills it.
inline __device__ void ll_refill(const LlDevice& g, LlShared& s, int kind,
                                 const device::KernelWait& site) {
  const LlLane lane = ll_lane_of(g, kind, g.areas);
  const std::uint64_t left = site.epoch;
  // The peers may wait for the same of this rank.
  lane.give_credit({left - 1, s.before.sent});
  turn::LongWait wait;  // one for all of a lane's ranks
#pragma unroll 1
  for (int r = lane_id(); r < g.ranks(); r += 32) {
    if (r == g.rank() || (g.masks && s.masked.has(r))) continue;
    wait.peer_is_lost = false;
    const bool good = turn::poll_until([&] { return lane.sent_by(r) >= left; },
                                       [&] { return ll_goes_on(g, s, site, r, wait); });
    if (!good && !g.masks) s.failed = 1;
  }
  ll_mask_lost(s);
  if (s.failed != 0) return;
  ll_fill_slot(g, kind, left);
  if (lane_id() == 0) ptx::st_release_sys(&g.control->refilled[kind], s.course.send_epoch);
}

// All lanes of the warp that begins the turn, where some operation has left its words in a slot.
// All blocks of a launch that uses that slot know that, and wait for the last one, which fills it.
inline __device__ __noinline__ void ll_free_slot(const LlDevice& g, LlShared& s, int kind,
                                                 device::KernelWait site) {
  const std::uint64_t left = ll_left_in_slot(g, kind, s.before.sent);
  const bool used = left != 0 && s.course.sends &&
                    left + static_cast<std::uint64_t>(g.slots) == s.course.send_epoch;
  const std::uint64_t freed = ll_freed_below(used ? 0 : left, s.before.taken);
  const unsigned refills = __ballot_sync(kAllLanes, used);
  if (refills != 0) {
    site.epoch = __shfl_sync(kAllLanes, left, __ffs(static_cast<int>(refills)) - 1);
    if (blockIdx.x == gridDim.x - 1) {
      ll_refill(g, s, kind, site);
    } else if (lane_id() == 0) {
      // Acquire, and then a barrier of the block: its warps find the ones, or what came after them.
      turn::LongWait wait;
      turn::poll_until(
          [&] { return ptx::ld_acquire_sys(&g.control->refilled[kind]) == s.course.send_epoch; },
          [&] { return ll_goes_on_for_block(g, s, site, wait); });
    }
  }
  if (lane_id() == 0) s.freed = freed;
  __syncwarp();
}

// ---- Behind a launch that receives -------------------------------------------------------------

// True if all peers store nothing more in the slot of `left`. `waits`: they are sure to say so, as
// each has begun a later operation, whose launch says it in front of all its waits. All lanes. The
// launch that uses the slot again waits for those that have not, and tells of them.
inline __device__ bool ll_all_have_sent(const LlDevice& g, const LlShared& s, int kind,
                                        const device::KernelWait& site, std::uint64_t left,
                                        bool waits) {
  const LlLane lane = ll_lane_of(g, kind, g.areas);
  RankBits absent{};
  if (g.masks) absent = s.masked | ~s.company | RankBits{s.lost[0], s.lost[1]};
  bool all = true;
  turn::LongWait wait;  // one for all of a lane's ranks
#pragma unroll 1
  for (int r = lane_id(); r < g.ranks(); r += 32) {
    if (r == g.rank() || absent.has(r)) continue;
    wait.peer_is_lost = false;
    all &= turn::poll_until(
        [&] { return lane.sent_by(r) >= left; },
        [&] { return waits && turn::look_around(g.comm, site, r, wait) == turn::Waited::goes_on; });
  }
  return __all_sync(kAllLanes, all) != 0;
}

// All lanes of one warp of the last block, when all of its block is over and the launch has
// received an operation: fills slots whose words were left, and gives the credit at once. The
// rank's next launch of the lane could come too late for a peer that waits for it, where between
// the two this rank waits for that peer in the other lane.
inline __device__ __noinline__ void ll_free_left(const LlDevice& g, LlShared& s, int kind,
                                                 const device::KernelWait& site) {
  const bool delivered = s.verdict == static_cast<int>(LlVerdict::go) && !s.course.leaves;
  // No block of this launch looks at what those before it have taken.
  std::uint64_t left = ll_left_in_slot(g, kind, s.before.sent + (s.course.sends ? 1 : 0));
  if (left > s.before.taken) left = 0;
#pragma unroll 1
  for (int slot = 0; slot < g.slots; ++slot) {
    const std::uint64_t epoch = __shfl_sync(kAllLanes, left, slot);
    if (epoch == 0 || !ll_all_have_sent(g, s, kind, site, epoch, delivered)) continue;
    ll_fill_slot(g, kind, epoch);
    if (lane_id() != slot) continue;
    g.control->left[kind][slot] = left = 0;
  }
  __syncwarp();
  const std::uint64_t freed = ll_freed_below(left, s.before.taken);
  if (freed == s.freed) return;
  ll_lane_of(g, kind, g.areas).give_credit({freed, s.before.sent});
}

// True if the launch has met left words of operations before it that it does not use the slot of.
__device__ inline bool ll_has_left(const LlShared& s) {
  return s.course.receives && !s.course.fatal && s.failed == 0 && s.freed != s.before.taken;
}

}  // namespace xd::ep::cuda
