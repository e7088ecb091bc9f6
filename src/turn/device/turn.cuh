// Turns on the device: the five verbs of turn/entry.h, and what the thread blocks of one launch
// agree on.
//
//   begin()  every block: the epoch; this launch owns the sequence; the family's own first loads
//   enter()  tells every peer what this rank is about to do
//   await()  every block: every peer has entered, and all agree
//   leave()  every block, when it has stored its last word into peers' memory: the last one raises
//            the done flags
//   end()    every block, when it is done altogether: the last one waits for the peers' done flags,
//            reports, and moves the epoch on
//   leave_and_end()  both, where nothing comes between: the blocks are counted once
//   All three take work for the last block, which it does before and behind the done flags.
//   end_without_flags()  in the place of both, where nobody waits for done flags of this operation;
//            or in two halves, end_ahead() and written(), with the block's last work between them
//
// One rank n, one peer p. Stores to a peer travel over the link; every wait polls own memory:
//
//   block of n                                   memory of p        block of p
//   entry[stage][n] = record, epoch --------------> polled, then reads the record
//   rows, weights ... then flag or done (release) -> polled (acquire.sys), then reads the rows
//
// The stores of bulk copies are complete for the thread that waited for its bulk group. The block's
// barrier or the warp's, and then the counter `left` (acq_rel.gpu), pass that on to the thread that
// releases the done flag (sys): causality order is transitive over these.
//
// A rank sends its record before it waits for anything. Its stores into peers' memory wait for
// records at most, and its done flags for these stores. Only work that no peer waits for
// (completing its own outputs, ending) waits for the peers' stores. All blocks of a launch are
// resident (cooperative launch), so a block that is waited for always runs.
//
// All ranks, and all blocks of each, come to the same verdict, since they look at the same records.
// There is one exception: the addresses of peers' memory are in a table that a rank's host may be
// changing (a tensor is deregistered under a replayed graph, by mistake). A block that misses some
// memory may be the only one, so it raises every flag that others might wait for, and marks its
// rank's done flag: all ranks then report a mismatch, and none waits for rows that never come.
//
// A fatal error ends every wait on every block; blocks then skip the rest, no done flag is raised,
// and DeviceControl may have any state: the communicator is finished.
//
// Only the kernel's start says that earlier kernels of the stream have ended, and enter() tells
// that to the peers. So these kernels must never be launched with programmatic dependent launch,
// unless they wait for it (griddepcontrol.wait) before the turn is made, which fences.
#pragma once

#include <bit>
#include <type_traits>

#include <crossdock/comm.h>

#include "comm/device/wait.cuh"
#include "turn/device/group.h"
#include "turn/device/seal.cuh"
#include "turn/peer_address.h"

namespace xd::turn {

// The next step of a launch.
enum class Verdict : int {
  go,       // move
  blank,    // memory is missing here: raise all flags, move nothing
  nothing,  // an operation error, known to all: take part in the turn, move nothing
  fatal,    // leave
};

// Work of the last block that leaves, which does nothing.
struct NoWork {
  // All threads of that block call both; where the first has met a fatal error, no flag is raised.
  __device__ void before_done() {}
  __device__ void after_done() {}
  // Whether a rank raises its done flag in this rank's memory itself. The flags of the others are
  // raised by ranks that do, each before its own.
  __device__ bool raises_done(int) const { return true; }
  static constexpr int kDoneTimeouts = 1;  // of a wait for a done flag
};

// State of a thread block, in shared memory.
template <class Record>
struct DeviceTurnShared {
  std::uint64_t epoch;
  std::uint64_t owner;  // owner of the sequence, when this block began
  int failed;           // 1 = the communicator had failed then
  int verdict;
  int status;      // status of an operation error here
  int mismatch;    // some record differs
  int is_last;     // 1 = of all blocks, this one was counted last, or came last to a barrier
  int some_blank;  // on the last block: 1 = some block of this launch has a blank verdict
  int some_fatal;  // on the last block: 1 = some block has met a fatal error
  int finder;      // lowest rank that has not found memory; num_ranks = none
  Record own;
  HeapRange area[kMaxDeviceRanks];  // DeviceGroup::areas
};

// A record's words as they travel. The last word of an entry is its epoch plus a hash of the
// others: a reader that finds the epoch of this operation in it has all words of this record, in
// any order in which they came.
using RecordWords = std::uint64_t[kRecordWords + 1];

// `Derived` is the family's turn. It may hide any of those under "Functions that a family adds".
template <class Derived, class Family, class Params, class Shared>
class DeviceTurn {
 public:
  using Record = typename Family::Record;

