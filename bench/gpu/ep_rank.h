// One rank's expert parallelism: tensors, group and plan of a batch, and the operations on them.
#pragma once

#include <optional>
#include <string>

#include "rank.h"

namespace bench::gpu {

enum class Operation { prepare, dispatch, combine, dispatch_bwd, combine_bwd };
inline constexpr const char* kOperationNames[] = {"prepare", "dispatch", "combine", "dispatch_bwd",
                                                  "combine_bwd"};
inline const char* name_of(Operation operation) {
  return kOperationNames[static_cast<int>(operation)];
}

class EpRank {
 public:
  EpRank(const RankContext& context, bool staged);

  // Bytes of symmetric memory that a rank takes, with some room for rounding.
  static std::size_t heap_bytes(const Batch& batch, int rank, int device, bool staged);

  // Makes a group with this budget and a plan, fills every receive tensor by a dispatch.
  // Collective.
  void open(int num_sms);

  // Enqueues one operation; `iteration` picks the copies of its tensors.
  void enqueue(Operation operation, int iteration);

  // The longest repetition of tensors: iterations this far apart are the same.
  int period() const { return std::max(tokens_.copies(), recv_.copies()); }

  // Runs the operation once over poisoned outputs and compares every element with its expected
  // value. Collective.
  void check(Operation operation);

  // Compares the outputs that the last of many repetitions has left.
  void check_left_by(Operation operation, int last_iteration) const;

  // Throws if an operation of this rank has failed on the device. The stream must have come to
  // rest.
  void check_status() const;

  xd_ep_memory group_memory() const;

 private:
  xd_ep_config group_config(int num_sms) const;
  void prepare();
  void dispatch(int copy);
  void combine(int copy);
  void dispatch_bwd(int copy);
  void combine_bwd(int copy);
  template <class Args>
  Args with_plan(Args args) const;

  void poison(const Tensor& tensor) const;
  void check_received(int copy) const;
  void check_sums() const;
  void expect_none_wrong(const DeviceArray<unsigned long long>& wrong, const char* what) const;
  std::vector<Origin> received_origins() const;
  std::vector<Origin> sum_origins() const;

  const RankContext& at_;
  const bool staged_;
  const Traffic traffic_;
  const Payload payload_, scale_payload_;
  const DeviceArray<Origin> received_, sums_;
  const DeviceArray<std::int32_t> choices_;
  std::int64_t choices_shape_[2];
  DLTensor topk_idx_{};
  Tensor tokens_, scales_, recv_, recv_scales_, out_;
  xd_ep_config config_{};
  Group group_;
  std::optional<Memory> plan_;
};

}  // namespace bench::gpu
