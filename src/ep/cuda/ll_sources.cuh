// The sources of an operation that is being received: one warp of each block waits for their
// records.
//
// In groups that mask, all blocks of a dispatch must agree on the sources that it goes without,
// since places follow from the counts of all. The launch's last block decides, and nobody else
// gives up:
//
//   last block                                   other blocks
//   its time is over, or a source is lost:       wait without an end of their own, and look at
//   closing = operation                          `closing` now and then
//   waits for a while
//   has a source's record and all of its ids     `closing` is this operation: wait for decided[] of
//   come? decided[source] = yes or no            every source
//
// A block has looked at `closing` when it began. If it was not set, and all words have come within
// half of that while, the last block's look comes later by the other half, and finds what this
// block has found; so the block looks at nothing more. A block that has begun later, or waited for
// longer, looks at `closing` when its words have come.
//
// A rank that has been masked since the operation was sent is not waited for: the last block looks
// at its words first of all, and publishes decided[source]; the other blocks wait for that.
#pragma once

#include "ep/cuda/ll_dispatch_list.cuh"

namespace xd::ep::cuda {

// The while: a part of the group's timeout, but no longer than it takes any store to be seen by all
// blocks, many times over.
inline constexpr int kClosingPart = 16;
inline constexpr std::uint64_t kMostClosingNs = 4000000;

template <bool kMany>
class LlSources {
 public:
  __device__ LlSources(const LlDispatchParams& params, LlDispatchTurn& turn, LlListShared& list,
                       std::uint64_t epoch)
      : p_(params),
        g_(params.group),
        turn_(turn),
        s_(turn.shared()),
        list_(list),
        epoch_(epoch),
        began_(params.group.masks || params.wait_ns != nullptr ? ptx::global_timer_ns() : 0),
        closing_(params.group.masks ? ptx::ld_relaxed_sys(&params.group.control->closing) : 0) {}

  // All lanes of the warp. When it returns, every record has come or its source is gone, and so are
  // the ids in groups that mask.
  __device__ void wait();
  // Behind it: the bad ids of all sources. The first receiver block.
  __device__ void count_bad_ids();

