// One rank's expert parallelism: its operations, on copies of tensors that the cache does not hold,
// and their checks.
#pragma once

#include <vector>

#include "../ep_calls.h"
#include "rank.h"

namespace bench::gpu {

class EpRank {
 public:
  EpRank(const RankContext& context, bool staged);

  // Bytes of symmetric memory that a rank takes, with some room for rounding.
  static std::size_t heap_bytes(const Batch& batch, int rank, int device, bool staged);

  // Makes a group with this budget and a plan, fills every receive tensor by a dispatch.
  // Collective.
  void open(int num_sms);

  // Enqueues one operation; `iteration` picks the copies of its tensors.
  void enqueue(Operation operation, int iteration) { calls_.call(operation, iteration); }

  // The longest repetition of tensors: iterations this far apart are the same.
  int period() const { return std::max(in_.tokens.copies(), calls_.recv().copies()); }

  // Runs the operation once over poisoned outputs and compares every element with its expected
  // value. Collective.
  void check(Operation operation);

  // Compares the outputs that the last of many repetitions has left.
  void check_left_by(Operation operation, int last_iteration) const;

  // Throws if an operation of this rank has failed on the device. The stream must have come to
  // rest.
  void check_status() const;

  xd_ep_memory group_memory() const { return calls_.group_memory(); }

 private:
  void poison(const Tensor& tensor) const;
  void check_received(Operation operation, int copy) const;
  void check_sums(Operation operation) const;
  void check_weights(Operation operation) const;
  std::vector<Origin> received_origins(bool scaled) const;
  std::vector<Origin> sum_origins(bool scaled) const;

  const RankContext& at_;
  const Traffic traffic_;
  const Payload payload_, scale_payload_;
  // Rows that dispatch leaves, sums that dispatch_bwd leaves, and those of combine_bwd and combine.
  const DeviceArray<Origin> received_, sums_, scaled_, scaled_sums_;
  const EpInputs in_;
  EpCalls calls_;
};

}  // namespace bench::gpu
