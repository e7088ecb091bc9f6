// The turn of an operation of expert parallelism (turn/device/turn.cuh): what a launch checks of
// its plan and its part while the turn begins, where the peers' receive tensors lie, and the flags
// of chunks.
//
//   memory              written by                       read by
//   GroupState::order   the thread that ends a launch    all blocks of the next one, as they begin
#pragma once

#include "base/hash.h"
#include "ep/bulk/cuda/params.h"
#include "ep/bulk/family.h"
#include "ep/plan/cuda/warp.cuh"
#include "turn/device/turn.cuh"

namespace xd::ep::cuda {

using turn::Verdict;

// A peer's receive tensors, as addresses in this process.
struct PeerTensors {
  std::byte* rows;
  std::byte* scales;
  std::byte* weights;
  std::byte* extra;
  std::uint32_t num_rows;
  bool staged;        // its rows are copied out of its staging memory
  bool wide_indices;  // its recv_topk_idx is int64
  PartRows part;      // of the call's part, where Turn::selects()
};

struct TurnShared : turn::DeviceTurnShared<Record> {
  int first_zone, zones_end;
  Fault fault;
  bool has_sums;      // PartOrder
  bool out_of_order;  // so the order finds a fault
  CallPart part;
  Scope scope;
  unsigned long long sum;
  PlanHeader plan;
  PeerTensors peer[kMaxDeviceRanks];
  std::uint32_t base[kMaxDeviceRanks + 1];
};

// Sizes of one row of each tensor that peers offer; 0 = not used in this operation.
struct OfferedSizes {
  std::uint64_t rows, scales, weights, extra;
  std::uint64_t partials;  // bytes of all partial sums, which then take the place of `extra`
  unsigned scale_alignment = 1;
};

class Turn : public turn::DeviceTurn<Turn, Family, TurnParams, TurnShared> {
 public:
  using DeviceTurn::DeviceTurn;

  // Returns when every peer has entered, all agree, and their tensors are found. All threads of
  // every block call it. False after a fatal error.
  __device__ bool await(const OfferedSizes& sizes) {
    return DeviceTurn::await(
        [&](int peer, const Record& record) { return find_tensors(peer, record, sizes); });
  }

  __device__ const PlanHeader& plan() const { return s_.plan; }
  // The call's part and its rows; of a call without a part, all of them. After begin().
  __device__ const CallPart& part() const { return s_.part; }
  __device__ const Scope& scope() const { return s_.scope; }
  // True if a block has something to move.
  __device__ bool moves() const { return verdict() == Verdict::go && !s_.scope.empty; }
  // True if that is a part of the plan's rows.
  __device__ bool selects() const { return p_.part != 0 && s_.scope.part != 0; }
  // Behind leave(): this block was the last one that left, and has done the work of that one.
  __device__ bool left_last() const { return s_.is_last != 0; }
  __device__ const PeerTensors& peer(int rank) const { return s_.peer[rank]; }
  __device__ std::uint64_t* chunk_at(int owner, int source, int chunk) const {
    return words(owner, p_.group.map.chunk) +
           static_cast<std::uint64_t>(source) * p_.group.chunk_stride + chunk;
  }
  // Waits for a source's flag of a chunk; single threads. False after a fatal error.
  __device__ bool wait_chunk(int source, int chunk) const;

  // The warp's lanes release a chunk's flag to every rank d with wanted(d). All lanes call it. The
  // release covers all earlier stores of the warp.
  template <class Wanted>
  __device__ void release_chunk(int chunk, Wanted wanted) const {
    __syncwarp();
#pragma unroll 1
    for (int d = static_cast<int>(threadIdx.x % 32); d < ranks(); d += 32) {
      if (wanted(d)) ptx::st_release_sys(chunk_at(d, rank(), chunk), s_.epoch);
    }
  }

 private:
  friend class turn::DeviceTurn<Turn, Family, TurnParams, TurnShared>;

  // The part of a plan's head that one thread has seen.
  struct HeadLook {
    std::uint64_t sum;  // its part of the checksum
    bool damaged;       // a zone makes no sense
  };

