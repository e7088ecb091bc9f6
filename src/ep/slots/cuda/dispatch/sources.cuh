// The sources of a dispatch that is being received: one warp of each block waits for their records.
//
// In groups that mask, all blocks must agree on the sources that the dispatch goes without, since
// places follow from the counts of all. There only the last block waits for records, and decides:
// who is here has sent its record and all of its ids. The other blocks follow
// (slots/cuda/agree.cuh); their movers wait for the ids of those that are here, which the last
// block has seen.
//
// A rank that has been masked since the operation was sent is not waited for: what has come by the
// first look counts.
#pragma once

#include "ep/slots/cuda/dispatch/list.cuh"

namespace xd::ep::cuda {

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
        began_(params.group.masks || params.wait_ns != nullptr ? ptx::global_timer_ns() : 0) {}

  // All lanes of the warp. When it returns, every record has come or its source is gone.
  __device__ void wait();
  // Behind it: the bad ids of all sources. The first receiver block.
  __device__ void count_bad_ids();

 private:
  __device__ void wait_record(int source);
  __device__ bool look(int source, turn::LongWait& wait) const;
  __device__ void add_bad_ids(int source);
  __device__ bool ids_come() const;
  __device__ void leave_out_unless_here(int source) const;

  const LlDispatchParams& p_;
  const LlDevice& g_;
  LlDispatchTurn& turn_;
  LlShared& s_;
  LlListShared& list_;
  const std::uint64_t epoch_;
  const std::uint64_t began_;  // where the time is asked for
};

#define XD_LL_SOURCES(type) \
  template <bool kMany>     \
  __device__ inline type LlSources<kMany>

XD_LL_SOURCES(void)::wait() {
  if (turn_.take_together(epoch_)) return;
#pragma unroll 1
  for (int r = 0; g_.masks && r < g_.ranks(); ++r) {
    if (s_.hurried.has(r)) leave_out_unless_here(r);
  }
#pragma unroll 1
  for (int r = lane_id(); r < g_.ranks(); r += 32) {
    if (s_.gone[r] == 0) wait_record(r);
  }
  __syncwarp();
  if (!g_.masks || ids_come()) return;
#pragma unroll 1
  for (int r = 0; r < g_.ranks(); ++r) {
    if (s_.gone[r] == 0) leave_out_unless_here(r);
  }
}

XD_LL_SOURCES(void)::count_bad_ids() {
#pragma unroll 1
  for (int r = lane_id(); r < g_.ranks(); r += 32) {
    if (s_.gone[r] == 0) add_bad_ids(r);
  }
  __syncwarp();
}

XD_LL_SOURCES(void)::wait_record(int source) {
  turn::LongWait wait;
  const bool here = turn_.take_record(source, epoch_, [&] { return look(source, wait); });
  const bool times = g_.masks ? turn_.is_last_block() : static_cast<int>(blockIdx.x) == p_.senders;
  if (here && times) turn_.add_wait(source, began_);
  // Nobody waits for its ids then.
  if (!here && g_.masks) turn_.leave_out(source);
}

// One look of a long wait; false ends it. Where ranks may be left out, all waits of an operation
// have one timeout.
XD_LL_SOURCES(bool)::look(int source, turn::LongWait& wait) const {
  if (!g_.masks) return turn_.goes_on(XD_PHASE_ENTRY, epoch_, source, wait);
  if (*static_cast<volatile int*>(&s_.failed) != 0) return false;
  if (wait.deadline == 0) {
    wait.deadline = began_ + static_cast<std::uint64_t>(g_.comm.timeout_ms) * 1000000;
  }
  const turn::Waited waited =
      turn::look_around(g_.comm, turn_.site(XD_PHASE_ENTRY, epoch_), source, wait);
  if (waited == turn::Waited::failed) *static_cast<volatile int*>(&s_.failed) = 1;
  return waited == turn::Waited::goes_on;
}

XD_LL_SOURCES(void)::add_bad_ids(int source) {
  const std::uint64_t cell = turn_.stage(epoch_) * g_.ranks() + source;
  const auto* at = reinterpret_cast<const std::uint64_t*>(g_.own_area + g_.map.bad_ids) + cell;
  std::uint64_t word = 0;
  turn::LongWait wait;
  // Where ranks may be left out, that has been decided: a count that does not come is no loss.
  const bool here = turn::poll_until(
      [&] {
        word = ptx::ld_relaxed_sys(at);
        return count_is_of(word, epoch_);
      },
      [&] { return look(source, wait); });
  if (!here || count_of(word) == 0) return;
  atomicAdd(&s_.bad_ids, count_of(word));
  atomicMin(&s_.bad_id_rank, source);
}

// ---- The last block of groups that mask --------------------------------------------------------

// All lanes. False: the movers of this block still wait for ids when the time is over.
XD_LL_SOURCES(bool)::ids_come() const {
  const volatile int* pending = &list_.pending;
  turn::LongWait wait;
  // One lane looks for all, so that they stay together.
  bool come = true;
  if (lane_id() == 0) {
    come = turn::poll_until([&] { return *pending == 0; }, [&] { return look(g_.rank(), wait); });
  }
  return __shfl_sync(kAllLanes, come, 0);
}

// All lanes: looks at the record and at all ids of a source, once.
XD_LL_SOURCES(void)::leave_out_unless_here(int source) const {
  LlRecord record;
  bool here = turn_.pipeline().read_record(source, epoch_, record);
  if (here && lane_id() == 0) s_.record[source] = record;
  const std::uint64_t words = static_cast<std::uint64_t>(g_.max_tokens) * g_.ids.words;
  const std::uint64_t cell = turn_.stage(epoch_) * g_.ranks() + source;
  const auto* ids = reinterpret_cast<const std::uint64_t*>(g_.own_area + g_.map.ids) + cell * words;
#pragma unroll 1
  for (std::uint64_t i = lane_id(); i < words; i += 32) {
    here &= ptx::ld_relaxed_sys(ids + i) >> 48 == ll_tag(epoch_);
  }
  here = __all_sync(kAllLanes, here) != 0;
  if (!here && lane_id() == 0) turn_.leave_out(source);
  __syncwarp();
}

#undef XD_LL_SOURCES

}  // namespace xd::ep::cuda