  // The first step of a kernel. The warp that will send this rank's record fences, so that a rank
  // that sees it also sees all that earlier kernels of this stream have written. The fence takes as
  // long as a round trip over the link: here other waits stand beside it.
  __device__ DeviceTurn(const Params& params, Shared& shared) : p_(params), s_(shared) {
    if (sends_records()) ptx::fence_acq_rel_sys();
  }

  __device__ bool begin();
  // Called by one warp of the last block, which has fenced at the start: in several kernels the
  // first blocks are those whose work others wait for. `staged`: this kernel has written memory
  // that peers read once they have seen the record, and a grid barrier lies between.
  __device__ void enter(bool staged = false);
  // One thread calls take(peer, record), which finds the memory that a rank's record offers; false
  // if it is not there. Returns false after a fatal error.
  template <class Take>
  __device__ bool await(Take&& take);
  template <class Work>
  __device__ void leave(Work& work);
  template <class Work>
  __device__ void end(const Work& work);
  template <class Work>
  __device__ void leave_and_end(Work& work);
  __device__ void leave() {
    NoWork none;
    leave(none);
  }
  __device__ void end() { end(NoWork{}); }
  __device__ void leave_and_end() {
    NoWork none;
    leave_and_end(none);
  }
  // Every block, when it is done altogether and has taken all that peers store into this rank's
  // memory: see turn/entry.h. All ranks end such an operation so, or none does.
  __device__ void end_without_flags();
  // Where there is no operation error: every block, behind a barrier of the block, when it has
  // taken all that peers store and neither waits nor looks at the control block any more. The last
  // block makes that ready for the next operation; only one thread of each block is busy with it. A
  // block's later stores are for later kernels of the stream.
  __device__ void end_ahead();
  // Every block, when it has written that. Until all have been here the sequence stays owned, so
  // that a kernel that overlaps is BUSY, and the host knows that this one runs. It is not waited
  // for. All threads of the block.
  __device__ void written();

  // A grid barrier; false after a fatal error. `n`: number of this barrier in the launch, from 1.
  __device__ bool barrier(std::uint32_t n) {
    arrive(n);
    return wait_arrivals(n);
  }
  // Its halves; the first is true on all threads of the block that comes last.
  __device__ bool arrive(std::uint32_t n);
  __device__ bool wait_arrivals(std::uint32_t n);

  __device__ const auto& group() const { return p_.group; }
  __device__ std::uint64_t epoch() const { return s_.epoch; }
  __device__ Verdict verdict() const { return static_cast<Verdict>(s_.verdict); }
  __device__ device::KernelWait site(int phase) const {
    return {phase, p_.group.number, p_.record.call.operation, s_.epoch};
  }
  __device__ bool has_operation_error() const {
    return s_.status != XD_SUCCESS;
  }                                                  // behind a barrier
  __device__ void set_operation_error(int status) {  // one thread, before the block's next barrier
    s_.status = status;
    s_.verdict = static_cast<int>(Verdict::nothing);
  }
  // Called by all threads of a block. True if one of them has met a fatal error.
  __device__ bool any_failed(bool failed) {
    if (__syncthreads_or(failed ? 1 : 0) == 0) return false;
    if (threadIdx.x == 0) s_.verdict = static_cast<int>(Verdict::fatal);
    __syncthreads();
    return true;
  }

  // On the last block that leaves: some block of this launch has not found memory, or has met a
  // fatal error.
  __device__ bool some_blank() const { return s_.some_blank != 0; }
  __device__ bool met_fatal() const { return verdict() == Verdict::fatal || s_.some_fatal != 0; }
  __device__ const Record& own_record() const { return s_.own; }

