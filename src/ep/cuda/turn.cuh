// The turn-taking of operations on the device: entry records, done flags, epochs (see ep/wire.h),
// and what the thread blocks of one launch agree on.
//
//   begin()   every block: the epoch, the plan's checks
//   enter()   tells every peer what this rank is about to do; from here on they may touch its
//             memory
//   await()   every block: every peer has entered, and all agree; from here on they may be touched
//   finish()  every block, when it has stored its last row: the last one raises the done flags
//   close()   every block, when it is done altogether: the last one waits for the peers' done
//             flags, reports, and moves the epoch on
//
// Two ranks n, one peer p. Stores to a peer travel over the link; every wait polls own memory:
//
//   block of n                                   memory of p        block of p
//   record[slot][n] = ..., epoch (release.sys) -----> polled (acquire.sys), then reads the record
//   rows, weights ... then flag or done ------------> polled (acquire.sys), then reads the rows
//
// A row that bulk copies have stored is complete for the thread that waited for its bulk group; the
// block's barrier or the warp's, then the counter `finished` (acq_rel.gpu), pass that on to the
// thread that releases the done flag (sys): causality order is transitive over these.
//
// No wait goes in a circle: a record is sent before anything is waited for, rows wait for records
// alone, done flags for rows that this rank itself moves, and only work that no peer waits for
// (fanning out, final sums, closing) waits for what peers bring. All blocks of a launch are
// resident (cooperative launch), so a block that is waited for always runs.
//
// All ranks, and all blocks of each, come to the same verdict, as they look at the same records and
// plans; but where a tensor lies they look up in a table that the host of a rank may be changing (a
// tensor is deregistered under a replayed graph, by mistake). A block that misses one may be alone
// with that, so it raises every flag that others might wait for, and marks its rank's done flag:
// all ranks then report a mismatch, and nobody has waited for what never comes.
//
// A fatal error ends every wait on every block; blocks then skip what is left, no done flag is
// raised, and Control may stay as it is: the communicator is finished.
//
// Nothing but the kernel's start says that earlier kernels of the stream have ended, which is what
// enter() tells the peers. So these kernels must never be launched with programmatic dependent
// launch, unless they wait for it (griddepcontrol.wait) before begin() fences.
#pragma once

#include "comm/device_wait.cuh"
#include "ep/cuda/params.h"

namespace xd::ep::cuda {

// What a launch does next.
enum class Verdict : int {
  go,       // move rows
  blank,    // a tensor is missing here: raise all flags, move nothing
  nothing,  // a non-fatal error, known to all: take part in the turn, move nothing
  fatal,    // leave
};

// A peer's receive tensors at this process' addresses.
struct PeerTensors {
  std::byte* rows;
  std::byte* scales;
  std::byte* weights;
  std::byte* extra;
  std::uint32_t num_rows;
  bool staged;        // its rows are copied out of its staging memory
  bool wide_indices;  // its recv_topk_idx is int64
};

struct TurnShared {
  std::uint64_t epoch;
  std::uint64_t owner;  // of the group, when this block began
  int failed;           // the communicator, likewise
  int first_zone, zones_end;
  int verdict;
  int status;  // of a non-fatal error here
  Fault fault;
  int mismatch;  // some record differs
  int is_last;
  int some_blank;  // last block: of this launch
  int finder;      // lowest rank that has not found a tensor; num_ranks = none
  unsigned long long sum;
  PlanHeader plan;
  Record own;
  PeerTensors peer[kMaxDeviceRanks];
  std::uint32_t base[kMaxDeviceRanks + 1];
};

// Sizes of one row of each tensor that peers offer; 0 = not used in this operation.
struct RowSizes {
  std::uint64_t rows, scales, weights, extra;
  std::uint64_t partials;  // bytes of all partial sums, which then take the place of `extra`
  unsigned scale_alignment = 1;
};

class Turn {
 public:
  __device__ Turn(const TurnParams& params, TurnShared& shared) : p_(params), s_(shared) {}

  __device__ bool begin();
  __device__ void enter(bool staged = false);
  __device__ bool await(const RowSizes& sizes);
  __device__ void finish();
  __device__ void close();
  __device__ void leave();  // finish() and close(), where nothing comes between