  // See turn::DeviceTurn, "Functions that a family adds".
  __device__ HeadLook look();
  __device__ void judge(const HeadLook& look);
  __device__ void complete(Record& own) const;
  __device__ int obstacle() const {
    return p_.plan != nullptr && refused(s_.plan) ? XD_ERROR_OVERFLOW : XD_SUCCESS;
  }
  __device__ int rank_concerned() const {
    return s_.status == XD_ERROR_OVERFLOW ? s_.plan.overflow_rank : s_.plan.bad_id_rank;
  }
  __device__ void report(Findings& findings) const {
    findings = {s_.fault, s_.plan.bad_ids, s_.plan.overflow_needed, s_.plan.overflow_capacity, {}};
    if (s_.out_of_order) findings.order = p_.group.control->order.fault(step());
  }
  __device__ void reset() const {
    p_.group.control->next_unit[0] = p_.group.control->next_unit[1] = 0;
  }
  __device__ void conclude() const;

  __device__ PartOrder::Step step() const;
  __device__ bool between_machines() const { return p_.group.control->remote != nullptr; }
  __device__ bool is_out_of_order() const;
  __device__ void take_part(Record& own) const;
  __device__ HeadLook look_at_plan();
  __device__ std::uint64_t sum_of_bounds() const;
  static constexpr int kParts = 3;
  __device__ void check_plan(const HeadLook& look);
  __device__ bool has_fault(int part) const;
  __device__ Fault plan_fault(bool zone_damaged) const;
  __device__ bool find_tensors(int peer, const Record& record, const OfferedSizes& sizes);
};

// All threads.
__device__ inline Turn::HeadLook Turn::look() {
  if (thread() == 0) s_.sum = 0;
  load_table(2, p_.group.base, ranks() + 1, s_.base);
  return p_.plan != nullptr ? look_at_plan() : HeadLook{0, false};
}

__device__ inline void Turn::judge(const HeadLook& look) {
  if (thread() == 0) {
    s_.fault = {};
    s_.out_of_order = false;
    s_.part = {};
    s_.scope = {};
  }
  if (p_.plan != nullptr) check_plan(look);
}

__device__ inline void Turn::complete(Record& own) const {
  if (own.call.status == XD_SUCCESS && s_.fault) {
    own.call.status = XD_ERROR_INVALID_ARGUMENT;
  }
  if (p_.plan != nullptr) {
    own.rows = static_cast<std::uint32_t>(s_.plan.recv_rows);
    own.fingerprint = s_.plan.fingerprint;
    if (p_.part != 0 || s_.has_sums) take_part(own);
  } else if (own.call.operation == XD_EP_PREPARE && p_.group.slots != nullptr) {
    own.fingerprint = p_.group.slots->hash;
  }
}

// ---- Parts -------------------------------------------------------------------------------------

// The call as a step in the order of parts.
__device__ inline PartOrder::Step Turn::step() const {
  const bool has_rows = s_.plan.recv_rows > 0;
  PartOrder::Step step{s_.own, s_.part, {has_rows && p_.staged.rows, has_rows && p_.staged.scales}};
  step.record.fingerprint = s_.plan.fingerprint;
  return step;
}

__device__ __noinline__ inline bool Turn::is_out_of_order() const {
  return static_cast<bool>(p_.group.control->order.fault(step()));
}

// Thread 0, where the call has a part, or may not be made because of another operation's.
__device__ inline void Turn::take_part(Record& own) const {
  if (own.call.status != XD_SUCCESS) return;
  s_.part = call_part(s_.plan, p_.part);
  if (!refused(s_.plan) && is_out_of_order()) {
    s_.out_of_order = true;
    own.call.status = XD_ERROR_INVALID_ARGUMENT;
  }
  own.fingerprint |= static_cast<std::uint64_t>(s_.part.part);
  const bool works_there = makes_sums(own.call.operation) ? s_.part.ends() : s_.part.begins();
  s_.scope = scope_of(s_.part, between_machines(), works_there);
}

// One thread of the last block. A prepare that has made its plan ends nothing, also where that has
// bad ids or overflows.
__device__ inline void Turn::conclude() const {
  const bool prepares = p_.record.call.operation == XD_EP_PREPARE;
  const bool good = s_.status == XD_SUCCESS || (prepares && s_.own.call.status == XD_SUCCESS &&
                                                s_.status != XD_ERROR_MISMATCH);
  if (good && s_.part.whole()) return;
  PartOrder& order = p_.group.control->order;
  if (good) {
    order.advance(step());
  } else {
    order.clear();
  }
  __threadfence();
}

// ---- The plan ----------------------------------------------------------------------------------

// Reads the plan's head, if it is as long as this group's plans without parts: all words in front
// of their codes.
__device__ inline Turn::HeadLook Turn::look_at_plan() {
  const auto* words = reinterpret_cast<const std::uint64_t*>(p_.plan);
  constexpr std::uint64_t kHeaderWords = sizeof(PlanHeader) / sizeof(std::uint64_t);
  constexpr std::uint64_t kChecksumWord = offsetof(PlanHeader, checksum) / sizeof(std::uint64_t);
  const std::uint64_t end = min(p_.group.plan_head_bytes, p_.plan_bytes) / sizeof(std::uint64_t);
  HeadLook look{0, false};
  if (threadIdx.x == blockDim.x / 2) s_.has_sums = p_.group.control->order.has_sums();
#pragma unroll 1
  for (std::uint64_t i = threadIdx.x; i < end; i += blockDim.x) {
    const std::uint64_t word = words[i];
    if (i < kHeaderWords) reinterpret_cast<std::uint64_t*>(&s_.plan)[i] = word;
    if (i != kChecksumWord) look.sum += hash_entry(i, word);
  }
  if (end * sizeof(std::uint64_t) < p_.group.plan_head_bytes) return look;
  const int local = p_.group.local_experts;
  const auto* count = reinterpret_cast<const std::int32_t*>(p_.plan + sizeof(PlanHeader));
  const std::int32_t* offset = count + local;
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < local; e += static_cast<int>(blockDim.x)) {
    look.damaged |= zone_is_damaged(count[e], offset[e], offset[e + 1]);
  }
  if (threadIdx.x == blockDim.x - 1) {
    s_.first_zone = offset[0];
    s_.zones_end = offset[local];
  }
  return look;
}

