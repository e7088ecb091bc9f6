// One rank's low-latency operations: tensors, group and plan of a batch.
#pragma once

#include "rank.h"

namespace bench::gpu {

class LlRank {
 public:
  // Collective.
  explicit LlRank(const RankContext& context);

  void dispatch(xd_ll_phase phase = XD_LL_PHASE_BOTH);
  void dispatch_fp8(xd_ll_phase phase = XD_LL_PHASE_BOTH);
  void combine(xd_ll_phase phase = XD_LL_PHASE_BOTH);

  // Dispatches and combines once over poisoned outputs, and compares all sums. The experts return
  // their rows unchanged. Collective.
  void check();
  // Throws if an operation of this rank has failed on the device. The stream must have come to
  // rest.
  void check_status() const;
  xd_ll_memory memory() const;

 private:
  // A tensor [L,S,columns] in ordinary memory.
  struct SlotTensor {
    SlotTensor(const RankContext& at, DLDataType type, std::int64_t columns);
    Memory memory;
    std::int64_t shape[3];
    DLTensor dl{};
  };

  const RankContext& at_;
  const Traffic traffic_;
  const Payload payload_;
  const DeviceArray<std::int32_t> choices_, counts_;
  std::int64_t choices_shape_[2], counts_shape_[1];
  DLTensor topk_idx_{}, counts_tensor_{};
  Tensor tokens_, out_;
  SlotTensor recv_, recv_fp8_, scales_;
  xd_ll_config config_ = XD_LL_CONFIG_INIT;
  LlGroup group_;
  const Memory plan_memory_;
  xd_ll_dispatch_args dispatch_ = XD_LL_DISPATCH_ARGS_INIT;
  xd_ll_combine_args combine_ = XD_LL_COMBINE_ARGS_INIT;
};

}  // namespace bench::gpu
