#include "ep/slots/group.h"

#include <utility>

#include "base/float_modes.h"
#include "ep/executors.h"
#include "ep/slots/cpu/combine.h"
#include "ep/slots/cpu/dispatch.h"
#include "ep/slots/cpu/remote/pipelines.h"
#include "turn/host/calls.h"
#include "turn/host/course.h"

namespace xd::ep::cpu {
namespace {

class CpuLlGroup final : public LlGroup {
 public:
  CpuLlGroup(std::shared_ptr<Comm> comm, const xd_ll_config* config)
      : LlGroup(std::move(comm), config), memory_(*this) {
    subject().counters().measures_waits.set(1);
    subject().counters().counts_rows.set(1);
    this->comm().agree_on_group(LlFamily::kCreate, [this] { scratch_.reserve(this->config()); });
    if (!this->comm().hosts().all_are_near())
      remote_ = std::make_unique<LlRemote>(*this,
                                           LlRemote::Turns{dispatches_, combines_, masks_, reset_});
    if (this->comm().adopted() != nullptr) take_over();
    if (!this->comm().is_elastic() || !this->config().masks_lost_peers) return;
    this->comm().catalogue().list(number(), {.call = LlFamily::kCreate.name,
                                             .terms = terms(),
                                             .memory = memory_.segments(),
                                             .mask = [this](NearRank rank) { masks_.mask(rank); }});
  }
  ~CpuLlGroup() override {
    if (!comm().errors().in_fork()) comm().catalogue().unlist(number());
  }

  void dispatch(const xd_ll_dispatch_args* args, xd_stream) override {
    run<LlDispatch>(LlKind::dispatch, XD_LL_DISPATCH, args);
  }
  void combine(const xd_ll_combine_args* args, xd_stream) override {
    run<LlCombine>(LlKind::combine, XD_LL_COMBINE, args);
  }

  void set_placement(const xd_ep_placement* placement, xd_stream) override;
  void mask_set(std::int32_t peer, std::int32_t masked, xd_stream) override;
  void mask_get(const DLTensor* mask, xd_stream) override;
  void reset(xd_stream) override;

  xd_ll_status take_status() override {
    xd_ll_status status = LlGroup::take_status();
    LlFamily::tell_masks(masks_.masked(), masks_.masked_by(), status);
    return status;
  }
  const volatile std::uint64_t* watch() const override { return calls_.watch(); }
  const std::uint64_t* fault_word() const override {
    return const_cast<const std::uint64_t*>(calls_.watch());
  }

 protected:
  void take_failed_turn(std::int32_t operation, Error&& error, xd_stream) override {
    const Claim claim(calls_, operation);
    LlOperationError operation_error;
    try {
      throw std::move(error);
    } catch (...) {
      operation_error = current_operation_error();
    }
    const LlKind kind = operation == XD_LL_COMBINE ? LlKind::combine : LlKind::dispatch;
    require_place(pipeline_of(kind), operation);
    fail_send(kind, operation, std::move(operation_error));
  }

 private:
  using Claim = turn::HostCalls<LlFamily>::Claim;

  template <class Operation>
  void run(LlKind kind, xd_ll_operation operation, const typename Operation::Args* args);
  template <class Operation>
  LlOperationError receive(Operation& op, Pipeline& pipeline,
                           const LlArgs<typename Operation::Args>& args);

  void take_over();
  RankBits gone() const;
  LlOperationError loss_of(const RankBits& lost) const;
  void require_place(const Pipeline& pipeline, std::int32_t operation) const;
  void require_turn(const Pipeline& pipeline, std::int32_t operation, const LlHalves& halves) const;
  [[noreturn]] void refuse_call(const Pipeline& pipeline, std::int32_t operation, xd_status status,
                                std::string text) const;
  [[noreturn]] void fail_send(LlKind kind, std::int32_t operation,
                              LlOperationError operation_error);
  void enter_alone(LlKind kind, const LlRecord& record);
  Pipeline& pipeline_of(LlKind kind) { return kind == LlKind::combine ? combines_ : dispatches_; }
  LlRemotePipeline* remote_pipeline(LlKind kind) {
    return remote_ ? &remote_->pipeline(kind) : nullptr;
  }
  LlOperationError current_operation_error() const {
    return turn::current_operation_error<LlFamily>(rank());
  }

