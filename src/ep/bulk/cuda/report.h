// Brings the reports of kernels, and their counts of losses, to their group.
#pragma once

#include <cstdint>
#include <mutex>

#include "ep/bulk/cuda/params.h"
#include "ep/bulk/group.h"
#include "ep/plan/cuda/device_slot_table.h"

namespace xd::ep::cuda {

// The operation error that the report tells of.
OperationError operation_error_of(const Report& report, const Group& group);

// Counts the losses of all plans that kernels have made. Any thread.
class LossCounter {
 public:
  // Gives the group what has come since the last time. Never waits for kernels.
  void collect(Report& report, const DeviceSlotTable& slots, Group& group);

 private:
  std::mutex mutex_;
  // The parts of the totals that the group already has.
  std::uint64_t bad_ids_ = 0, dropped_rows_ = 0;
  std::int64_t unplaced_ = 0;
};

}  // namespace xd::ep::cuda
