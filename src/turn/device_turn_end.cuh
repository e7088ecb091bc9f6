// The end of a turn on the device: leave(), end() and what the last block does in them. It is part
// of turn/device_turn.cuh, which includes it.
#pragma once

#include "turn/device_turn.cuh"

namespace xd::turn {

#define XD_TURN_MEMBER(type)                                         \
  template <class Derived, class Family, class Params, class Shared> \
  __device__ inline type DeviceTurn<Derived, Family, Params, Shared>

// Counts the block; true on the last one. Blank blocks and those with a fatal error are counted a
// second time, in fields of their own, so that the last block knows of them. One thread calls it,
// behind a barrier of the block.
XD_TURN_MEMBER(bool)::count_block(std::uint32_t* counter) {
  constexpr std::uint32_t kBlank = 1u << 11, kFatal = 1u << 22;
  const std::uint32_t blank = verdict() == Verdict::blank ? kBlank : 0;
  const std::uint32_t fatal = verdict() == Verdict::fatal ? kFatal : 0;
  const std::uint32_t mine = 1 + blank + fatal;
  // Release and acquire: the last block sees all that any block has stored before. A block that is
  // alone has its barrier for that.
  const std::uint32_t all = gridDim.x > 1 ? ptx::add_acq_rel_gpu(counter, mine) + mine : mine;
  s_.some_blank = all % kFatal >= kBlank ? 1 : 0;
  s_.some_fatal = all >= kFatal ? 1 : 0;
  return all % kBlank == gridDim.x;
}

// The same for all threads of the block.
XD_TURN_MEMBER(bool)::is_last_block(std::uint32_t* counter) {
  __syncthreads();
  if (threadIdx.x == 0) s_.is_last = count_block(counter) ? 1 : 0;
  __syncthreads();
  return s_.is_last != 0;
}

XD_TURN_MEMBER(void)::raise_done() {
  if (met_fatal()) return;  // then some block may have skipped its work
#pragma unroll 1
  for (int i = thread(); i < ranks(); i += static_cast<int>(blockDim.x)) {
    const int peer = (rank() + 1 + i) % ranks();
    // Release: a rank that sees this epoch also sees all that was written there, and nothing is
    // read there any more.
    ptx::st_release_sys(done_at(peer, rank()), s_.epoch | (s_.some_blank != 0 ? kFoundMissing : 0));
  }
}

// The flags that the work raises, and then this rank's own: a rank that sees that one sees the
// others, whichever thread has raised them.
template <class Derived, class Family, class Params, class Shared>
template <class Work>
__device__ inline void DeviceTurn<Derived, Family, Params, Shared>::raise_all_done(Work& work) {
  work.before_done();
  if constexpr (!std::is_same_v<Work, NoWork>) __syncthreads();
  raise_done();
  work.after_done();
}

// All threads of every block call it. The threads that issued bulk stores have waited for them.
template <class Derived, class Family, class Params, class Shared>
template <class Work>
__device__ inline void DeviceTurn<Derived, Family, Params, Shared>::leave(Work& work) {
  if (!is_last_block(&p_.group.control->left)) return;
  raise_all_done(work);
}

// All threads of every block call it, after leave() and the work behind that.
template <class Derived, class Family, class Params, class Shared>
template <class Work>
__device__ inline void DeviceTurn<Derived, Family, Params, Shared>::end(const Work& work) {
  if (is_last_block(&p_.group.control->ended)) close(work);
}

template <class Derived, class Family, class Params, class Shared>
template <class Work>
__device__ inline void DeviceTurn<Derived, Family, Params, Shared>::leave_and_end(Work& work) {
  if (!is_last_block(&p_.group.control->left)) return;
  raise_all_done(work);
  close(work);
}

XD_TURN_MEMBER(void)::end_without_flags() {
  if (!is_last_block(&p_.group.control->ended)) return;
  make_ready();
  end_launch(any_failed(met_fatal()));
}

XD_TURN_MEMBER(void)::end_ahead() {
  if (!closes() || !count_block(&p_.group.control->ended) || met_fatal()) return;
  make_ready();
  // The launch's mark makes way for the number of blocks, some of which may have been through
  // written() already: the low half is not 0 before all have, whichever comes first.
  const std::uint64_t claimed_next = (std::uint64_t{1} << 32) - mark_of(p_.launch);
  ptx::red_add_relaxed_gpu(&p_.group.control->owner, claimed_next + gridDim.x);
}

XD_TURN_MEMBER(void)::written() {
  __syncthreads();
  if (thread() == 0) ptx::red_add_release_gpu(&p_.group.control->owner, ~std::uint64_t{0});
}

// The lowest rank that this rank's setback is about, as far as it knows that without the records.
XD_TURN_MEMBER(int)::lowest_concerned() const {
  if (s_.own.call.status != XD_SUCCESS) return rank();
  if (s_.status != XD_ERROR_MISMATCH) return self().rank_concerned();
  return s_.finder != ranks() ? s_.finder : -1;
}

// Makes the operation's setback the communicator's error: kernels behind it leave at once, and the
// host hears of it. The peers' kernels meet a setback of this operation themselves, and need not be
// told.
XD_TURN_MEMBER(void)::finish_comm() const {
  FatalError error =
      device::error_at(p_.group.comm, site(XD_PHASE_NONE), s_.status, lowest_concerned());
  error.met_by_all = 1;
  p_.group.report->fatal_launch = p_.launch;  // raise() releases it to the host
  device::raise(p_.group.comm, error, device::Spread::here);
}

XD_TURN_MEMBER(void)::write_report() {
  auto* to = p_.group.report;
  const std::uint32_t written = ptx::ld_relaxed_sys(&to->written);
  if (written != ptx::ld_acquire_sys(&to->taken)) return;
  to->status = s_.status;
  to->operation = p_.record.call.operation;
  to->epoch = s_.epoch;
  to->rank = lowest_concerned();
  self().report(to->findings);
  if (s_.status == XD_ERROR_MISMATCH) {
#pragma unroll 1
    for (int r = 0; r < ranks(); ++r) to->record[r] = read_record(r);
  }
  ptx::st_release_sys(&to->written, written + 1);
}

// Called by all threads of the launch's last block. All blocks have been counted, so it makes the
// control block ready while it waits.
template <class Derived, class Family, class Params, class Shared>
template <class Work>
__device__ inline void DeviceTurn<Derived, Family, Params, Shared>::close(const Work& work) {
  make_ready();
  // Work for other machines may have met an error behind the flags.
  const bool looks = !std::is_same_v<Work, NoWork>;
  end_launch(!wait_all_done(work, met_fatal() || (looks && device::failed(p_.group.comm))));
}

// One thread, which mostly is none of those that send and await flags, reports and moves the epoch
// on. After a fatal error the sequence stays owned: blocks of this launch, or of one that it
// overlaps, may have ended ahead, and still write.
XD_TURN_MEMBER(void)::end_launch(bool failed) {
  if (!closes() || failed) return;
  if (s_.finder != ranks() && s_.status == XD_SUCCESS) s_.status = XD_ERROR_MISMATCH;
  if (s_.status != XD_SUCCESS) close_with_setback();
  // Release, with the fence of make_ready(): the next launch finds the control block ready.
  ptx::st_relaxed_gpu(&p_.group.control->owner, s_.epoch << 32);
}

XD_TURN_MEMBER(void)::make_ready() const {
  if (!closes()) return;
  auto* control = p_.group.control;
  control->epoch = s_.epoch;
  control->barrier = control->left = control->ended = 0;
  self().reset();
  __threadfence();
}

XD_TURN_MEMBER(void)::close_with_setback() {
  auto* control = p_.group.control;
  // The host already knows of a failure that its own checks found.
  if (p_.record.call.status == XD_SUCCESS) write_report();
  ptx::st_release_sys(&p_.group.report->errors, ++control->errors);
  if (p_.group.fatal_errors) finish_comm();
  __threadfence();
}

}  // namespace xd::turn

#undef XD_TURN_MEMBER