  Pipeline make_pipeline(LlKind kind, xd_ll_operation operation) {
    return Pipeline(comm(), number(),
                    {memory_.map().pipeline[static_cast<std::size_t>(kind)], memory_.areas(),
                     at(config().in_flight)},
                    operation, masks_);
  }

  turn::HostCourse make_course(xd_ll_operation operation, const Pipeline& pipeline) {
    return turn::HostCourse(
        comm(), number(), operation, subject(),
        [&pipeline](xd_phase phase, std::uint64_t epoch) {
          return pipeline.has_come(phase, epoch);
        },
        [&pipeline](xd_phase phase, std::uint64_t epoch) {
          return pipeline.can_join(phase, epoch);
        });
  }

  LlMemory memory_;
  LlScratch scratch_;
  turn::PeerMasks masks_{comm(),
                         {config().masks_lost_peers, config().wait_timeout_ms},
                         memory_.areas(),
                         memory_.map().masked_by};
  turn::HostReset reset_{comm(), masks_, memory_.areas(), memory_.map().reset};
  Pipeline dispatches_ = make_pipeline(LlKind::dispatch, XD_LL_DISPATCH);
  Pipeline combines_ = make_pipeline(LlKind::combine, XD_LL_COMBINE);
  turn::HostCourse dispatched_ = make_course(XD_LL_DISPATCH, dispatches_);
  turn::HostCourse combined_ = make_course(XD_LL_COMBINE, combines_);
  turn::HostCalls<LlFamily> calls_{*this, config().fatal_errors};
  std::uint64_t resets_ = 0;
  std::unique_ptr<LlRemote> remote_;  // nullptr: all ranks are near. Uses all of the above
};

// A call does its halves, and throws what it has met. A call that cannot take a turn throws before
// it tells anybody.
template <class Operation>
void CpuLlGroup::run(LlKind kind, xd_ll_operation operation, const typename Operation::Args* args) {
  const StandardFloatModes modes;
  const Claim claim(calls_, operation);
  Pipeline& pipeline = pipeline_of(kind);
  LlArgs<typename Operation::Args> read;
  LlOperationError operation_error;
  try {
    read = read_ll_args(args);
  } catch (...) {
    operation_error = current_operation_error();
  }
  if (operation_error) {  // the halves that the caller meant are unknown: so it is all of them
    require_place(pipeline, operation);
    fail_send(kind, operation, std::move(operation_error));
  }
  require_turn(pipeline, operation, read.halves);
  Operation op({*this, memory_, masks_, scratch_, pipeline, remote_pipeline(kind)});
  if (read.halves.send) {
    try {
      op.check_send(read.args);
      if (read.halves.receive) op.check_receive(read.args, op.record());
    } catch (...) {
      operation_error = current_operation_error();
    }
    if (operation_error) fail_send(kind, operation, std::move(operation_error));
    if (remote_) remote_->begin_call(pipeline.site(XD_PHASE_ROWS, pipeline.sent() + 1));
    pipeline.begin();
    op.send(!read.halves.receive);
  }
  if (!read.halves.receive) {
    if (remote_) remote_->push();
    return;
  }
  const std::uint64_t epoch = pipeline.next();
  if (remote_) remote_->begin_call(pipeline.site(XD_PHASE_ROWS, epoch));
  operation_error = receive(op, pipeline, read);
  pipeline.leave();
  pipeline.rest(epoch);
  if (remote_) remote_->push();
  calls_.settle(operation_error, operation, epoch);
}

// A failure here that is not fatal is this rank's operation error alone, and the operation is taken
// all the same.
template <class Operation>
LlOperationError CpuLlGroup::receive(Operation& op, Pipeline& pipeline,
                                     const LlArgs<typename Operation::Args>& args) {
  LlOperationError bad;
  try {
    if (!args.halves.send) op.check_receive(args.args, pipeline.own_record());
    LlOperationError operation_error = op.receive(!args.halves.send);
    if (operation_error && operation_error.status == XD_ERROR_MISMATCH) return operation_error;
    const RankBits lost = pipeline.lost();
    return lost.empty() ? operation_error : loss_of(lost);
  } catch (...) {
    if (comm().errors().fatal_error() != nullptr) throw;
    bad = current_operation_error();
  }
  pipeline.await_remote();
  return bad;
}

LlOperationError CpuLlGroup::loss_of(const RankBits& lost) const {
  return lost_peers({lost, masks_.masked(), masks_.masked_by(), gone()});
}

// The group goes on alone until it is reset.
void CpuLlGroup::take_over() {
  for (const NearRank peer : comm().hosts().peers()) masks_.mask(peer);
  dispatches_.take_over();
  combines_.take_over();
}

RankBits CpuLlGroup::gone() const {
  RankBits ranks{};
  for (int r = 0; r < config().ranks; ++r) {
    if (comm().errors().lost(r) || masks_.is_cut_off(r)) ranks.add(r);
  }
  return ranks;
}

// Takes this rank's turn with a failure: its peers learn of it from the record, and there is no
// receive half.
void CpuLlGroup::fail_send(LlKind kind, std::int32_t operation, LlOperationError operation_error) {
  Pipeline& pipeline = pipeline_of(kind);
  operation_error.met_by_all = true;  // peers judge by the record
  LlRecord failed;
  failed.call.status = static_cast<std::uint8_t>(operation_error.status);
  enter_alone(kind, failed);
  const std::uint64_t epoch = pipeline.sent();
  pipeline.drop_sent();
  pipeline.rest(epoch);
  calls_.settle(operation_error, operation, epoch);
  fail(XD_ERROR_INTERNAL, "a failed call has no error");
}

// Begins and enters an operation that has nothing to send but its record.
void CpuLlGroup::enter_alone(LlKind kind, const LlRecord& record) {
  Pipeline& pipeline = pipeline_of(kind);
  if (remote_) remote_->begin_call(pipeline.site(XD_PHASE_ROWS, pipeline.sent() + 1));
  pipeline.begin();
  LlRecord told = record;
  told.mask = masks_.masked();
  pipeline.enter(told);
  pipeline.ring_peers();
  if (remote_) remote_->pipeline(kind).send_record();
}

// Takes a turn among dispatches, both halves at once. Items travel with slots in them, so peers
// need nothing of this rank's table.
void CpuLlGroup::set_placement(const xd_ep_placement* placement, xd_stream) {
  constexpr auto kOperation = XD_LL_SET_PLACEMENT;
  require_logical_experts(config());
  const Claim claim(calls_, kOperation);
  if (dispatches_.between_halves() > 0) {
    give_back(busy_with_halves(static_cast<std::int64_t>(dispatches_.between_halves()), rank()),
              kOperation, dispatches_.sent());
  }
  SlotTable table;
  LlOperationError operation_error;
  try {
    table = SlotTable::read(placement, config(), rank());
  } catch (...) {
    operation_error = current_operation_error();
  }
  if (operation_error) fail_send(LlKind::dispatch, kOperation, std::move(operation_error));
  LlRecord record;
  record.call.operation = static_cast<std::uint8_t>(kOperation);
  record.fingerprint = table.hash();
  enter_alone(LlKind::dispatch, record);
  const std::uint64_t epoch = dispatches_.next();
  observe::WaitTimes times(subject());
  dispatches_.await(times);
  operation_error = verdict(dispatches_, rank());
  const RankBits lost = dispatches_.lost();
  dispatches_.leave();
  dispatches_.rest(epoch);
  if (remote_) remote_->push();
  if (!operation_error) {
    use(std::move(table));
    if (!lost.empty()) operation_error = loss_of(lost);
  }
  calls_.settle(operation_error, kOperation, epoch);
}

void CpuLlGroup::refuse_call(const Pipeline& pipeline, std::int32_t operation, xd_status status,
                             std::string text) const {
  give_back({.status = status, .text = std::move(text), .rank = rank()}, operation,
            pipeline.sent());
}

void CpuLlGroup::require_place(const Pipeline& pipeline, std::int32_t operation) const {
  if (!pipeline.full()) return;
  refuse_call(pipeline, operation, XD_ERROR_BUSY,
              concat(pipeline.between_halves(),
                     " operations are between their halves, expected at most in_flight = ",
                     config().in_flight, " with this one; peers do not hear of this call"));
}

void CpuLlGroup::require_turn(const Pipeline& pipeline, std::int32_t operation,
                              const LlHalves& halves) const {
  if (!halves.send) {
    if (pipeline.between_halves() > 0) return;
    refuse_call(pipeline, operation, XD_ERROR_INVALID_ARGUMENT,
                "phase = XD_LL_PHASE_RECEIVE, expected a send half before it");
  }
  if (halves.receive && pipeline.between_halves() > 0) {
    refuse_call(pipeline, operation, XD_ERROR_INVALID_ARGUMENT,
                concat("phase = XD_LL_PHASE_BOTH, expected XD_LL_PHASE_SEND while ",
                       pipeline.between_halves(), " operations are between their halves"));
  }
  require_place(pipeline, operation);
}

void CpuLlGroup::mask_set(std::int32_t peer, std::int32_t masked, xd_stream) {
  require_masks();
  require_maskable(peer, masked, rank(), config());
  comm().errors().check_usable();
  if (masked != 0) {
    masks_.mask(peer);
  } else {
    masks_.unmask(peer);
  }
}

void CpuLlGroup::mask_get(const DLTensor* mask, xd_stream) {
  require_masks();
  comm().errors().check_open();
  const Tensor out = read_ll_mask(mask, call_context());
  const RankBits masked = masks_.masked();
  for (int r = 0; r < config().ranks; ++r) out.as<std::int32_t>()[r] = masked.has(r) ? 1 : 0;
}

void CpuLlGroup::reset(xd_stream) {
  require_masks();
  const Claim claim(calls_, XD_LL_RESET);
  RankBits lost{};
  const HostWait site{.phase = XD_PHASE_ENTRY,
                      .group = number(),
                      .operation = XD_LL_RESET,
                      .epoch = ++resets_,
                      .deadline = masks_.deadline(),
                      .timeout_ms = masks_.timeout_ms(),
                      .progress = remote_.get()};
  if (remote_) {
    remote_->begin_call(site);
    remote_->begin_reset();
  }
  const turn::ResetNumbers numbers = reset_.run(site, {dispatches_.sent(), combines_.sent()}, lost);
  dispatches_.restart(numbers[0]);
  combines_.restart(numbers[1]);
  if (remote_) remote_->push();
  if (!lost.empty()) calls_.settle(loss_of(lost), XD_LL_RESET, resets_);
}

std::unique_ptr<LlGroup> make_group(std::shared_ptr<Comm> comm, const xd_ll_config* config) {
  return std::make_unique<CpuLlGroup>(std::move(comm), config);
}

xd_ll_memory group_memory(const LlConfig& config) {
  xd_ll_memory memory XD_LL_MEMORY_INIT;
  memory.symmetric_bytes = LlMap::make(config).end;
  memory.private_bytes = LlScratch::bytes(config);
  return memory;
}

}  // namespace

const SlotsExecutor kSlots{
    .device_type = kDLCPU, .make_group = make_group, .group_memory = group_memory};

}  // namespace xd::ep::cpu