  // Grid barrier; false = fatal. `n`: number of this barrier in the launch, from 1.
  __device__ bool barrier(std::uint32_t n);

  __device__ const GroupDevice& group() const { return p_.group; }
  __device__ std::uint64_t epoch() const { return s_.epoch; }
  __device__ Verdict verdict() const { return static_cast<Verdict>(s_.verdict); }
  __device__ const PlanHeader& plan() const { return s_.plan; }
  __device__ const PeerTensors& peer(int rank) const { return s_.peer[rank]; }
  __device__ device::WaitSite site(int phase) const {
    return {phase, p_.group.number, p_.record.operation, s_.epoch};
  }
  __device__ void set_setback(int status) {  // one thread, before the block's next barrier
    s_.status = status;
    s_.verdict = static_cast<int>(Verdict::nothing);
  }
  // All threads of a block: one of them has met a fatal error.
  __device__ bool any_failed(bool failed) {
    if (__syncthreads_or(failed ? 1 : 0) == 0) return false;
    if (threadIdx.x == 0) s_.verdict = static_cast<int>(Verdict::fatal);
    __syncthreads();
    return true;
  }

  // Own flags and words, and a peer's.
  __device__ std::uint64_t* record_at(int owner, int source, std::uint64_t epoch) const {
    return words(owner, p_.group.record) + (epoch % 2 * ranks() + source) * 8;
  }
  __device__ std::uint64_t* done_at(int owner, int source) const {
    return words(owner, p_.group.done) + (s_.epoch % 2 * ranks() + source) * 8;
  }
  __device__ std::uint64_t* chunk_at(int owner, int source, int chunk) const {
    return words(owner, p_.group.chunk) +
           static_cast<std::uint64_t>(source) * p_.group.chunk_stride + chunk;
  }
  __device__ std::uint64_t* words(int owner, std::uint64_t offset) const {
    return reinterpret_cast<std::uint64_t*>(p_.group.area[owner] + offset);
  }
  // Waits for a source's flag of a chunk; single threads. False = fatal.
  __device__ bool wait_chunk(int source, int chunk) const;
  // Waits until `source` (itself, too) touches this rank's memory no more; single threads. False =
  // fatal. `flag`: what it says.
  __device__ bool wait_done(int source, std::uint64_t& flag) const;

  // Lanes of the warp release a chunk's flag to every rank d with wanted(d). All lanes; what the
  // warp has stored before is covered.
  template <class Wanted>
  __device__ void release_chunk(int chunk, Wanted wanted) const {
    __syncwarp();
    for (int d = static_cast<int>(threadIdx.x % 32); d < ranks(); d += 32) {
      if (wanted(d)) ptx::st_release_sys(chunk_at(d, rank(), chunk), s_.epoch);
    }
  }

  __device__ int rank() const { return p_.group.comm.rank; }
  __device__ int ranks() const { return p_.group.comm.num_ranks; }

 private:
  // What one thread has seen of a plan's head.
  struct ZoneLook {
    std::uint64_t sum;  // its part of the checksum
    bool bad;           // a zone makes no sense
  };

  __device__ void judge_start();
  __device__ ZoneLook look_at_plan();
  __device__ void check_plan(const ZoneLook& look);
  __device__ Fault header_fault() const;
  __device__ Fault binding_fault() const;
  __device__ Fault tensor_fault() const;
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static bool sends_records() {
    return blockIdx.x == 0 && threadIdx.x / 32 == blockDim.x / 32 - 1;
  }
  __device__ static std::uint64_t epoch_of(const std::uint64_t* record);
  __device__ bool wait_record(int peer) const;
  __device__ void read_record(int from, std::uint64_t* words) const;
  __device__ bool take_record(int peer, const RowSizes& sizes);
  __device__ std::byte* tensor_of(int rank, std::uint64_t place, std::uint64_t bytes,
                                  unsigned alignment) const;
  __device__ bool is_last_block(std::uint32_t* counter);
  __device__ void raise_done();
  __device__ void end_launch();
  __device__ void report();
  __device__ void finish_comm() const;
  __device__ int rank_concerned() const;

  const TurnParams& p_;
  TurnShared& s_;
};

}  // namespace xd::ep::cuda

#include "ep/cuda/turn_impl.cuh"
