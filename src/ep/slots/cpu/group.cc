#include "ep/slots/group.h"

#include <utility>

#include "base/float_modes.h"
#include "ep/executors.h"
#include "ep/slots/cpu/combine.h"
#include "ep/slots/cpu/dispatch.h"
#include "ep/slots/cpu/remote/lanes.h"
#include "turn/host/calls.h"
#include "turn/host/course.h"

namespace xd::ep::cpu {
namespace {

class CpuLlGroup final : public LlGroup {
 public:
  CpuLlGroup(std::shared_ptr<Comm> comm, const xd_ll_config* config)
      : LlGroup(std::move(comm), config, Machines::several), memory_(*this) {
    subject().counters().measures_waits.set(1);
    subject().counters().counts_rows.set(1);
    this->comm().collective().agree(LlFamily::kCreate, [this] {
      scratch_.reserve(this->config());
      return Collective::Contribution{};
    });
    if (!this->comm().hosts().all_are_near())
      far_ = std::make_unique<LlFar>(*this, dispatches_, combines_);
  }

  void dispatch(const xd_ll_dispatch_args* args, xd_stream) override {
    run<LlDispatch>(LlKind::dispatch, XD_LL_DISPATCH, args);
  }
  void combine(const xd_ll_combine_args* args, xd_stream) override {
    run<LlCombine>(LlKind::combine, XD_LL_COMBINE, args);
  }

  void mask_set(std::int32_t peer, std::int32_t masked, xd_stream) override;
  void mask_get(const DLTensor* mask, xd_stream) override;
  void reset(xd_stream) override;

  xd_ll_status take_status() override {
    xd_ll_status status = LlGroup::take_status();
    LlFamily::tell_masks(masks_.masked(), masks_.masked_by(), status);
    return status;
  }
  const volatile std::uint64_t* watch() const override { return calls_.watch(); }

 protected:
  void take_failed_turn(std::int32_t operation, Error&& error, xd_stream) override {
    const Claim claim(calls_, operation);
    LlSetback setback;
    try {
      throw std::move(error);
    } catch (...) {
      setback = current_setback();
    }
    const LlKind kind = operation == XD_LL_COMBINE ? LlKind::combine : LlKind::dispatch;
    require_place(lane_of(kind), operation);
    fail_send(kind, operation, std::move(setback));
  }

 private:
  using Claim = turn::HostCalls<LlFamily>::Claim;

  template <class Operation>
  void run(LlKind kind, xd_ll_operation operation, const typename Operation::Args* args);
  template <class Operation>
  LlSetback receive(Operation& op, Lane& lane, const LlArgs<typename Operation::Args>& args);

  RankBits gone() const;
  void require_place(const Lane& lane, std::int32_t operation) const;
  void require_turn(const Lane& lane, std::int32_t operation, const LlHalves& halves) const;
  [[noreturn]] void refuse_call(const Lane& lane, std::int32_t operation, xd_status status,
                                std::string text) const;
  [[noreturn]] void fail_send(LlKind kind, std::int32_t operation, LlSetback setback);
  Lane& lane_of(LlKind kind) { return kind == LlKind::combine ? combines_ : dispatches_; }
  LlFarLane* far_lane(LlKind kind) { return far_ ? &far_->lane(kind) : nullptr; }
  LlSetback current_setback() const { return turn::current_setback<LlFamily>(rank()); }

  Lane make_lane(LlKind kind, xd_ll_operation operation) {
    return Lane(comm(), number(),
                {memory_.map().lane[static_cast<std::size_t>(kind)], memory_.areas(),
                 at(config().in_flight)},
                operation, masks_);
  }

  turn::HostCourse make_course(xd_ll_operation operation, const Lane& lane) {
    return turn::HostCourse(
        comm(), number(), operation, subject(),
        [&lane](xd_phase phase, std::uint64_t epoch) { return lane.has_come(phase, epoch); },
        [&lane](xd_phase phase, std::uint64_t epoch) { return lane.can_join(phase, epoch); });
  }

