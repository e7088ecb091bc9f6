// The table of slots (ep/plan/slot_table.h) of a group on a CUDA device, as its kernels find it:
// plain data. device_slot_table.h says who writes and reads it when.
#pragma once

#include <cstdint>

#include "base/tensor.h"
#include "ep/plan/config.h"

namespace xd::ep::cuda {

// The slots that a rank's tokens take for a logical expert.
struct alignas(8) SlotList {
  std::uint32_t count;
  std::uint32_t first;  // the slot, where there is one; else where the expert's slots begin
};

// In device memory, with the lists behind it. SlotTableDevice and lists are aligned alike.
struct SlotTableDevice {
  std::uint64_t hash;           // SlotTable::hash() of the table in force
  const std::int32_t* experts;  // [E] SlotTable::experts()
  const std::uint32_t* slots;   // of the lists
  unsigned long long* loads;    // [W][N] choices by their tokens' ranks; nullptr = not counted
  unsigned long long unplaced;  // choices of experts without a slot, in all batches
  unsigned long long told;      // of these, the host has been told so many
  std::uint64_t* host_told;     // the host's copy
  int logical_experts;          // N
  std::uint32_t arrived;        // blocks that have ended, of the kernel of to_slots() that runs
};

// The ids of a batch, as its kernel gets them.
struct BatchIds {
  const void* data;       // [T,K]
  const void* hints;      // [T], where a table has replicas; nullptr = the tokens' numbers
  int experts;            // ids below it name one
  bool wide, wide_hints;  // int64, else int32

  static BatchIds of(const CommonConfig& config, const Tensor& topk_idx, const Tensor& hints) {
    return {.data = topk_idx.data,
            .hints = hints ? hints.data : nullptr,
            .experts = config.num_ids(),
            .wide = topk_idx.type == DType::i64,
            .wide_hints = hints.type == DType::i64};
  }
};

// A change of the table, as its kernel gets it.
struct SlotTableChange {
  const std::uint32_t* image = nullptr;  // in pinned memory; nullptr = nothing changes
  std::uint32_t image_words = 0;
  std::uint32_t* image_read = nullptr;  // is 1 when the image may be written again
  std::uint32_t* words = nullptr;       // the place of the image's words in device memory
  std::uint64_t hash = 0;
  SlotTableDevice* table = nullptr;
};

}  // namespace xd::ep::cuda
