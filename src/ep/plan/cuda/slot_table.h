// The table of slots (ep/plan/slot_table.h) of a group on a CUDA device, as its kernels find it:
// plain data. device_slot_table.h says who writes and reads it when.
#pragma once

#include <cstdint>

namespace xd::ep::cuda {

// In device memory.
struct SlotTableDevice {
  std::uint64_t hash;           // SlotTable::hash() of the table in force
  const std::int32_t* experts;  // [E] SlotTable::experts()
  unsigned long long* loads;    // [W][N] choices by their tokens' ranks; nullptr = not counted
  int logical_experts;          // N
  std::uint32_t arrived;        // blocks that have ended, of the kernel of to_slots() that runs
  unsigned long long unplaced;  // choices of experts without a slot, in all batches
  unsigned long long told;      // of these, the host has been told so many
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