// This thread's part of the checksum over the bounds of parts, behind the head of plans without
// parts.
__device__ __noinline__ inline std::uint64_t Turn::sum_of_bounds() const {
  const PlanHeader& h = s_.plan;
  // Then there is a fault, and these bytes may not be there.
  if (header_fault(h, p_.plan_bytes) || extent_of(h).checked != p_.group.plan_head_bytes) return 0;
  const auto* words = reinterpret_cast<const std::uint64_t*>(p_.plan);
  const std::uint64_t end = extent_of(h, ep::parts_of(h)).checked / sizeof(std::uint64_t);
  std::uint64_t sum = 0;
#pragma unroll 1
  for (std::uint64_t i = p_.group.plan_head_bytes / sizeof(std::uint64_t) + threadIdx.x; i < end;
       i += blockDim.x) {
    sum += hash_entry(i, words[i]);
  }
  return sum;
}

// All threads call it. Every block comes to the same verdict, since it looks at the same bytes.
// Mostly a plan has no fault, so warps first ask only whether it has one, each about a part of it.
__device__ inline void Turn::check_plan(const HeadLook& look) {
  std::uint64_t sum = look.sum;
  if ((s_.plan.version & PlanHeader::kHasParts) != 0) sum += sum_of_bounds();
  add_of_warp(&s_.sum, sum);
  bool faulty = look.damaged;
  if (lane_id() == 0) {
#pragma unroll 1
    for (int part = warps_per_block() - 1 - warp_in_block(); part < kParts;
         part += warps_per_block()) {
      faulty |= has_fault(part);
    }
  }
  faulty = __syncthreads_or(faulty ? 1 : 0) != 0;
  if (!faulty && s_.sum == s_.plan.checksum) return;
  const bool damaged = __syncthreads_or(look.damaged ? 1 : 0) != 0;
  if (thread() == 0) s_.fault = plan_fault(damaged);
}

