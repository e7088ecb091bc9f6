// A group's table of slots in kernels: slots of a batch's ids, choices without one, and the end of
// a change of the table, in the kernel that has met its peers.
#pragma once

#include "cuda/ptx.cuh"
#include "ep/plan/cuda/slot_table.h"
#include "ep/plan/slot_table.h"

namespace xd::ep::cuda {

__device__ inline std::int64_t id_at(const BatchIds& ids, std::int64_t choice) {
  return ids.wide ? static_cast<const std::int64_t*>(ids.data)[choice]
                  : static_cast<const std::int32_t*>(ids.data)[choice];
}

// The entry of an expert's list that a token of the rank takes.
__device__ inline std::uint64_t entry_in(SlotList list, const BatchIds& ids, std::int64_t token,
                                         int rank) {
  const std::int64_t hint = ids.hints == nullptr ? token
                            : ids.wide_hints ? static_cast<const std::int64_t*>(ids.hints)[token]
                                             : static_cast<const std::int32_t*>(ids.hints)[token];
  return SlotTable::entry_of(static_cast<std::uint64_t>(hint), static_cast<std::uint64_t>(rank),
                             list.count);
}

// The slot of a choice of one of ids.experts; SlotTable::kNoSlot where it has none. A token's equal
// choices have equal slots, and others do not. `table`: nullptr = ids name slots themselves.
__device__ inline int slot_of(const SlotTableDevice* table, const BatchIds& ids, int expert,
                              std::int64_t token, int rank) {
  if (table == nullptr) return expert;
  const auto word = reinterpret_cast<const std::uint64_t*>(table + 1)[expert];
  const SlotList list{static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)};
  if (list.count <= 1) return list.count == 1 ? static_cast<int>(list.first) : SlotTable::kNoSlot;
  return static_cast<int>(table->slots[list.first + entry_in(list, ids, token, rank)]);
}

// One thread, when all of the batch have added theirs. It writes only what has changed, as the host
// is behind PCIe.
__device__ inline void tell_unplaced(SlotTableDevice& table) {
  const unsigned long long total = atomicAdd(&table.unplaced, 0ull);
  if (total == table.told) return;
  table.told = total;
  ptx::st_relaxed_sys(table.host_told, total);
}

// All threads of one block. `agreed`: all ranks take the table; else the old one stays.
__device__ inline void end_change(const SlotTableChange& change, bool agreed) {
  if (change.image == nullptr) return;
  if (agreed) {
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x; i < change.image_words; i += blockDim.x) {
      change.words[i] = change.image[i];
    }
    if (threadIdx.x == 0) change.table->hash = change.hash;
  }
  __syncthreads();
  if (threadIdx.x == 0) ptx::st_release_sys(change.image_read, 1);
}

}  // namespace xd::ep::cuda