  // The memory that a rank shares for this sequence, at this process' addresses. After begin().
  __device__ const HeapRange& area(int owner) const { return s_.area[owner]; }
  // Words in the memory of a rank, this one or a peer.
  __device__ std::uint64_t* words(int owner, std::uint64_t offset) const {
    return reinterpret_cast<std::uint64_t*>(s_.area[owner].base + offset);
  }
  __device__ std::uint64_t* entry_at(int owner, int source, std::uint64_t epoch) const {
    return words(owner, p_.group.map.turn.entry) + cell_of(epoch, source, ranks()) * 8;
  }
  __device__ std::uint64_t* done_at(int owner, int source) const {
    return words(owner, p_.group.map.turn.done) + cell_of(s_.epoch, source, ranks()) * 8;
  }
  // Waits until `source`, which may be this rank, touches this rank's memory no more; single
  // threads. False after a fatal error. `flag` gets the done flag.
  __device__ bool wait_done(int source, std::uint64_t& flag, int timeouts = 1) const;
  // Waits until no rank touches this rank's memory any more. All threads of a block call it. False
  // after a fatal error, which a thread may have met before.
  template <class Work>
  __device__ bool wait_all_done(const Work& work, bool failed = false);
  // The address of `bytes` bytes of a rank's memory, or nullptr if some of them are not there.
  __device__ std::byte* find(int rank, PeerAddress address, std::uint64_t bytes,
                             unsigned alignment) const;

  __device__ int rank() const { return p_.group.comm.rank; }
  __device__ int ranks() const { return p_.group.comm.num_ranks; }

  // All threads, in begin(): copies a table from device memory to shared memory, where it is behind
  // the block's next barrier. One warp does, the `back`th from the last: the first warps wait for
  // other loads meanwhile, and the last one fences.
  template <class T>
  __device__ static void load_table(unsigned back, const T* from, int count, T* to) {
    const unsigned warps = blockDim.x / 32;
    if (threadIdx.x / 32 != (warps > back ? warps - 1 - back : 0)) return;
#pragma unroll 1
    for (int i = thread() % 32; i < count; i += 32) to[i] = from[i];
  }

  // ---- Functions that a family adds ----

  struct Nothing {};
  // All threads call look() while begin() waits for its own loads. Its result goes to judge(),
  // which all threads call behind a barrier of the block.
  __device__ Nothing look() { return {}; }
  __device__ void judge(const Nothing&) {}
  // One thread fills in the fields of this rank's record that the host could not know.
  __device__ void complete(Record&) const {}
  // One thread asks, when all records agree. With a status other than SUCCESS all ranks move
  // nothing.
  __device__ int obstacle() const { return XD_SUCCESS; }
  // One thread asks for the lowest rank that an operation error is about, if it is not of this
  // rank's own call; -1 where that is unknown.
  __device__ int rank_concerned() const { return -1; }
  template <class Findings>
  __device__ void report(Findings&) const {}
  // One thread resets the family's part of the control block when the launch is over.
  __device__ void reset() const {}
  // One thread keeps there how the operation has ended, unless it ended ahead. It fences its own
  // stores.
  __device__ void conclude() const {}

 protected:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }

  const Params& p_;
  Shared& s_;

 private:
  __device__ Derived& self() { return static_cast<Derived&>(*this); }
  __device__ const Derived& self() const { return static_cast<const Derived&>(*this); }
  __device__ static bool sends_records() {
    return blockIdx.x == gridDim.x - 1 && threadIdx.x / 32 == blockDim.x / 32 - 1;
  }
  __device__ void judge_start();
  __device__ static std::uint64_t look_at(const std::uint64_t* entry, RecordWords& words);
  __device__ bool wait_entry(int peer, RecordWords& words) const;
  __device__ static Record record_of(const RecordWords& words);
  __device__ Record read_record(int from) const;
  template <class Take>
  __device__ bool take_record(int peer, const Record& theirs, Take&& take);
  __device__ bool count_block(std::uint32_t* counter);
  __device__ bool is_last_block(std::uint32_t* counter);
  __device__ void raise_done();
  template <class Work>
  __device__ void raise_all_done(Work& work);
  __device__ void note_finder(int peer, std::uint64_t flag) {
    if ((flag & kFoundMissing) != 0) atomicMin(&s_.finder, peer);
  }
  __device__ static bool closes() { return threadIdx.x == blockDim.x - 1; }
  template <class Work>
  __device__ void close(const Work& work);
  __device__ void make_ready() const;
  __device__ void end_launch(bool failed);
  __device__ void close_with_operation_error();
  __device__ void write_report();
  __device__ void finish_comm() const;
  __device__ int lowest_concerned() const;
};

