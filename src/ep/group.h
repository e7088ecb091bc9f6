// A group, as every executor has it: a sequence of operations whose sizes all ranks have agreed on.
// An executor derives from it and carries the operations out.
#pragma once

#include <crossdock/ep.h>
#include <crossdock/low_latency.h>

#include <memory>
#include <span>
#include <vector>

#include "comm/comm.h"
#include "comm/hosts.h"
#include "comm/rank_set.h"
#include "ep/bulk/calls.h"
#include "ep/family.h"
#include "ep/plan/config.h"
#include "ep/plan/plan.h"
#include "turn/sequence.h"

namespace xd::ep {

// The place of a receive tensor's staging memory, from GroupMap, and whether every group has it.
struct Staging {
  std::uint64_t offset;
  bool always;
};

// How peers reach a receive tensor.
struct Reach {
  turn::RemoteAddress address;
  bool staged;  // through this rank's staging memory
};

// The parts of a rank's batches that an executor keeps, by that rank's config.
using KeepsOf = Keeps (*)(const Config& config);

// The shared memory that a group takes on one rank, and how much less it would be without staging.
xd_ep_memory shared_memory_of(const Config& config, KeepsOf keeps_of);

class Group : public turn::Sequence<Family> {
 public:
  // An executor has one class for groups of EXPERT_SLOTS and one for the other layouts. Each
  // implements its own operations; the others are refused, which takes no turn.
  virtual void prepare(const xd_ep_prepare_args*, xd_stream) { refuse(); }
  virtual void dispatch(const xd_ep_dispatch_args*, xd_stream) { refuse(); }
  virtual void combine(const xd_ep_combine_args*, xd_stream) { refuse(); }
  virtual void dispatch_bwd(const xd_ep_dispatch_bwd_args*, xd_stream) { refuse(); }
  virtual void combine_bwd(const xd_ep_combine_bwd_args*, xd_stream) { refuse(); }
  // A local call, which takes no turn.
  virtual void row_experts(const xd_ep_plan_row_experts_args*, xd_stream) { refuse(); }

  virtual void ll_dispatch(const xd_ep_ll_dispatch_args*, xd_stream) { refuse(); }
  virtual void ll_combine(const xd_ep_ll_combine_args*, xd_stream) { refuse(); }
  virtual void ll_mask_set(std::int32_t, std::int32_t, xd_stream) { refuse(); }
  virtual void ll_mask_get(const DLTensor*, xd_stream) { refuse(); }
  virtual void ll_reset(xd_stream) { refuse(); }

  // Takes this rank's turn with a failure, as Sequence does, where the group has the operation.
  void join_failed_operation(std::int32_t operation, const char* text, xd_stream stream);

  const Config& config() const { return config_; }
  // The config of a rank: like this rank's, except for the fields that may differ.
  const Config& config_of(int rank) const { return configs_[static_cast<std::size_t>(rank)]; }
  // All ranks, whose rows a rank receives.
  const RankSet& ranks() const { return ranks_; }
  // The ranks whose memory this rank reads and writes in operations, itself included.
  const NearRanks& near() const { return comm().hosts().near(); }
  NearRank self() const { return comm().hosts().self(); }
  // Whether sums are made by host, as they are where ranks have named several.
  bool sums_by_host() const { return comm().hosts().num_hosts() > 1; }
  std::span<const std::int64_t> capacities() const { return capacities_; }
  const RowCodec& codec() const { return *codec_; }
  CallContext call_context() const { return {&config_, comm().device()}; }
  // A number that tells this group from others, equal on all ranks.
  std::uint64_t nonce() const { return nonce_; }
  PlanBinding plan_binding() const {
    return {rank(), &config_, capacities_hash_, comm().hosts().fingerprint()};
  }

  // A tensor whose rows are packed and lie in symmetric memory is used there; others are staged.
  // Throws INVALID_ARGUMENT where there is no memory for that.
  Reach reach(const Tensor& tensor, const Staging& staging) const;

  // Collective: allocates this rank's group memory, and maps that of all near ranks. Returns the
  // segments by rank.
  Segments share_memory() const;

  // Rows of this rank's receive tensors, which an operation has gone through.
  void count_rows(std::int64_t rows, std::uint64_t row_bytes) {
    subject().counters().rows.add(at(rows));
    subject().counters().row_bytes.add(at(rows) * row_bytes);
  }
  // Brings the losses that kernels have reported here.
  virtual void collect_losses() {}

  // Bad ids and dropped rows of all plans, for the group's status and its numbers.
  void count_losses(std::int64_t bad_ids, std::int64_t dropped_rows) {
    subject().counters().bad_ids.add(static_cast<std::uint64_t>(bad_ids));
    subject().counters().dropped_rows.add(static_cast<std::uint64_t>(dropped_rows));
    add_to_status([=](xd_ep_status& status) {
      status.bad_ids += bad_ids;
      status.dropped_rows += dropped_rows;
    });
  }

 protected:
  // The machines that a group's ranks may be on.
  enum class Machines { one, several };

  // Collective: validates this rank's config, and checks that the ranks agree. Throws
  // INVALID_ARGUMENT where the config is bad and MISMATCH elsewhere; UNSUPPORTED where ranks are on
  // several machines and the group must be on one.
  Group(std::shared_ptr<Comm> comm, const xd_ep_config* config, KeepsOf keeps_of,
        Machines machines = Machines::one);

  // Throws INVALID_ARGUMENT unless the group may leave ranks out.
  void require_masks() const;
  // The error of a call that is for groups of other layouts.
  [[noreturn]] void refuse() const;

 private:
  void agree_on_config(const xd_ep_config* config, KeepsOf keeps_of);

  Config config_;
  std::vector<Config> configs_;
  RankSet ranks_;
  std::vector<std::int64_t> capacities_;
  std::uint64_t capacities_hash_ = 0;
  std::uint64_t nonce_ = 0;
  std::unique_ptr<RowCodec> codec_;
};

}  // namespace xd::ep
