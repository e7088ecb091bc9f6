// The table of slots (ep/plan/slot_table.h) of a group on a CUDA device. Kernels find it at
// addresses that stay, so captured graphs follow its changes.
//
//   memory            written by                             read by
//   table in force    the host, before any operation; then   kernels of later operations
//                     the kernel of a change, where all
//                     ranks agree (slot_table.cuh)
//   image of a table  the host, in the call of a change      that kernel
//   ids               the kernel of to_slots()               dispatch of low latency, behind it
//   loads             prepare                                the kernel of tell_loads()
//   unplaced, told    prepare, the kernel of to_slots();     the same, later
//                     blocks add to `unplaced` atomically
//
// A group's operations come one after another on their streams, and no word is read while another
// operation may write it. So plain loads and stores do, but for two words that kernels and host
// share in pinned memory:
//
//   image_read  released (system) by the change's kernel behind a barrier of its block, when all
//               threads have read the image; acquired by the host before it writes that again. The
//               host's writes come before the launch that reads them
//   told        relaxed: a count that stands for itself
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "base/tensor.h"
#include "cuda/memory.h"
#include "ep/plan/config.h"
#include "ep/plan/cuda/slot_table.h"
#include "ep/plan/slot_table.h"

namespace xd::ep::cuda {

class DeviceSlotTable {
 public:
  // The most slots in the lists of one rank together.
  static constexpr std::size_t kMostChoices = 65536;

  // Groups without logical experts have none.
  DeviceSlotTable() = default;
  // `first`: the table of a new group. Throws OUT_OF_MEMORY.
  DeviceSlotTable(const CommonConfig& config, const SlotTable& first, int rank, int device,
                  bool counts_loads);
  // The memory that one takes, in bytes; 0 for groups without logical experts.
  static std::uint64_t bytes(const CommonConfig& config, bool counts_loads);

  explicit operator bool() const { return memory_.data() != nullptr; }
  SlotTableDevice* device() const { return memory_.as<SlotTableDevice>(); }

  // Prepares a change, and calls launch(change), which starts the kernel that ends it. Never waits.
  // Throws INVALID_ARGUMENT where the lists are too long, OUT_OF_MEMORY, and what launch() throws.
  template <class Launch>
  void change(const SlotTable& table, Launch&& launch) {
    const SlotTableChange change = prepare_change(table);
    try {
      launch(change);
    } catch (...) {
      set_read(change.image_read);
      throw;
    }
  }

  // Starts the kernel that puts slots in the place of the ids of a batch: [T,K] int32, in memory of
  // the group that the next batch writes again. `dependent`: as of launch_dependent(). For dispatch
  // of low latency, whose groups without a table would wait for its code (docs/internals).
  Tensor to_slots(const Tensor& topk_idx, const Tensor& replica_hint, bool dependent,
                  cudaStream_t stream) const;

  // Choices of experts without a slot, in all batches whose kernels have ended. Any thread.
  std::int64_t unplaced() const;

  // Starts the kernel that tells the loads: int64 [W,N], or [N] over all ranks.
  void tell_loads(const Tensor& out, bool clear, cudaStream_t stream) const;

 private:
  struct Layout;
  struct Image {
    xd::cuda::PinnedBlock memory;
    std::size_t room = 0;  // words

    std::uint32_t* read() const { return memory.as<std::uint32_t>(); }
    std::uint32_t* words() const { return memory.as<std::uint32_t>() + 1; }
  };

  static Layout layout_of(const CommonConfig& config, bool counts_loads);
  SlotTableChange prepare_change(const SlotTable& table);
  static void set_read(std::uint32_t* image_read);
  std::vector<std::uint32_t> words_of(const SlotTable& table) const;
  Image& free_image(std::size_t words);

  CommonConfig config_;
  int rank_ = 0, device_ = -1;
  xd::cuda::DeviceBuffer memory_;
  SlotList* lists_ = nullptr;
  std::int32_t* ids_ = nullptr;
  unsigned long long* loads_ = nullptr;
  xd::cuda::PinnedBlock told_;  // the host's copy of SlotTableDevice::told
  std::vector<Image> images_;   // more than one where changes are called faster than they run
};

// Loads the kernels on the current device.
void load_slot_table();

}  // namespace xd::ep::cuda
