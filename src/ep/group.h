// What a group is on every executor: its sizes, agreed on by all ranks, and its memory of non-fatal
// errors. An executor derives from it and carries the operations out.
#pragma once

#include <crossdock/ep.h>

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "ep/calls.h"
#include "ep/config.h"
#include "ep/plan.h"

namespace xd::ep {

// A non-fatal error of one operation, on its way to the caller and into the group's status.
struct Setback {
  xd_status status = XD_SUCCESS;
  std::string text;
  int rank = -1;                 // the lowest rank it is about
  std::int64_t bad_ids = 0;      // of bad ids only
  std::int64_t needed_rows = 0;  // OVERFLOW only, with its capacity
  std::int64_t capacity_rows = 0;
  bool met_by_all = false;  // every rank meets an error of its own in this operation

  explicit operator bool() const { return status != XD_SUCCESS; }
};

// Inside a catch block: the exception in flight as a setback of `rank`'s own call.
Setback current_setback(int rank) noexcept;

// What xd_ep_last_error tells the calling thread; forgotten when it begins its next operation.
xd_ep_status last_error();
void forget_last_error();

class Group {
 public:
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  virtual void prepare(const xd_ep_prepare_args* args, xd_stream stream) = 0;
  virtual void dispatch(const xd_ep_dispatch_args* args, xd_stream stream) = 0;
  virtual void combine(const xd_ep_combine_args* args, xd_stream stream) = 0;
  virtual void dispatch_bwd(const xd_ep_dispatch_bwd_args* args, xd_stream stream) = 0;
  virtual void combine_bwd(const xd_ep_combine_bwd_args* args, xd_stream stream) = 0;
  // `operation`: what the caller gave as an xd_ep_operation.
  virtual void join_failed(std::int32_t operation, const char* text, xd_stream stream) = 0;

  // Local: takes no turn.
  virtual void row_experts(const xd_ep_plan_row_experts_args* args, xd_stream stream) = 0;

  Comm& comm() const { return *comm_; }
  int rank() const { return comm_->rank(); }
  int number() const { return number_; }
  const Config& config() const { return config_; }
  // Every rank's config: like this rank's, but for what may differ.
  const Config& config_of(int rank) const { return configs_[static_cast<std::size_t>(rank)]; }
  std::span<const std::int64_t> capacities() const { return capacities_; }
  const RowCodec& codec() const { return *codec_; }
  CallContext call_context() const { return {&config_, comm_->device()}; }
  PlanBinding plan_binding() const { return {rank(), &config_, capacities_hash_}; }

  // Keeps the first setback that no call has returned until it is read; counts bad ids and dropped
  // rows of all plans.
  void remember(const Setback& setback, xd_ep_operation operation, std::uint64_t epoch);
  void count_losses(std::int64_t bad_ids, std::int64_t dropped_rows);
  virtual xd_ep_status take_status();
  // See xd_ep_group_watch.
  virtual const volatile std::uint64_t* watch() const = 0;

 protected:
  // What the communicator says of it where errors are fatal.
  Comm::Cause cause(const Setback& setback, std::int32_t operation, std::uint64_t epoch) const;
  // The call returns this setback.
  [[noreturn]] static void give_back(const Setback& setback, xd_ep_operation operation,
                                     std::uint64_t epoch);

  // Collective: validates the config here, and that the ranks agree. Throws INVALID_ARGUMENT where
  // the config is bad and MISMATCH elsewhere.
  Group(std::shared_ptr<Comm> comm, const xd_ep_config* config);

 private:
  void agree_on_config(const xd_ep_config* config);

  std::shared_ptr<Comm> comm_;
  const int number_;
  Config config_;
  std::vector<Config> configs_;
  std::vector<std::int64_t> capacities_;
  std::uint64_t capacities_hash_ = 0;
  std::unique_ptr<RowCodec> codec_;

  std::mutex status_mutex_;
  xd_ep_status status_ XD_EP_STATUS_INIT;
};

}  // namespace xd::ep
