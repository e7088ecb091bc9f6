// Definitions of ep/cuda/turn.cuh, which includes this file.
#pragma once

#include "ep/cuda/turn.cuh"

#include "base/hash.h"

namespace xd::ep::cuda {

// Thread 0, when everything that begin() loads is there.
__device__ inline void Turn::judge_start() {
  s_.status = XD_SUCCESS;
  s_.mismatch = 0;
  s_.finder = ranks();
  s_.fault = {};
  const device::WaitSite here = site(XD_PHASE_NONE);
  bool fatal = s_.failed != 0;
  if (fatal) device::tell_host(p_.group.comm);
  // The launch that runs owns the group; blocks of another one find it busy. So do they if the
  // group's owner changed between the two looks at it.
  const auto owner = static_cast<std::uint32_t>(s_.owner);
  const auto claimed_at = static_cast<std::uint32_t>(s_.owner >> 32);
  if ((owner != 0 && owner != p_.launch) ||
      claimed_at != static_cast<std::uint32_t>(s_.epoch - 1)) {
    device::raise(p_.group.comm, device::error_at(p_.group.comm, here, XD_ERROR_BUSY, rank()),
                  device::Spread::everywhere);
    fatal = true;
  }
  s_.verdict = static_cast<int>(fatal ? Verdict::fatal : Verdict::go);
}

// All threads. What has to be read is read at once, by different warps.
__device__ inline bool Turn::begin() {
  const unsigned t = threadIdx.x;
  const unsigned apart = blockDim.x > 64 ? 32 : 1;
  if (t == 0) {
    s_.owner = ptx::or_acquire_gpu(&p_.group.control->owner, p_.launch);
    s_.sum = 0;
  }
  if (t == apart) s_.epoch = ptx::ld_relaxed_sys(&p_.group.control->epoch) + 1;
  if (t == 2 * apart) s_.failed = device::failed(p_.group.comm) ? 1 : 0;
  // Who sees the record also sees what earlier kernels of this stream have written. Fenced here and
  // not by a release of the record's last word: beside other waits, and with no word to wait for.
  // (That they have ended is known from this kernel's start alone: see turn.cuh.)
  if (sends_records()) ptx::fence_acq_rel_sys();
  for (unsigned i = t; i <= static_cast<unsigned>(ranks()); i += blockDim.x) {
    s_.base[i] = p_.group.base[i];
  }
  ZoneLook look;
  if (p_.plan != nullptr) look = look_at_plan();
  __syncthreads();
  if (t == 0) judge_start();
  if (p_.plan != nullptr) check_plan(look);
  __syncthreads();
  if (t == 0) {
    s_.own = p_.record;
    if (s_.own.status == XD_SUCCESS && s_.fault.kind != PlanFault::none) {
      s_.own.status = XD_ERROR_INVALID_ARGUMENT;
    }
    if (p_.plan != nullptr) {
      s_.own.rows = static_cast<std::uint32_t>(s_.plan.recv_rows);
      s_.own.fingerprint = s_.plan.fingerprint;
    }
    if (s_.own.status != XD_SUCCESS && verdict() == Verdict::go) set_setback(s_.own.status);
  }
  __syncthreads();
  return verdict() != Verdict::fatal;
}

// ---- The plan ----------------------------------------------------------------------------------

__device__ inline Fault Turn::header_fault() const {
  const PlanHeader& h = s_.plan;
  const auto fault = [](PlanFault kind, std::int64_t got = 0, std::int64_t expected = 0) {
    return Fault{kind, 0, nullptr, got, expected};
  };
  if (h.magic != PlanHeader::kMagic) return fault(PlanFault::no_plan);
  if (h.version != PlanHeader::kVersion) {
    return fault(PlanFault::version, h.version, PlanHeader::kVersion);
  }
  if (!plausible(h)) return fault(PlanFault::header);
  const PlanMap map = map_of(h);
  if (h.bytes != map.end) return fault(PlanFault::header);
  if (p_.plan_bytes < map.end) {
    return fault(PlanFault::cut_short, static_cast<std::int64_t>(p_.plan_bytes),
                 static_cast<std::int64_t>(map.end));
  }
  return fault(PlanFault::none);
}

// In the order of kBindingNames.
__device__ inline Fault Turn::binding_fault() const {
  const PlanHeader& h = s_.plan;
  const GroupDevice& g = p_.group;
  const std::int64_t pairs[][2] = {
      {h.rank, rank()},
      {h.ranks, ranks()},
      {h.experts, g.experts},
      {h.layout, g.expert_major ? XD_EP_EXPERT_MAJOR : XD_EP_RANK_MAJOR},
      {h.keeps_list, g.expert_major ? 1 : 0},
      {h.keeps_items, g.keeps_items ? 1 : 0},
      {h.overflow, g.drop ? XD_EP_OVERFLOW_DROP : XD_EP_OVERFLOW_ERROR},
      {h.capacity, g.capacity}};
  std::int64_t number = 0;
  for (const auto& pair : pairs) {
    if (pair[0] != pair[1]) {
      Fault fault{PlanFault::binding, 0, nullptr, pair[0], pair[1]};
      fault.which = static_cast<std::int32_t>(number);
      return fault;
    }
    ++number;
  }
  if (h.capacities != g.capacities_hash) return {PlanFault::capacities, 0, nullptr, 0, 0};
  if (h.tokens > g.max_tokens || h.topk > g.max_topk) {
    return {PlanFault::too_large, 0, nullptr, h.tokens, h.topk};
  }
  if (h.alignment > g.alignment) {
    return {PlanFault::alignment, 0, nullptr, h.alignment, g.alignment};
  }
  return {};
}

__device__ inline Fault Turn::tensor_fault() const {
  const PlanHeader& h = s_.plan;
  for (int i = 0; i < p_.num_checks; ++i) {
    const Check& c = p_.checks[i];
    if (c.kind == Check::recv_rows && c.got < h.recv_rows) {
      return {PlanFault::tensor_rows, 0, c.name, c.got, h.recv_rows};
    }
    if (c.kind == Check::tokens && c.got != h.tokens) {
      return {PlanFault::tokens, 0, c.name, c.got, h.tokens};
    }
    if (c.kind == Check::topk && c.got != h.topk) {
      return {PlanFault::topk, 0, c.name, c.got, h.topk};
    }
  }
  return {};
}

// What the plan's head says, if it is as long as this group's plans: all words in front of the
// codes.
__device__ inline Turn::ZoneLook Turn::look_at_plan() {
  const auto* words = reinterpret_cast<const std::uint64_t*>(p_.plan);
  constexpr std::uint64_t kHeaderWords = sizeof(PlanHeader) / sizeof(std::uint64_t);
  constexpr std::uint64_t kChecksumWord = offsetof(PlanHeader, checksum) / sizeof(std::uint64_t);
  const std::uint64_t end = min(p_.group.plan_head_bytes, p_.plan_bytes) / sizeof(std::uint64_t);
  ZoneLook look{0, false};
  for (std::uint64_t i = threadIdx.x; i < end; i += blockDim.x) {
    const std::uint64_t word = words[i];
    if (i < kHeaderWords) reinterpret_cast<std::uint64_t*>(&s_.plan)[i] = word;
    if (i != kChecksumWord) look.sum += hash_entry(i, word);
  }
  if (end * sizeof(std::uint64_t) < p_.group.plan_head_bytes) return look;
  const int local = p_.group.local_experts;
  const auto* count = reinterpret_cast<const std::int32_t*>(p_.plan + sizeof(PlanHeader));
  const std::int32_t* offset = count + local;
  for (int e = static_cast<int>(threadIdx.x); e < local; e += static_cast<int>(blockDim.x)) {
    look.bad |= count[e] < 0 || std::int64_t{offset[e]} + count[e] > offset[e + 1];
  }
  if (threadIdx.x == blockDim.x - 1) {
    s_.first_zone = offset[0];
    s_.zones_end = offset[local];
  }
  return look;
}

// All threads. Every block comes to the same verdict, as it looks at the same bytes.
__device__ inline void Turn::check_plan(const ZoneLook& look) {
  std::uint64_t sum = look.sum;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(&s_.sum, static_cast<unsigned long long>(sum));
  const bool bad = __syncthreads_or(look.bad ? 1 : 0) != 0;
  if (threadIdx.x != 0) return;
  const PlanHeader& h = s_.plan;
  s_.fault = header_fault();
  if (s_.fault.kind != PlanFault::none) return;
  // A head of another length is that of another group's plan.
  const bool same_head = map_of(h).code == p_.group.plan_head_bytes;
  if (same_head && s_.sum != h.checksum) {
    s_.fault = {PlanFault::checksum, 0, nullptr, 0, 0};
    return;
  }
  s_.fault = binding_fault();
  if (s_.fault.kind == PlanFault::none) s_.fault = tensor_fault();
  const bool has_zones = !refused(h) && p_.group.expert_major;
  const bool damaged = h.recv_rows < 0 || h.recv_rows > capacity_of(h) ||
                       (has_zones && (bad || s_.first_zone != 0 || s_.zones_end != h.recv_rows));
  if (s_.fault.kind == PlanFault::none && (damaged || !same_head)) {
    s_.fault = {PlanFault::zones, 0, nullptr, 0, 0};
  }
}

// ---- Entry records -----------------------------------------------------------------------------

// A record's last word is its epoch plus a hash of the others: whoever finds the epoch of this
// operation in it has all words of this record, in whatever order they came.
inline constexpr int kRecordWords = sizeof(Record) / sizeof(std::uint64_t);
using RecordWords = std::uint64_t[kRecordWords + 1];
static_assert(sizeof(RecordWords) == sizeof(EntryRecord));

// Each word times another power of an odd number: none can change alone, and no few by little.
__device__ inline std::uint64_t hash_of(const std::uint64_t* words) {
  std::uint64_t hash = 0;
#pragma unroll
  for (int w = 0; w < kRecordWords; ++w) hash = (hash + words[w]) * 0x9E3779B97F4A7C15u;
  return hash;
}

// Block 0: one warp, which has fenced in begin(). `staged`: this kernel has written something that
// peers read once they have seen the record, and a grid barrier lies between.
__device__ inline void Turn::enter(bool staged) {
  if (!sends_records()) return;
  if (staged) ptx::fence_acq_rel_sys();
  const auto* own = reinterpret_cast<const std::uint64_t*>(&s_.own);
  for (int i = 1 + thread() % 32; i < ranks(); i += 32) {
    const int peer = (rank() + i) % ranks();
    std::uint64_t* to = record_at(peer, rank(), s_.epoch);
    for (int w = 0; w < kRecordWords; ++w) ptx::st_relaxed_sys(to + w, own[w]);
    ptx::st_relaxed_sys(to + kRecordWords, s_.epoch + hash_of(own));
  }
}

__device__ inline std::uint64_t Turn::epoch_of(const std::uint64_t* record) {
  RecordWords words;
#pragma unroll
  for (int w = 0; w <= kRecordWords; ++w) words[w] = ptx::ld_relaxed_sys(record + w);
  return words[kRecordWords] - hash_of(words);
}

__device__ inline bool Turn::wait_record(int peer) const {
  const std::uint64_t* record = record_at(rank(), peer, s_.epoch);
  const std::uint64_t* before = record_at(rank(), peer, s_.epoch - 1);
  const std::uint64_t expected = s_.epoch;
  const bool here = device::wait_until(
      p_.group.comm, site(XD_PHASE_ENTRY), peer, [=] { return epoch_of(record) == expected; },
      [=] { return epoch_of(before) == expected - 1 ? expected - 1 : 0; });
  // Acquire: of what the peer's fence has covered.
  ptx::ld_acquire_sys(record + kRecordWords);
  return here;
}

// The address of `bytes` bytes of a rank's tensor, or nullptr if it is not all there.
__device__ inline std::byte* Turn::tensor_of(int rank, std::uint64_t place, std::uint64_t bytes,
                                             unsigned alignment) const {
  const std::uint64_t base = place >> TensorPlace::kOffsetBits;
  const std::uint64_t offset = place & ((std::uint64_t{1} << TensorPlace::kOffsetBits) - 1);
  HeapRange range{nullptr, 0};
  if (base == TensorPlace::kGroup) {
    range = {p_.group.area[rank], p_.group.area_bytes[rank]};
  } else if (base >= TensorPlace::kHeap && base < TensorPlace::kHeap + kMaxHeapSegments) {
    const DeviceComm& comm = p_.group.comm;
    range = comm.heap[heap_entry(base - TensorPlace::kHeap, rank, comm.num_ranks)];
  }
  const bool there = range.base != nullptr && offset % alignment == 0 && offset <= range.bytes &&
                     bytes <= range.bytes - offset;
  return there ? range.base + offset : nullptr;
}

// Copies a rank's record of this operation, which has been waited for. Its words are stored one by
// one, so they are loaded as wait_record() does: never by a weak load, which might miss them.
__device__ inline void Turn::read_record(int from, std::uint64_t* words) const {
  const auto* own = reinterpret_cast<const std::uint64_t*>(&s_.own);
  const std::uint64_t* sent = record_at(rank(), from, s_.epoch);
#pragma unroll
  for (int w = 0; w < kRecordWords; ++w) {
    words[w] = from == rank() ? own[w] : ptx::ld_relaxed_sys(sent + w);
  }
}

// Reads a peer's record and finds its tensors; false if it offers some that do not exist.
__device__ inline bool Turn::take_record(int peer, const RowSizes& sizes) {
  std::uint64_t words[kRecordWords];
  read_record(peer, words);
  const auto* own = reinterpret_cast<const std::uint64_t*>(&s_.own);
  // status, operation, dtype, flags, row_bytes | extra (and rows) | fingerprint | four places
  static_assert(offsetof(Record, status) == 0 && offsetof(Record, flags) == 3 &&
                offsetof(Record, row_bytes) == 4 && offsetof(Record, extra) == 8 &&
                offsetof(Record, rows) == 12 && offsetof(Record, fingerprint) == 16 &&
                offsetof(Record, rows_in) == 24 && offsetof(Record, extra_in) == 48);
  constexpr std::uint64_t kFlagsMask = ~(std::uint64_t{kWideIndices} << 24);
  const std::uint64_t first = words[0], second = words[1];
  const bool same = (first & kFlagsMask) == (own[0] & kFlagsMask) &&
                    static_cast<std::uint32_t>(second) == static_cast<std::uint32_t>(own[1]) &&
                    words[2] == own[2] && static_cast<std::uint8_t>(first) == XD_SUCCESS;
  if (!same) {
    if (peer != rank()) s_.mismatch = 1;
    return true;
  }
  const bool wide = (first >> 24 & kWideIndices) != 0;
  const auto rows = static_cast<std::uint32_t>(second >> 32);
  PeerTensors& to = s_.peer[peer];
  bool there = true;
  const auto find = [&](std::uint64_t place, std::uint64_t row_bytes,
                        unsigned alignment) -> std::byte* {
    if (row_bytes == 0 || place == 0) return nullptr;
    std::byte* at = tensor_of(peer, place, row_bytes * rows, alignment);
    there &= at != nullptr;
    return at;
  };
  to.num_rows = rows;
  to.staged = words[3] >> TensorPlace::kOffsetBits == TensorPlace::kGroup;
  to.wide_indices = wide;
  to.rows = find(words[3], sizes.rows, kRowAlignment);
  to.scales = find(words[4], sizes.scales, sizes.scale_alignment);
  to.weights = find(words[5], sizes.weights, sizeof(float));
  to.extra = wide ? find(words[6], 2 * sizes.extra, sizeof(std::int64_t))
                  : find(words[6], sizes.extra, sizeof(std::int32_t));
  if (sizes.partials != 0 && words[6] != 0) {
    to.extra = tensor_of(peer, words[6], sizes.partials, kRowAlignment);
    there &= to.extra != nullptr;
  }
  return there;
}

// All threads of every block. False = fatal.
__device__ inline bool Turn::await(const RowSizes& sizes) {
  bool failed = false, missing = false;
  for (int peer = static_cast<int>(threadIdx.x); peer < ranks();
       peer += static_cast<int>(blockDim.x)) {
    if (peer != rank() && !wait_record(peer)) {
      failed = true;
      break;
    }
    missing |= !take_record(peer, sizes);
  }
  if (any_failed(failed)) return false;
  // Read before the barrier: a compiler may let all threads read what thread 0 writes behind it.
  const bool undisturbed = s_.status == XD_SUCCESS;
  const bool some_missing = __syncthreads_or(missing ? 1 : 0) != 0;
  if (threadIdx.x == 0 && undisturbed) {
    if (s_.mismatch != 0) {
      set_setback(XD_ERROR_MISMATCH);
    } else if (p_.plan != nullptr && refused(s_.plan)) {
      set_setback(XD_ERROR_OVERFLOW);
    } else if (some_missing) {  // perhaps for this block alone
      set_setback(XD_ERROR_MISMATCH);
      s_.verdict = static_cast<int>(Verdict::blank);
    }
  }
  __syncthreads();
  return true;
}

// ---- Waits inside the operation ----------------------------------------------------------------

__device__ inline bool Turn::wait_chunk(int source, int chunk) const {
  const std::uint64_t* flag = chunk_at(rank(), source, chunk);
  const std::uint64_t expected = s_.epoch;
  return device::wait_until(
      p_.group.comm, site(XD_PHASE_ROWS), source,
      [=] { return ptx::ld_acquire_sys(flag) == expected; },
      [=] { return ptx::ld_acquire_sys(flag); });
}

__device__ inline bool Turn::wait_done(int source, std::uint64_t& flag) const {
  const std::uint64_t* at = done_at(rank(), source);
  const std::uint64_t expected = s_.epoch;
  return device::wait_until(
      p_.group.comm, site(XD_PHASE_DONE), source,
      [=, &flag] {
        flag = ptx::ld_acquire_sys(at);
        return (flag & ~kFoundMissing) == expected;
      },
      [=] { return ptx::ld_acquire_sys(at) & ~kFoundMissing; });
}

__device__ inline bool Turn::barrier(std::uint32_t n) {
  __syncthreads();
  bool failed = false;
  if (threadIdx.x == 0) {
    std::uint32_t* arrived = &p_.group.control->barrier;
    const std::uint32_t expected = n * gridDim.x;
    // Release and acquire: what any block has stored before, all blocks see after.
    if (ptx::add_acq_rel_gpu(arrived, 1) + 1 < expected) {
      // A block that is late waits for a peer, and that wait is the one to run out.
      device::WaitSite blocks = site(XD_PHASE_NONE);
      blocks.timeouts = 2;
      failed = !device::wait_until(
          p_.group.comm, blocks, -1, [=] { return ptx::ld_acquire_gpu(arrived) >= expected; },
          [] { return std::uint64_t{0}; });
    }
  }
  return !any_failed(failed);
}

// ---- The end -----------------------------------------------------------------------------------

// Counts the block; true on all threads of the last one. Blank blocks are counted a second time, in
// the upper half, so that the last one knows of them without another look.
__device__ inline bool Turn::is_last_block(std::uint32_t* counter) {
  constexpr std::uint32_t kBlank = 1u << 16;
  __syncthreads();
  if (threadIdx.x == 0) {
    const std::uint32_t mine = verdict() == Verdict::blank ? 1 + kBlank : 1;
    // Release and acquire: what any block has stored before, the last one sees.
    const std::uint32_t all = ptx::add_acq_rel_gpu(counter, mine) + mine;
    s_.is_last = all % kBlank == gridDim.x ? 1 : 0;
    s_.some_blank = all >= kBlank ? 1 : 0;
  }
  __syncthreads();
  return s_.is_last != 0;
}

__device__ inline void Turn::raise_done() {
  // Another block may have left its rows: it wrote the error down before it was counted.
  if (verdict() == Verdict::fatal || device::failed(p_.group.comm)) return;
  for (int i = static_cast<int>(threadIdx.x); i < ranks(); i += static_cast<int>(blockDim.x)) {
    const int peer = (rank() + 1 + i) % ranks();
    // Release: who sees this epoch also sees every row written there, and none is read any more.
    ptx::st_release_sys(done_at(peer, rank()), s_.epoch | (s_.some_blank != 0 ? kFoundMissing : 0));
  }
}

// All threads of every block. Bulk stores have been waited for by the threads that issued them.
__device__ inline void Turn::finish() {
  if (is_last_block(&p_.group.control->finished)) raise_done();
}

__device__ inline void Turn::leave() {
  if (!is_last_block(&p_.group.control->finished)) return;
  raise_done();
  end_launch();
}

// The lowest rank that this rank's error is about, as far as that shows without the records.
__device__ inline int Turn::rank_concerned() const {
  const bool own = p_.record.status != XD_SUCCESS || s_.fault.kind != PlanFault::none;
  return own                                      ? rank()
         : s_.status == XD_ERROR_OVERFLOW         ? s_.plan.overflow_rank
         : s_.status == XD_ERROR_INVALID_ARGUMENT ? s_.plan.bad_id_rank
         : s_.finder != ranks()                   ? s_.finder
                                                  : -1;
}

// The operation's error becomes the communicator's: kernels behind it leave at once, and the host
// hears of it. The peers' kernels meet an error of this operation, too, and need not be told.
__device__ inline void Turn::finish_comm() const {
  FatalError error =
      device::error_at(p_.group.comm, site(XD_PHASE_NONE), s_.status, rank_concerned());
  error.met_by_all = 1;
  p_.group.report->fatal_launch = p_.launch;  // raise() releases it to the host
  device::raise(p_.group.comm, error, device::Spread::here);
}

__device__ inline void Turn::report() {
  Report* to = p_.group.report;
  const std::uint32_t written = ptx::ld_relaxed_sys(&to->written);
  if (written != ptx::ld_acquire_sys(&to->taken)) return;
  to->status = s_.status;
  to->operation = p_.record.operation;
  to->epoch = s_.epoch;
  to->fault = s_.fault;
  to->bad_ids = s_.plan.bad_ids;
  to->needed_rows = s_.plan.overflow_needed;
  to->capacity_rows = s_.plan.overflow_capacity;
  to->rank = rank_concerned();
  if (s_.status == XD_ERROR_MISMATCH) {
    auto* records = reinterpret_cast<std::uint64_t*>(to->record);
    for (int r = 0; r < ranks(); ++r) read_record(r, records + r * kRecordWords);
  }
  ptx::st_release_sys(&to->written, written + 1);
}

// All threads of every block, after finish() and what came behind it.
__device__ inline void Turn::close() {
  if (is_last_block(&p_.group.control->left)) end_launch();
}

// The launch's last block reports and moves the epoch on.
__device__ inline void Turn::end_launch() {
  bool failed = verdict() == Verdict::fatal || device::failed(p_.group.comm);
  for (int peer = static_cast<int>(threadIdx.x); peer < ranks() && !failed;
       peer += static_cast<int>(blockDim.x)) {
    std::uint64_t flag = 0;
    failed = !wait_done(peer, flag);
    if ((flag & kFoundMissing) != 0) atomicMin(&s_.finder, peer);
  }
  failed = any_failed(failed);
  if (threadIdx.x != 0) return;
  if (s_.finder != ranks() && s_.status == XD_SUCCESS) s_.status = XD_ERROR_MISMATCH;
  Control* control = p_.group.control;
  if (!failed && s_.status != XD_SUCCESS) {
    // A failure of the host's own checks is known to the host already.
    if (p_.record.status == XD_SUCCESS) report();
    ptx::st_release_sys(&p_.group.report->errors, ++control->errors);
    if (p_.group.fatal_errors) finish_comm();
  }
  control->epoch = s_.epoch;
  control->barrier = control->finished = control->left = 0;
  control->next_unit[0] = control->next_unit[1] = 0;
  control->counts_hash = 0;
  // Release: the next launch finds all this.
  __threadfence();
  control->owner = s_.epoch << 32;
}

}  // namespace xd::ep::cuda
