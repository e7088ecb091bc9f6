// A group of ep.h, as every executor has it.
#pragma once

#include <crossdock/ep.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/views/view.h"
#include "ep/bulk/calls.h"
#include "ep/bulk/family.h"
#include "ep/group.h"
#include "ep/plan/plan.h"

namespace xd::ep {

// The place of a receive tensor's staging memory, from GroupMap, and whether every group has it.
struct Staging {
  std::uint64_t offset;
  bool always;
};

// How peers reach a receive tensor.
struct Reach {
  turn::PeerAddress address;
  bool staged;  // through this rank's staging memory
};

// The parts of a rank's batches that an executor keeps, by that rank's config.
using KeepsOf = Keeps (*)(const Config& config);

// The shared memory that a group takes on one rank, and how much less it would be without staging.
xd_ep_memory shared_memory_of(const Config& config, KeepsOf keeps_of);

class Group : public GroupOf<Family, Config> {
 public:
  virtual void prepare(const xd_ep_prepare_args* args, xd_stream stream) = 0;
  virtual void dispatch(const xd_ep_dispatch_args* args, xd_stream stream) = 0;
  virtual void combine(const xd_ep_combine_args* args, xd_stream stream) = 0;
  virtual void dispatch_bwd(const xd_ep_dispatch_bwd_args* args, xd_stream stream) = 0;
  virtual void combine_bwd(const xd_ep_combine_bwd_args* args, xd_stream stream) = 0;
  // A local call, which takes no turn.
  virtual void row_experts(const xd_ep_plan_row_experts_args* args, xd_stream stream) = 0;
  // Likewise.
  virtual void tell_loads(const DLTensor* loads, std::int32_t clear, xd_stream stream) = 0;

  // An operation: goes on with the members of the communicator's view (view.h).
  virtual void enter_view(xd_stream) {
    require_outlives_losses(config_);
    require_no_resume(config_);
  }

  // The ranks that take part; nullptr = all.
  const Members* members() const { return members_ ? &*members_ : nullptr; }

  // The config of a rank: like this rank's, except for the fields that may differ.
  const Config& config_of(int rank) const { return configs_[static_cast<std::size_t>(rank)]; }
  std::span<const std::int64_t> capacities() const { return capacities_; }
  const RowCodec& codec() const { return *codec_; }
  PlanBinding plan_binding() const {
    return {rank(), &config_, capacities_hash_, hosts().fingerprint() ^ members_hash_};
  }

  // A tensor whose rows are packed and lie in symmetric memory is used there; others are staged.
  // Throws INVALID_ARGUMENT where there is no memory for that. Counts staged rows.
  Reach reach(const Tensor& tensor, const Staging& staging) const;

  // The tensor's place if its rows are packed and lie in symmetric memory; else none.
  turn::PeerAddress place_in_heap(const Tensor& tensor) const;

  // Collective: allocates this rank's group memory, and maps that of all near ranks. Returns the
  // segments by rank.
  Segments share_memory() const;

  // Rows that this rank has not received, of all plans, as count_bad_ids() counts ids.
  void count_dropped_rows(std::int64_t rows);

 protected:
  // Collective: validates this rank's config, and checks that the ranks agree. Throws
  // INVALID_ARGUMENT where the config is bad and MISMATCH elsewhere.
  Group(std::shared_ptr<Comm> comm, const xd_ep_config* config, KeepsOf keeps_of);

  // From now on only these take part. Plans of before are refused if it were others.
  void keep_members(const Members& members);

 private:
  void require_may_outlive() const;

  std::vector<Config> configs_;
  std::vector<std::int64_t> capacities_;
  std::uint64_t capacities_hash_ = 0;
  std::optional<Members> members_;
  std::uint64_t members_hash_ = 0;
  std::unique_ptr<RowCodec> codec_;
};

}  // namespace xd::ep