// Any thread: whether some of plan_fault()'s questions, but for checksum and damaged zones, find a
// fault.
__device__ inline bool Turn::has_fault(int part) const {
  const PlanHeader& h = s_.plan;
  if (part == 0) {
    return header_fault(h, p_.plan_bytes) || extent_of(h).checked != p_.group.plan_head_bytes;
  }
  if (part == 1) return static_cast<bool>(binding_fault(h, p_.group.terms));
  bool faulty = static_cast<bool>(zones_fault(h, {false, s_.first_zone, s_.zones_end})) ||
                static_cast<bool>(part_fault(h, p_.part));
#pragma unroll 1
  for (int i = 0; i < p_.num_checks; ++i) {
    faulty |= static_cast<bool>(tensor_fault(h, p_.checks[i]));
  }
  return faulty;
}

// Thread 0.
__device__ __noinline__ inline Fault Turn::plan_fault(bool zone_damaged) const {
  const PlanHeader& h = s_.plan;
  if (const Fault fault = header_fault(h, p_.plan_bytes)) return fault;
  // A head of another length belongs to another group's plan.
  const bool same_head = extent_of(h).checked == p_.group.plan_head_bytes;
  if (same_head) {
    if (const Fault fault = checksum_fault(h, s_.sum)) return fault;
  }
  if (const Fault fault = binding_fault(h, p_.group.terms)) return fault;
  if (const Fault fault = part_fault(h, p_.part)) return fault;
#pragma unroll 1
  for (int i = 0; i < p_.num_checks; ++i) {
    if (const Fault fault = tensor_fault(h, p_.checks[i])) return fault;
  }
  if (!same_head) return {.kind = PlanFault::zones};
  return zones_fault(h, {zone_damaged, s_.first_zone, s_.zones_end});
}

// ---- Peers -------------------------------------------------------------------------------------

// One thread finds a rank's tensors; false if the rank offers some that do not exist.
__device__ inline bool Turn::find_tensors(int peer, const Record& record,
                                          const OfferedSizes& sizes) {
  PeerTensors& to = s_.peer[peer];
  bool there = true;
  const auto find_rows = [&](turn::PeerAddress address, std::uint64_t row_bytes,
                             unsigned alignment) -> std::byte* {
    if (row_bytes == 0 || !address) return nullptr;
    std::byte* at = find(peer, address, row_bytes * record.rows, alignment);
    there &= at != nullptr;
    return at;
  };
  to.num_rows = record.rows;
  if (selects()) {
    const int parts = s_.part.parts;
    const auto* bounds =
        reinterpret_cast<const std::int32_t*>(p_.plan + map_of(s_.plan, parts).part_end);
    to.part = rows_of_part(s_.part, bounds + peer * (parts - 1));
  }
  to.staged = record.rows_in.is_shared();
  to.wide_indices = (record.flags & kWideIndices) != 0;
  to.rows = find_rows(record.rows_in, sizes.rows, kRowAlignment);
  to.scales = find_rows(record.scales_in, sizes.scales, sizes.scale_alignment);
  to.weights = find_rows(record.weights_in, sizes.weights, sizeof(float));
  to.extra = to.wide_indices ? find_rows(record.extra_in, 2 * sizes.extra, sizeof(std::int64_t))
                             : find_rows(record.extra_in, sizes.extra, sizeof(std::int32_t));
  if (sizes.partials != 0 && record.extra_in) {
    to.extra = find(peer, record.extra_in, sizes.partials, kRowAlignment);
    there &= to.extra != nullptr;
  }
  return there;
}

__device__ inline bool Turn::wait_chunk(int source, int chunk) const {
  const std::uint64_t* flag = chunk_at(rank(), source, chunk);
  const std::uint64_t expected = s_.epoch;
  return device::wait_until(
      p_.group.comm, site(XD_PHASE_ROWS), source,
      [=] { return ptx::ld_acquire_sys(flag) == expected; },
      [=] { return ptx::ld_acquire_sys(flag); });
}

}  // namespace xd::ep::cuda
