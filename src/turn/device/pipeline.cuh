// Pipelines on the device: sequences of operations that are sent and taken in halves, and in which
// no rank waits at the end of an operation for its peers.
//
//   begin        every block, one warp: the numbers of the launch's operations, the credits of the
//                peers where the launch sends
//   send_record  one warp of the launch: what this rank's send half is, to every rank
//   wait_record  what a rank's send half is; receive halves judge
//   give_credit  one warp of the launch: tells the peers which stages are free here, and how far
//                this rank has sent
//   end          every block: its counts, as they are after this launch
//
// Operation n uses stage n mod `stages` of every rank's memory. A rank stores there only when all
// that have it as a reader have freed the stage of operation n - stages, which their credits say.
// Mostly it is free when the kernel of the receive half has ended; the rank's next kernel says so:
//
//   kernel with receive half n:    reads the stage, leaves it free    plain loads and stores
//   the kernel after it:           (stream order) fence.acq_rel.sys, then credit = n at every peer
//   a peer's send half n + stages:  ld.acquire.sys of the credit, barrier of the block, stores
//
// A kernel gives its credit before it waits for anything. There are so many stages that a send half
// waits only for what kernels say that have ended by then, whatever a rank does between two kernels
// of a pipeline: see docs/internals/low_latency.md.
//
// Each thread block counts for itself (PipelineCount), so nothing is atomic, and a launch needs no
// last block. A launch must be the only one that runs of its sequence and its pipeline; its caller
// orders them by streams. Nothing here needs a cooperative launch, but all blocks of a launch have
// to come onto the device without the end of another one.
#pragma once

#include <cstring>

#include "comm/device/wait.cuh"
#include "turn/device/pipeline.h"
#include "turn/device/seal.cuh"

namespace xd::turn {

// The stage of an operation, of 5, 7 or 9. A division by a number that is not known would be slow.
__device__ inline std::uint32_t pipeline_stage(std::uint64_t epoch, int stages) {
  constexpr std::uint32_t kLow = (1u << 24) - 1;  // 2^24 is 1 modulo 5, 7 and 9
  const auto sum = (static_cast<std::uint32_t>(epoch) & kLow) +
                   (static_cast<std::uint32_t>(epoch >> 24) & kLow) +
                   static_cast<std::uint32_t>(epoch >> 48);
  return stages == 5 ? sum % 5 : stages == 7 ? sum % 7 : sum % 9;
}

// The polls of a wait between two looks at the clock and at errors: some 100 microseconds.
inline constexpr int kPollsBetweenLooks = 256;

// Polls until ready() holds. After each `kPollsBetweenLooks` polls goes_on() decides; false: it has
// ended the wait. It is the twin of device::wait_until() for waits that are too many and too short
// for a look at the clock each time.
template <class Ready, class GoesOn>
__device__ bool poll_until(Ready ready, GoesOn goes_on) {
  do {
#pragma unroll 1
    for (int i = 0; i < kPollsBetweenLooks; ++i) {
      if (ready()) return true;
    }
  } while (goes_on());
  return false;
}

// The state of one long wait, from its first look on.
struct LongWait {
  std::uint64_t deadline = 0;
  bool peer_is_lost = false;
};

// Why a long wait ends.
enum class Waited : int {
  goes_on,
  failed,   // the communicator has
  too_long  // its time is over, or the peer takes part in nothing any more
};

// One look of a long wait. It raises nothing itself. It is no part of the polling code, whose
// registers it would take.
inline __device__ __noinline__ Waited look_around(const DeviceComm& comm,
                                                  const device::KernelWait& site, int peer,
                                                  LongWait& wait) {
  if (device::failed(comm)) {
    device::tell_host(comm);
    return Waited::failed;
  }
  const std::uint64_t now = ptx::global_timer_ns();
  if (wait.deadline == 0) {
    wait.deadline = now + static_cast<std::uint64_t>(comm.timeout_ms) * 1000000 * site.timeouts;
  }
  if (device::host_calls(comm, now)) {
    device::take_from_host(comm, site);
    device::tell_host(comm);
    return Waited::failed;
  }
  // A rank's end comes after its last words, so the polls that follow this look find them.
  if (wait.peer_is_lost) return Waited::too_long;
  wait.peer_is_lost = device::is_lost(comm, peer);
  return now >= wait.deadline ? Waited::too_long : Waited::goes_on;
}

// Makes the end of a wait a fatal error.
inline __device__ __noinline__ void raise_loss(const DeviceComm& comm,
                                               const device::KernelWait& site, int peer,
                                               const LongWait& wait) {
  const bool lost = wait.peer_is_lost;
  FatalError error =
      device::error_at(comm, site, lost ? XD_ERROR_PEER_LOST : XD_ERROR_TIMEOUT, peer);
  error.left = lost && device::holds(comm.host->left, peer) ? 1 : 0;
  device::raise(comm, error, lost ? device::Spread::here : device::Spread::everywhere);
  device::tell_host(comm);
}

// Functions of one pipeline. `Record` is the family's; `Group` has `comm`, `own_area` and `stages`.
template <class Record, class Group>
class DevicePipeline {
 public:
  static constexpr int kWords = kRecordWords + 1;