// Names a member function of DeviceTurn outside its class.
#define XD_TURN_MEMBER(type)                                         \
  template <class Derived, class Family, class Params, class Shared> \
  __device__ inline type DeviceTurn<Derived, Family, Params, Shared>

// ---- The start ---------------------------------------------------------------------------------

// Called by thread 0 when all loads of begin() are there.
XD_TURN_MEMBER(void)::judge_start() {
  s_.status = XD_SUCCESS;
  s_.mismatch = 0;
  s_.finder = ranks();
  const device::KernelWait here = site(XD_PHASE_NONE);
  bool fatal = s_.failed != 0;
  if (fatal) device::tell_host(p_.group.comm);
  // The launch that runs owns the sequence; blocks of another launch find it busy, also if the
  // owner changed between their two looks at it. After a fatal error it may be owned for good.
  const auto owner = static_cast<std::uint32_t>(s_.owner);
  const auto claimed_at = static_cast<std::uint32_t>(s_.owner >> 32);
  const bool busy = (owner != 0 && owner != mark_of(p_.launch)) ||
                    claimed_at != static_cast<std::uint32_t>(s_.epoch - 1);
  if (busy && !fatal) {
    device::raise(p_.group.comm, device::error_at(p_.group.comm, here, XD_ERROR_BUSY, rank()),
                  device::Spread::everywhere);
    fatal = true;
  }
  s_.verdict = static_cast<int>(fatal ? Verdict::fatal : Verdict::go);
}

// All threads call it. Different warps load different data, all at once.
XD_TURN_MEMBER(bool)::begin() {
  const unsigned t = threadIdx.x;
  const unsigned apart = blockDim.x > 64 ? 32 : 1;
  if (t == 0) s_.owner = ptx::or_acquire_gpu(&p_.group.control->owner, mark_of(p_.launch));
  if (t == apart) s_.epoch = ptx::ld_relaxed_sys(&p_.group.control->epoch) + 1;
  if (t == 2 * apart) s_.failed = device::failed(p_.group.comm) ? 1 : 0;
  load_table(1, p_.group.areas, ranks(), s_.area);
  const auto look = self().look();
  __syncthreads();
  if (t == 0) judge_start();
  self().judge(look);
  __syncthreads();
  if (t == 0) {
    s_.own = p_.record;
    self().complete(s_.own);
    if (s_.own.call.status != XD_SUCCESS && verdict() == Verdict::go) {
      set_operation_error(s_.own.call.status);
    }
  }
  __syncthreads();
  return verdict() != Verdict::fatal;
}

// ---- Records -----------------------------------------------------------------------------------

XD_TURN_MEMBER(void)::enter(bool staged) {
  if (!sends_records()) return;
  if (staged) ptx::fence_acq_rel_sys();
  const auto* own = reinterpret_cast<const std::uint64_t*>(&s_.own);
#pragma unroll 1
  for (int i = 1 + thread() % 32; i < ranks(); i += 32) {
    const int peer = (rank() + i) % ranks();
    std::uint64_t* to = entry_at(peer, rank(), s_.epoch);
    for (int w = 0; w < kRecordWords; ++w) ptx::st_relaxed_sys(to + w, own[w]);
    ptx::st_relaxed_sys(to + kRecordWords, s_.epoch + hash_of(own));
  }
}

// Loads an entry's words. Returns the epoch of their record, if they are words of one. Acquire:
// then the thread also sees all that the fence of the record's rank has covered.
XD_TURN_MEMBER(std::uint64_t)::look_at(const std::uint64_t* entry, RecordWords& words) {
#pragma unroll
  for (int w = 0; w < kRecordWords; ++w) words[w] = ptx::ld_relaxed_sys(entry + w);
  words[kRecordWords] = ptx::ld_acquire_sys(entry + kRecordWords);
  return words[kRecordWords] - hash_of(words);
}