  LlMemory memory_;
  LlScratch scratch_;
  turn::PeerMasks masks_{comm(),
                         {config().masks_lost_peers, config().wait_timeout_ms},
                         memory_.areas(),
                         memory_.map().masked_by};
  turn::HostReset reset_{comm(), masks_, memory_.areas(), memory_.map().reset};
  Lane dispatches_ = make_lane(LlKind::dispatch, XD_LL_DISPATCH);
  Lane combines_ = make_lane(LlKind::combine, XD_LL_COMBINE);
  turn::HostCourse dispatched_ = make_course(XD_LL_DISPATCH, dispatches_);
  turn::HostCourse combined_ = make_course(XD_LL_COMBINE, combines_);
  turn::HostCalls<LlFamily> calls_{*this, config().fatal_errors};
  std::uint64_t resets_ = 0;
  std::unique_ptr<LlFar> far_;  // nullptr: all ranks are near. Uses all of the above
};

// A call does its halves, and throws what it has met. A call that cannot take a turn throws before
// it tells anybody.
template <class Operation>
void CpuLlGroup::run(LlKind kind, xd_ll_operation operation, const typename Operation::Args* args) {
  const StandardFloatModes modes;
  const Claim claim(calls_, operation);
  Lane& lane = lane_of(kind);
  LlArgs<typename Operation::Args> read;
  LlSetback setback;
  try {
    read = read_ll_args(args);
  } catch (...) {
    setback = current_setback();
  }
  if (setback) {  // which halves the caller meant is not known: so it is the whole operation
    require_place(lane, operation);
    fail_send(kind, operation, std::move(setback));
  }
  require_turn(lane, operation, read.halves);
  Operation op({*this, memory_, masks_, scratch_, lane, far_lane(kind)});
  if (read.halves.send) {
    try {
      op.check_send(read.args);
      if (read.halves.receive) op.check_receive(read.args, op.record());
    } catch (...) {
      setback = current_setback();
    }
    if (setback) fail_send(kind, operation, std::move(setback));
    if (far_) far_->begin_call(lane.site(XD_PHASE_ROWS, lane.sent() + 1));
    lane.begin();
    op.send(!read.halves.receive);
  }
  if (!read.halves.receive) {
    if (far_) far_->push();
    return;
  }
  const std::uint64_t epoch = lane.next();
  if (far_) far_->begin_call(lane.site(XD_PHASE_ROWS, epoch));
  setback = receive(op, lane, read);
  lane.leave();
  lane.rest(epoch);
  if (far_) far_->push();
  calls_.settle(setback, operation, epoch);
}

// A failure here that is not fatal is this rank's setback alone, and the operation is taken all the
// same.
template <class Operation>
LlSetback CpuLlGroup::receive(Operation& op, Lane& lane,
                              const LlArgs<typename Operation::Args>& args) {
  LlSetback bad;
  try {
    if (!args.halves.send) op.check_receive(args.args, lane.own_record());
    LlSetback setback = op.receive(!args.halves.send);
    if (setback && setback.status == XD_ERROR_MISMATCH) return setback;
    const RankBits lost = lane.lost();
    if (lost.empty()) return setback;
    return lost_peers({lost, masks_.masked(), masks_.masked_by(), gone()});
  } catch (...) {
    if (comm().errors().fatal_error() != nullptr) throw;
    bad = current_setback();
  }
  lane.await_far();
  return bad;
}

RankBits CpuLlGroup::gone() const {
  RankBits ranks{};
  for (int r = 0; r < config().ranks; ++r) {
    if (comm().errors().lost(r)) ranks.add(r);
  }
  return ranks;
}

// Takes this rank's turn with a failure: its peers learn of it from the record, and there is no
// receive half.
void CpuLlGroup::fail_send(LlKind kind, std::int32_t operation, LlSetback setback) {
  Lane& lane = lane_of(kind);
  setback.met_by_all = true;  // peers judge by the record
  if (far_) far_->begin_call(lane.site(XD_PHASE_ROWS, lane.sent() + 1));
  lane.begin();
  LlRecord failed;
  failed.call.status = static_cast<std::uint8_t>(setback.status);
  failed.mask = masks_.masked();
  lane.enter(failed);
  lane.ring_peers();
  if (far_) far_->lane(kind).send_record();
  const std::uint64_t epoch = lane.sent();
  lane.drop_sent();
  lane.rest(epoch);
  calls_.settle(setback, operation, epoch);
  fail(XD_ERROR_INTERNAL, "a failed call has no error");
}

void CpuLlGroup::refuse_call(const Lane& lane, std::int32_t operation, xd_status status,
                             std::string text) const {
  give_back({.status = status, .text = std::move(text), .rank = rank()}, operation, lane.sent());
}

void CpuLlGroup::require_place(const Lane& lane, std::int32_t operation) const {
  if (!lane.full()) return;
  refuse_call(lane, operation, XD_ERROR_BUSY,
              concat(lane.between_halves(),
                     " operations are between their halves, expected at most in_flight = ",
                     config().in_flight, " with this one; peers do not hear of this call"));
}

void CpuLlGroup::require_turn(const Lane& lane, std::int32_t operation,
                              const LlHalves& halves) const {
  if (!halves.send) {
    if (lane.between_halves() > 0) return;
    refuse_call(lane, operation, XD_ERROR_INVALID_ARGUMENT,
                "phase = XD_LL_PHASE_RECEIVE, expected a send half before it");
  }
  if (halves.receive && lane.between_halves() > 0) {
    refuse_call(lane, operation, XD_ERROR_INVALID_ARGUMENT,
                concat("phase = XD_LL_PHASE_BOTH, expected XD_LL_PHASE_SEND while ",
                       lane.between_halves(), " operations are between their halves"));
  }
  require_place(lane, operation);
}

void CpuLlGroup::mask_set(std::int32_t peer, std::int32_t masked, xd_stream) {
  require_masks();
  require_maskable(peer, masked, rank(), config());
  comm().errors().check_usable();
  const NearRank near_peer = near()[at(peer)];  // of groups on one machine, where all are near
  if (masked != 0) {
    masks_.mask(near_peer);
  } else {
    masks_.unmask(near_peer);
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
  const turn::ResetNumbers numbers = reset_.run({.phase = XD_PHASE_ENTRY,
                                                 .group = number(),
                                                 .operation = XD_LL_RESET,
                                                 .epoch = ++resets_,
                                                 .deadline = masks_.deadline(),
                                                 .timeout_ms = masks_.timeout_ms()},
                                                {dispatches_.sent(), combines_.sent()}, lost);
  dispatches_.restart(numbers[0]);
  combines_.restart(numbers[1]);
  if (lost.empty()) return;
  const LostPeers peers{lost, masks_.masked(), masks_.masked_by(), gone()};
  calls_.settle(lost_peers(peers), XD_LL_RESET, resets_);
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