  __device__ DevicePipeline(const Group& group, const PipelineMap& map, PipelineCount* counts,
                            const HeapRange* areas)
      : g_(group), map_(map), counts_(counts), areas_(areas) {}

  // This block's counts. All lanes of a warp call it, and get both.
  __device__ PipelineEpochs epochs() const {
    const ulonglong2 n = ptx::ld_relaxed_sys_pair(&counts_[blockIdx.x]);
    return {n.x, n.y};
  }
  // Called by one thread. `most_blocks`: the largest launch that the pipeline ever has.
  __device__ void end(const PipelineEpochs& now, int most_blocks) const {
    for (int b = static_cast<int>(blockIdx.x); b < most_blocks; b += static_cast<int>(gridDim.x)) {
      ptx::st_streaming_pair(&counts_[b], make_ulonglong2(now.sent, now.taken));
    }
  }

  // The words that a rank has told this one.
  __device__ std::uint64_t freed_by(int rank) const {
    return ptx::ld_acquire_sys(&credit_at(g_.own_area, rank)->freed);
  }
  __device__ std::uint64_t sent_by(int rank) const {
    return ptx::ld_acquire_sys(&credit_at(g_.own_area, rank)->sent);
  }
  // All lanes of a warp. Release, with the fence: of all that earlier kernels have read, freed and
  // sent.
  __device__ void give_credit(const PipelineCredit& credit) const {
    ptx::fence_acq_rel_sys();
    for (int r = pipeline(); r < g_.comm.num_ranks; r += 32) {
      if (r == g_.comm.rank) continue;
      ptx::st_relaxed_sys_pair(
          reinterpret_cast<std::byte*>(credit_at(areas_[r].base, g_.comm.rank)),
          make_ulonglong2(credit.freed, credit.sent));
    }
  }

  // All lanes of a warp.
  __device__ void send_record(const Record& record, std::uint64_t epoch) const;

  // The record of `source` in operation `epoch`, if it is there: true. Any thread.
  __device__ bool read_record(int source, std::uint64_t epoch, Record& record) const {
    std::uint64_t number = 0;
    return read_words(source, epoch, record, number) && number == epoch;
  }
  // Also gives the number of the record that is there, if one is.
  __device__ bool read_words(int source, std::uint64_t epoch, Record& record,
                             std::uint64_t& number) const;

  // A word of that record, or of its seal. It is the record of the operation if the sum of its
  // words, each times its seal_factor(), is the operation's number.
  __device__ const std::uint64_t* word_of(int source, std::uint64_t epoch, int word) const {
    return reinterpret_cast<const std::uint64_t*>(entry_at(g_.own_area, source, epoch)) + word;
  }

  // The ranks whose records a warp looks at together: eight lanes have a word of one each.
  static constexpr int kTogether = 32 / kWords;
  __device__ static int word_of_pipeline() { return pipeline() % kWords; }
  // All lanes, which look for a while at the records of the ranks from `first` on: true if all of
  // them have come that waits(rank) names. `word` is this lane's word of the record of this lane's
  // rank, `factor` the word's seal_factor().
  template <class Waits>
  __device__ bool look_together(int first, std::uint64_t epoch, std::uint64_t factor,
                                std::uint64_t& word, Waits waits) const;