// `words`: the peer's record of this operation. No later look is needed, since they are one record.
XD_TURN_MEMBER(bool)::wait_entry(int peer, RecordWords& words) const {
  const std::uint64_t* entry = entry_at(rank(), peer, s_.epoch);
  const std::uint64_t* before = entry_at(rank(), peer, s_.epoch - 1);
  const std::uint64_t expected = s_.epoch;
  return device::wait_until(
      p_.group.comm, site(XD_PHASE_ENTRY), peer,
      [=, &words] { return look_at(entry, words) == expected; },
      [=] {
        RecordWords earlier;
        return look_at(before, earlier) == expected - 1 ? expected - 1 : 0;
      });
}

XD_TURN_MEMBER(auto)::record_of(const RecordWords& words) -> Record {
  struct Words {
    std::uint64_t word[kRecordWords];
  } record;
#pragma unroll
  for (int w = 0; w < kRecordWords; ++w) record.word[w] = words[w];
  return std::bit_cast<Record>(record);
}

// A rank's record of this operation, after the wait for it. Its words were stored one by one, so
// they are loaded as in wait_entry(): never by a weak load, which might miss them.
XD_TURN_MEMBER(auto)::read_record(int from) const -> Record {
  if (from == rank()) return s_.own;
  RecordWords words;
  look_at(entry_at(rank(), from, s_.epoch), words);
  return record_of(words);
}

// Compares a rank's record with this rank's, and finds the memory that it offers; false if some of
// it does not exist.
template <class Derived, class Family, class Params, class Shared>
template <class Take>
__device__ inline bool DeviceTurn<Derived, Family, Params, Shared>::take_record(
    int peer, const Record& theirs, Take&& take) {
  const bool same = theirs.call.status == XD_SUCCESS && s_.own.call.status == XD_SUCCESS &&
                    theirs.call.operation == s_.own.call.operation &&
                    Family::same_operation(theirs, s_.own);
  if (!same) {
    if (peer != rank()) s_.mismatch = 1;
    return true;
  }
  return take(peer, theirs);
}

template <class Derived, class Family, class Params, class Shared>
template <class Take>
__device__ inline bool DeviceTurn<Derived, Family, Params, Shared>::await(Take&& take) {
  bool failed = false, missing = false;
  // Neighbours go to different warps: threads of one warp would take records one after another.
  const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll 1
  for (int peer = thread() % 32 * warps + thread() / 32; peer < ranks();
       peer += static_cast<int>(blockDim.x)) {
    if (peer == rank()) {
      missing |= !take_record(peer, s_.own, take);
      continue;
    }
    RecordWords words;
    if (!wait_entry(peer, words)) {
      failed = true;
      break;
    }
    missing |= !take_record(peer, record_of(words), take);
  }
  if (any_failed(failed)) return false;
  // The status is read before the barrier: a compiler may let all threads read a word that thread 0
  // writes behind it.
  const bool undisturbed = s_.status == XD_SUCCESS && verdict() != Verdict::fatal;
  const bool some_missing = __syncthreads_or(missing ? 1 : 0) != 0;
  if (threadIdx.x == 0 && undisturbed) {
    if (s_.mismatch != 0) {
      set_operation_error(XD_ERROR_MISMATCH);
    } else if (const int status = self().obstacle(); status != XD_SUCCESS) {
      set_operation_error(status);
    } else if (some_missing) {  // it may be missing for this block alone
      set_operation_error(XD_ERROR_MISMATCH);
      s_.verdict = static_cast<int>(Verdict::blank);
    }
  }
  __syncthreads();
  return true;
}

XD_TURN_MEMBER(std::byte*)::find(int rank, PeerAddress address, std::uint64_t bytes,
                                 unsigned alignment) const {
  return find_peer_memory(address, bytes, alignment, s_.area[rank], [&](std::uint64_t segment) {
    const DeviceComm& comm = p_.group.comm;
    return segment < kMaxHeapSegments ? comm.heap[heap_entry(segment, rank, comm.num_ranks)]
                                      : HeapRange{nullptr, 0};
  });
}

// ---- Waits inside the operation ----------------------------------------------------------------

