// Kernels wait for peers through wait_until() alone, which ends with the timeout, with a fatal
// error anywhere, or when a rank that the operation needs is lost. See comm/device/comm.h for the
// words used here.
#pragma once

#include "comm/device/comm.h"
#include "cuda/ptx.cuh"

namespace xd::device {

// A wait of a kernel: its place, for error texts, and how many timeouts it may take.
struct KernelWait {
  int phase;  // an xd_phase
  int group;
  int operation;
  std::uint64_t epoch;
  int timeouts = 1;  // more where the kernel waits for another wait
  // Whether the peer's leaving ends the wait, as its death does. Not where it may come on another
  // way than the peer's last word, and before it.
  bool leaving_ends = true;
};

// The longest time for which kernels may miss news from their host. The host's memory is slow to
// read, over PCIe, so only one of all threads that wait looks there, and leaves its findings on the
// device.
inline constexpr std::uint64_t kHostWordNs = 50000;

__device__ inline bool failed(const DeviceComm& comm) {
  return ptx::ld_relaxed_sys(&comm.own_board->first) != 0;
}

// Writes this rank's record of `board`, then claims the board. True if this error is its first.
__device__ inline bool post(DeviceBoard* board, int rank, const FatalError& error) {
  board->record[rank] = error;
  // Release: a thread that sees the claim also sees the record.
  return ptx::cas_acq_rel_sys(&board->first, 0, static_cast<std::uint32_t>(rank) + 1) == 0;
}

// Takes the board's error to the host, once.
__device__ __noinline__ inline void tell_host(const DeviceComm& comm) {
  DeviceBoard* own = comm.own_board;
  const std::uint32_t first = ptx::ld_acquire_sys(&own->first);
  if (first == 0 || first > static_cast<std::uint32_t>(comm.num_ranks)) return;
  if (ptx::cas_acq_rel_sys(&own->told_host, 0, 1) != 0) return;
  comm.host->error = own->record[first - 1];
  ptx::st_release_sys(&comm.host->raised, 1);
}

using xd::Spread;

// Records a fatal error of this rank's kernels. Only the first one is recorded: a record has one
// writer, which writes it once.
__device__ __noinline__ inline void raise(const DeviceComm& comm, const FatalError& error,
                                          Spread spread) {
  DeviceBoard* own = comm.own_board;
  if (ptx::cas_acq_rel_sys(&own->claimed, 0, 1) != 0) return;
  post(own, comm.rank, error);
  tell_host(comm);
  if (spread == Spread::here) return;
  for (int i = 1; i < comm.num_ranks; ++i) {
    post(comm.boards[(comm.rank + i) % comm.num_ranks], comm.rank, error);
  }
}

// Makes the host's error a reason for kernels to leave. The host has recorded it already.
__device__ inline void take_from_host(const DeviceComm& comm, const KernelWait& site) {
  FatalError error;
  error.status = XD_ERROR_ABORTED;
  error.rank = error.peer = comm.rank;
  error.group = site.group;
  error.operation = site.operation;
  raise(comm, error, Spread::here);
}

__device__ inline FatalError error_at(const DeviceComm& comm, const KernelWait& site, int status,
                                      int peer) {
  FatalError error;
  error.status = status;
  error.phase = site.phase;
  error.rank = comm.rank;
  error.peer = peer;
  error.group = site.group;
  error.operation = site.operation;
  const std::int64_t waited_ms = std::int64_t{site.timeouts} * comm.timeout_ms;
  error.timeout_ms = static_cast<int>(waited_ms < INT32_MAX ? waited_ms : INT32_MAX);
  error.expected_epoch = site.epoch;
  return error;
}

// Asked by waits that have become long. True if the host wants this rank's kernels to leave.
__device__ inline bool host_calls(const DeviceComm& comm, std::uint64_t now) {
  DeviceBoard* own = comm.own_board;
  const std::uint64_t looked = ptx::ld_relaxed_sys(&own->looked_ns);
  if (now < looked + kHostWordNs || ptx::cas_acquire_gpu(&own->looked_ns, looked, now) != looked) {
    return false;
  }
  if (ptx::ld_acquire_sys(&comm.host->some_lost) != 0) {
    const RankBits& lost = comm.host->lost;
    ptx::st_release_sys(&own->lost.word[0], ptx::ld_acquire_sys(&lost.word[0]));
    ptx::st_release_sys(&own->lost.word[1], ptx::ld_acquire_sys(&lost.word[1]));
    ptx::st_release_sys(&own->some_lost, 1);
  }
  return ptx::ld_acquire_sys(&comm.host->finished) != 0;
}

// `ranks`: of HostWords, or DeviceBoard::lost.
__device__ inline bool holds(const RankBits& ranks, int rank) {
  return (ptx::ld_acquire_sys(&ranks.word[rank / 64]) >> (rank % 64) & 1) != 0;
}

// True if the peer takes part in nothing any more. Many threads may ask, so it does not look at the
// host's memory.
__device__ inline bool is_lost(const DeviceComm& comm, int peer) {
  return peer >= 0 && holds(comm.own_board->lost, peer);
}

// The rank that a wait for `peer` would wait in vain for, in an operation that needs all ranks: one
// whose process has ended, or the peer, if it has left and that counts; else -1.
__device__ inline int missing(const DeviceComm& comm, int peer, bool leaving_ends) {
  if (peer < 0 || ptx::ld_acquire_sys(&comm.own_board->some_lost) == 0) return -1;
  const std::uint32_t dead = ptx::ld_acquire_sys(&comm.host->dead);
  if (dead != 0) return static_cast<int>(dead) - 1;
  return leaving_ends && holds(comm.host->lost, peer) ? peer : -1;
}

// The finding of a wait that has become long and looks around.
struct Around {
  enum : int { nothing, host_calls, peer_lost, late } what;
  int rank;  // the lost one
};

// `host_calls` has been raised when it returns; the others are for give_up().
__device__ __noinline__ inline Around look_around(const DeviceComm& comm, const KernelWait& site,
                                                  int peer, std::uint64_t now,
                                                  std::uint64_t deadline) {
  if (host_calls(comm, now)) {
    take_from_host(comm, site);
    return {Around::host_calls, peer};
  }
  const int lost = missing(comm, peer, site.leaving_ends);
  if (lost >= 0) return {Around::peer_lost, lost};
  return {now >= deadline ? Around::late : Around::nothing, peer};
}

__device__ __noinline__ inline void give_up(const DeviceComm& comm, const KernelWait& site,
                                            const Around& around, std::uint64_t seen_epoch) {
  if (around.what == Around::peer_lost) {
    FatalError error = error_at(comm, site, XD_ERROR_PEER_LOST, around.rank);
    error.left = holds(comm.host->left, around.rank) ? 1 : 0;
    raise(comm, error, Spread::here);
  } else {
    FatalError error = error_at(comm, site, XD_ERROR_TIMEOUT, around.rank);
    error.seen_epoch = seen_epoch;
    raise(comm, error, Spread::everywhere);
  }
}

// Returns true when ready() holds: a look at flags of `peer` with acquire loads. `seen()` gives the
// epoch last seen of it. False = the communicator has failed. Called by single threads. A kernel
// has many copies of this function, and runs through its own code only once: what is rare is
// called.
template <class Ready, class Seen>
__device__ bool wait_until(const DeviceComm& comm, const KernelWait& site, int peer, Ready ready,
                           Seen seen) {
  if (ready()) return true;
  const std::uint64_t start = ptx::global_timer_ns();
  const std::uint64_t deadline =
      start + static_cast<std::uint64_t>(comm.timeout_ms) * 1000000 * site.timeouts;
  std::uint64_t next_look = start + kHostWordNs / 4;
  for (;;) {
    // Both looks are made at once, since each takes a round trip to the memory.
    const bool over = failed(comm);
    if (ready()) return true;
    if (over) break;
    const std::uint64_t now = ptx::global_timer_ns();
    if (now < next_look) continue;
    next_look = now + kHostWordNs / 4;
    const Around around = look_around(comm, site, peer, now, deadline);
    if (around.what == Around::nothing) continue;
    if (around.what == Around::host_calls) break;
    // A rank's end comes after its last flag, so the flags are looked at once more.
    if (ready()) return true;
    give_up(comm, site, around, seen());
    break;
  }
  tell_host(comm);
  return false;
}

}  // namespace xd::device