  // Stores such a word of this rank's record at rank `to`. The seal is the operation's number plus
  // the hash of the other words.
  __device__ void send_word(int to, std::uint64_t epoch, int word, std::uint64_t value) const {
    std::byte* const at = entry_at(areas_[to].base, g_.comm.rank, epoch);
    ptx::st_relaxed_sys(reinterpret_cast<std::uint64_t*>(at) + word, value);
  }

  __device__ std::uint32_t stage(std::uint64_t epoch) const {
    return pipeline_stage(epoch, g_.stages);
  }

 private:
  static_assert(sizeof(Record) == kRecordWords * sizeof(std::uint64_t));
  __device__ static int pipeline() { return static_cast<int>(threadIdx.x % 32); }
  __device__ PipelineCredit* credit_at(std::byte* area, int source) const {
    return reinterpret_cast<PipelineCredit*>(area + map_.credit) + source;
  }
  __device__ std::byte* entry_at(std::byte* area, int source, std::uint64_t epoch) const {
    const std::uint64_t cell = stage(epoch) * static_cast<std::uint64_t>(g_.comm.num_ranks) +
                               static_cast<std::uint64_t>(source);
    return area + map_.entry + cell * kWords * sizeof(std::uint64_t);
  }

  const Group& g_;
  const PipelineMap map_;
  PipelineCount* const counts_;
  const HeapRange* const areas_;
};

template <class Record, class Group>
__device__ inline void DevicePipeline<Record, Group>::send_record(const Record& record,
                                                                  std::uint64_t epoch) const {
  std::uint64_t words[kWords];
  memcpy(words, &record, sizeof(record));
  words[kRecordWords] = epoch + hash_of(words);
  for (int i = pipeline(); i < g_.comm.num_ranks; i += 32) {
    const int to = (g_.comm.rank + 1 + i) % g_.comm.num_ranks;
    std::byte* at = entry_at(areas_[to].base, g_.comm.rank, epoch);
#pragma unroll
    for (int w = 0; w < kWords; w += 2) {
      ptx::st_relaxed_sys_pair(at + w * 8, make_ulonglong2(words[w], words[w + 1]));
    }
  }
}

template <class Record, class Group>
template <class Waits>
__device__ inline bool DevicePipeline<Record, Group>::look_together(int first, std::uint64_t epoch,
                                                                    std::uint64_t factor,
                                                                    std::uint64_t& word,
                                                                    Waits waits) const {
  const int source = first + pipeline() / kWords;
  const bool mine = source < g_.comm.num_ranks && waits(source);
  const std::uint64_t* at = word_of(mine ? source : 0, epoch, word_of_pipeline());
#pragma unroll 1
  for (int i = 0; i < kPollsBetweenLooks; ++i) {
    word = ptx::ld_relaxed_sys(at);
    std::uint64_t number = word * factor;
#pragma unroll
    for (int step = kWords / 2; step > 0; step /= 2) {
      number += __shfl_xor_sync(~0u, number, step);
    }
    if (__all_sync(~0u, !mine || number == epoch) != 0) return true;
  }
  return false;
}

template <class Record, class Group>
__device__ inline bool DevicePipeline<Record, Group>::read_words(int source, std::uint64_t epoch,
                                                                 Record& record,
                                                                 std::uint64_t& number) const {
  std::uint64_t words[kWords];
  const std::byte* at = entry_at(g_.own_area, source, epoch);
#pragma unroll
  for (int w = 0; w < kWords; w += 2) {
    const ulonglong2 pair = ptx::ld_relaxed_sys_pair(at + w * 8);
    words[w] = pair.x;
    words[w + 1] = pair.y;
  }
  number = words[kRecordWords] - hash_of(words);
  memcpy(&record, words, sizeof(record));
  return number >= epoch && stage(number) == stage(epoch);
}

}  // namespace xd::turn