XD_TURN_MEMBER(bool)::wait_done(int source, std::uint64_t& flag, int timeouts) const {
  const std::uint64_t* at = done_at(rank(), source);
  const std::uint64_t expected = s_.epoch;
  device::KernelWait done = site(XD_PHASE_DONE);
  done.timeouts = timeouts;
  return device::wait_until(
      p_.group.comm, done, source,
      [=, &flag] {
        flag = ptx::ld_acquire_sys(at);
        return (flag & ~kFoundMissing) == expected;
      },
      [=] { return ptx::ld_acquire_sys(at) & ~kFoundMissing; });
}

template <class Derived, class Family, class Params, class Shared>
template <class Work>
__device__ inline bool DeviceTurn<Derived, Family, Params, Shared>::wait_all_done(const Work& work,
                                                                                  bool failed) {
#pragma unroll 1
  for (int peer = thread(); peer < ranks() && !failed; peer += static_cast<int>(blockDim.x)) {
    if (!work.raises_done(peer)) continue;
    std::uint64_t flag = 0;
    failed = !wait_done(peer, flag, Work::kDoneTimeouts);
    note_finder(peer, flag);
  }
  if (any_failed(failed)) return false;
  if constexpr (!std::is_same_v<Work, NoWork>) {
    // The ranks that raise the other flags have raised their own behind them, and these are seen.
#pragma unroll 1
    for (int peer = thread(); peer < ranks(); peer += static_cast<int>(blockDim.x)) {
      if (work.raises_done(peer)) continue;
      const std::uint64_t flag = ptx::ld_acquire_sys(done_at(rank(), peer));
      if ((flag & ~kFoundMissing) == s_.epoch) note_finder(peer, flag);
    }
    __syncthreads();
  }
  return true;
}

XD_TURN_MEMBER(bool)::arrive(std::uint32_t n) {
  __syncthreads();
  if (threadIdx.x == 0) {
    // Release and acquire: all blocks see behind the barrier all that any block has stored before
    // it. A block that is alone has its own barrier for that.
    std::uint32_t* arrived = &p_.group.control->barrier;
    s_.is_last = gridDim.x == 1 || ptx::add_acq_rel_gpu(arrived, 1) + 1 == n * gridDim.x ? 1 : 0;
  }
  __syncthreads();
  return s_.is_last != 0;
}

XD_TURN_MEMBER(bool)::wait_arrivals(std::uint32_t n) {
  const std::uint32_t* arrived = &p_.group.control->barrier;
  bool failed = false;
  if (threadIdx.x == 0 && s_.is_last == 0) {
    // A block that is late waits for a peer, for two timeouts at most, and that wait is meant to
    // run out first.
    device::KernelWait blocks = site(XD_PHASE_NONE);
    blocks.timeouts = 3;
    failed = !device::wait_until(
        p_.group.comm, blocks, -1, [=] { return ptx::ld_acquire_gpu(arrived) >= n * gridDim.x; },
        [] { return std::uint64_t{0}; });
  }
  return !any_failed(failed);
}

// The end of a turn: leave(), end() and the part of the last block in them.

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

// The lowest rank that this rank's operation error is about, as far as it knows that without the
// records.
XD_TURN_MEMBER(int)::lowest_concerned() const {
  if (s_.own.call.status != XD_SUCCESS) return rank();
  if (s_.status != XD_ERROR_MISMATCH) return self().rank_concerned();
  return s_.finder != ranks() ? s_.finder : -1;
}

// Makes the operation's operation error the communicator's error: kernels behind it leave at once,
// and the host hears of it. The peers' kernels meet an operation error of this operation
// themselves, and need not be told.
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
  if (s_.status != XD_SUCCESS) close_with_operation_error();
  self().conclude();
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

XD_TURN_MEMBER(void)::close_with_operation_error() {
  auto* control = p_.group.control;
  // The host already knows of a failure that its own checks found.
  if (p_.record.call.status == XD_SUCCESS) write_report();
  ptx::st_release_sys(&p_.group.report->errors, ++control->errors);
  if (p_.group.fatal_errors) finish_comm();
  __threadfence();
}

}  // namespace xd::turn

#undef XD_TURN_MEMBER