 private:
  __device__ std::uint64_t timeout_ns() const {
    return static_cast<std::uint64_t>(g_.comm.timeout_ms) * 1000000;
  }
  __device__ std::uint64_t while_ns() const {
    return min(timeout_ns() / kClosingPart, kMostClosingNs);
  }
  __device__ bool take_together();
  __device__ void wait_record(int source);
  __device__ bool look(int source, turn::LongWait& wait);
  __device__ void add_bad_ids(int source);
  __device__ void wait_ids();
  __device__ void decide_hurried();
  __device__ void close();
  __device__ void decide(int source);
  __device__ void follow(const RankBits& sources);
  __device__ bool has_all(int source) const;
  __device__ bool is_closing() const { return ptx::ld_relaxed_sys(&g_.control->closing) == epoch_; }

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlDispatchTurn& turn_;
  LlShared& s_;
  LlListShared& list_;
  const std::uint64_t epoch_;
  const std::uint64_t began_;    // where the time is asked for
  const std::uint64_t closing_;  // LlControl::closing when this block began
};

#define XD_LL_SOURCES(type) \
  template <bool kMany>     \
  __device__ inline type LlSources<kMany>

XD_LL_SOURCES(void)::wait() {
  turn_.clear_sources();
  if (g_.masks && !s_.hurried.empty()) decide_hurried();
  // The time for which each source is waited for is asked for one by one.
  if (g_.masks || p_.wait_ns != nullptr || !take_together()) {
#pragma unroll 1
    for (int r = lane_id(); r < g_.ranks(); r += 32) {
      if (s_.gone[r] == 0) wait_record(r);
    }
  }
  __syncwarp();
  if (g_.masks) wait_ids();
}

// Looks for a while at the records of all sources, four at a time. False: some have not come; the
// others are taken again.
XD_LL_SOURCES(bool)::take_together() {
  constexpr int kSources = 32 / LlLane::kWords;
  const int word_at = lane_id() % LlLane::kWords;
  const std::uint64_t factor = turn::seal_factor(word_at);
#pragma unroll 1
  for (int first = 0; first < g_.ranks(); first += kSources) {
    const int source = first + lane_id() / LlLane::kWords;
    const bool is_one = source < g_.ranks();
    const std::uint64_t* at = turn_.lane().word_of(is_one ? source : 0, epoch_, word_at);
    std::uint64_t word = 0;
    bool come = false;
#pragma unroll 1
    for (int i = 0; i < turn::kPollsBetweenLooks && !come; ++i) {
      word = ptx::ld_relaxed_sys(at);
      std::uint64_t number = word * factor;
#pragma unroll
      for (int step = LlLane::kWords / 2; step > 0; step /= 2) {
        number += __shfl_xor_sync(kAllLanes, number, step);
      }
      come = __all_sync(kAllLanes, number == epoch_) != 0;
    }
    if (!come) return false;
    if (is_one && word_at < turn::kRecordWords) {
      reinterpret_cast<std::uint64_t*>(&s_.record[source])[word_at] = word;
    }
  }
  return true;
}

XD_LL_SOURCES(void)::count_bad_ids() {
#pragma unroll 1
  for (int r = lane_id(); r < g_.ranks(); r += 32) {
    if (s_.gone[r] == 0 && s_.record[r].call.status == XD_SUCCESS) add_bad_ids(r);
  }
  __syncwarp();
}

XD_LL_SOURCES(void)::wait_record(int source) {
  turn::LongWait wait;
  if (turn_.take_record(source, epoch_, [&] { return look(source, wait); })) {
    if (static_cast<int>(blockIdx.x) == p_.senders) turn_.add_wait(source, began_);
  }
}

// One look of a long wait for a record; false ends it.
XD_LL_SOURCES(bool)::look(int source, turn::LongWait& wait) {
  if (!g_.masks) return turn_.goes_on(XD_PHASE_ENTRY, epoch_, source, wait);
  if (*static_cast<volatile int*>(&s_.failed) != 0) return false;
  if (wait.deadline == 0) wait.deadline = began_ + timeout_ns();
  const turn::Waited waited =
      turn::look_around(g_.comm, turn_.site(XD_PHASE_ENTRY, epoch_), source, wait);
  if (waited == turn::Waited::failed) {
    *static_cast<volatile int*>(&s_.failed) = 1;
    return false;
  }
  // What comes after the time is over is looked at once more, by close() or follow().
  return turn_.is_last_block() ? waited == turn::Waited::goes_on : !is_closing();
}

XD_LL_SOURCES(void)::add_bad_ids(int source) {
  const std::uint64_t cell = turn_.slot(epoch_) * g_.ranks() + source;
  const auto* at = reinterpret_cast<const std::uint64_t*>(g_.own_area + g_.map.bad_ids) + cell;
  std::uint64_t word = 0;
  turn::LongWait wait;
  const bool here = turn::poll_until(
      [&] {
        word = ptx::ld_relaxed_sys(at);
        return count_is_of(word, epoch_);
      },
      [&] { return turn_.goes_on(XD_PHASE_ENTRY, epoch_, source, wait); });
  if (!here || count_of(word) == 0) return;
  atomicAdd(&s_.bad_ids, count_of(word));
  atomicMin(&s_.bad_id_rank, source);
}

// ---- Groups that mask --------------------------------------------------------------------------

// Returns when no mover waits for ids, and all blocks agree on the sources.
XD_LL_SOURCES(void)::wait_ids() {
  const volatile int* pending = &list_.pending;
  turn::LongWait wait;
  bool in_time = true;
#pragma unroll 1
  for (int r = lane_id(); r < g_.ranks(); r += 32) {
    in_time &= s_.gone[r] != 0 || s_.record[r].call.operation != 0;
  }
  in_time = __all_sync(kAllLanes, in_time) != 0;
  // One lane looks for all, so that they stay together.
  for (bool waits = in_time; waits;) {
    bool on = true, left = true;
    if (lane_id() == 0) {
      left = *pending != 0;
      if (left) on = look(g_.rank(), wait);
    }
    in_time = __shfl_sync(kAllLanes, on, 0);
    waits = in_time && __shfl_sync(kAllLanes, left, 0);
  }
  if (__any_sync(kAllLanes, *static_cast<volatile int*>(&s_.failed) != 0)) return;
  if (in_time && turn_.is_last_block()) return;
  const bool quick = closing_ != epoch_ && ptx::global_timer_ns() - began_ < while_ns() / 2;
  if (in_time && (__all_sync(kAllLanes, quick) != 0 || __all_sync(kAllLanes, !is_closing()) != 0)) {
    return;
  }
  if (turn_.is_last_block()) {
    close();
  } else {
    follow(s_.company);
  }
  while (*pending != 0) ptx::pause();
}

// All lanes. What a masked rank sends from now on may come or not, so one look decides.
XD_LL_SOURCES(void)::decide_hurried() {
  if (!turn_.is_last_block()) return follow(s_.hurried);
#pragma unroll 1
  for (int r = 0; r < g_.ranks(); ++r) {
    if (s_.hurried.has(r)) decide(r);
  }
  __syncwarp();
}

// The last block decides.
XD_LL_SOURCES(void)::close() {
  if (lane_id() == 0) ptx::st_relaxed_sys(&g_.control->closing, epoch_);
  const std::uint64_t end = ptx::global_timer_ns() + while_ns();
  while (ptx::global_timer_ns() < end) ptx::pause();
  __syncwarp();
#pragma unroll 1
  for (int r = 0; r < g_.ranks(); ++r) {
    if (turn_.is_source(r)) decide(r);
  }
  __syncwarp();
}

// All lanes: about one source. Also about one that is gone already, for blocks that follow.
XD_LL_SOURCES(void)::decide(int source) {
  const bool here = s_.gone[source] == 0 && has_all(source);
  if (lane_id() != 0) return;
  if (!here) turn_.leave_out(source);
  // Release: blocks that follow read the record that this one has seen.
  ptx::st_release_sys(&g_.control->decided[source], 2 * epoch_ + (here ? 0 : 1));
}

// The other blocks learn of it. The last block decides soon: this wait meets its bound only where
// the blocks of a launch have seen different masks, and then the communicator ends.
XD_LL_SOURCES(void)::follow(const RankBits& sources) {
#pragma unroll 1
  for (int r = lane_id(); r < g_.ranks(); r += 32) {
    if (!sources.has(r)) continue;
    std::uint64_t said = 0;
    turn::LongWait wait;
    const bool decided = turn::poll_until(
        [&] {
          said = ptx::ld_acquire_sys(&g_.control->decided[r]);
          return said >> 1 == epoch_;
        },
        [&] {
          turn_.goes_on_or_fails(XD_PHASE_ENTRY, epoch_, g_.rank(), wait);
          return *static_cast<volatile int*>(&s_.failed) == 0;
        });
    if (!decided) continue;
    if ((said & 1) != 0) {
      turn_.leave_out(r);
    } else if (s_.record[r].call.operation == 0) {
      turn_.lane().read_record(r, epoch_, s_.record[r]);
    }
  }
  __syncwarp();
}

// All lanes. Looks at the record and at all ids of a source.
XD_LL_SOURCES(bool)::has_all(int source) const {
  LlRecord record;
  bool here = turn_.lane().read_record(source, epoch_, record);
  if (here && lane_id() == 0) s_.record[source] = record;
  const std::uint64_t words = static_cast<std::uint64_t>(g_.max_tokens) * g_.ids.words;
  const std::uint64_t cell = turn_.slot(epoch_) * g_.ranks() + source;
  const auto* ids = reinterpret_cast<const std::uint64_t*>(g_.own_area + g_.map.ids) + cell * words;
#pragma unroll 1
  for (std::uint64_t i = lane_id(); i < words; i += 32) {
    here &= ptx::ld_relaxed_sys(ids + i) >> 48 == ll_tag(epoch_);
  }
  return __all_sync(kAllLanes, here) != 0;
}

#undef XD_LL_SOURCES

}  // namespace xd::ep::cuda
