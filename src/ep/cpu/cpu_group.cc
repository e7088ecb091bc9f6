#include "ep/cpu/cpu_group.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "ep/cpu/float_modes.h"
#include "ep/cpu/local.h"
#include "ep/cpu/operations.h"
#include "ep/verdict.h"

namespace xd::ep::cpu {
namespace {

class CpuGroup final : public Group {
 public:
  CpuGroup(std::shared_ptr<Comm> comm, const xd_ep_config* config)
      : Group(std::move(comm), config), lockstep_(*this) {
    this->comm().agree(Comm::Collective::group, [this] {
      scratch_.reserve(this->config());
      return Comm::Contribution{};
    });
  }

  void prepare(const xd_ep_prepare_args* args, xd_stream) override {
    run(XD_EP_PREPARE, [&](const Context& context) { return PrepareOp(context, args); });
  }
  void dispatch(const xd_ep_dispatch_args* args, xd_stream) override {
    run(XD_EP_DISPATCH, [&](const Context& context) { return DispatchOp(context, args); });
  }
  void combine(const xd_ep_combine_args* args, xd_stream) override {
    run(XD_EP_COMBINE, [&](const Context& context) { return CombineOp(context, args); });
  }
  void dispatch_bwd(const xd_ep_dispatch_bwd_args* args, xd_stream) override {
    run(XD_EP_DISPATCH_BWD, [&](const Context& context) { return DispatchBwdOp(context, args); });
  }
  void combine_bwd(const xd_ep_combine_bwd_args* args, xd_stream) override {
    run(XD_EP_COMBINE_BWD, [&](const Context& context) { return CombineBwdOp(context, args); });
  }

  void row_experts(const xd_ep_plan_row_experts_args* args, xd_stream) override {
    comm().check_open();
    fill_row_experts(read_row_experts(args, call_context()), plan_binding());
  }

  void join_failed(std::int32_t operation, const char* text, xd_stream) override {
    const bool known = operation >= XD_EP_PREPARE && operation <= XD_EP_COMBINE_BWD;
    const std::string_view cause(text != nullptr ? text : "",
                                 text != nullptr ? ::strnlen(text, 255) : 0);
    // The peers wait for this rank's turn whatever it was to be; the failure comes before there is
    // an operation, so any type of one will do.
    run(known ? static_cast<xd_ep_operation>(operation) : XD_EP_PREPARE,
        [&](const Context&) -> PrepareOp {
          XD_REQUIRE(known, "operation = ", operation, ", expected an xd_ep_operation");
          fail(XD_ERROR_INVALID_ARGUMENT, cause);
        });
  }

  const volatile std::uint64_t* watch() const override { return &errors_; }

 private:
  // Marks the group as in use by this thread; finding it in use is fatal.
  class Turn {
   public:
    Turn(CpuGroup& group, xd_ep_operation operation) : group_(group) {
      group.comm().check_usable();
      if (group.busy_.exchange(true, std::memory_order_acquire)) group.fail_busy(operation);
    }
    ~Turn() { group_.busy_.store(false, std::memory_order_release); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    CpuGroup& group_;
  };

  [[noreturn]] void fail_busy(xd_ep_operation operation) {
    comm().raise_and_throw({.status = XD_ERROR_BUSY,
                            .rank = rank(),
                            .peer = rank(),
                            .group = number(),
                            .operation = operation},
                           Comm::Spread::everywhere);
  }

  template <class Make>
  void run(xd_ep_operation operation, Make&& make);
  template <Operation Op>
  Setback carry_out(std::optional<Op>& op, Setback setback);
  template <Operation Op>
  Setback move(Op& op);
  void finish_comm(const Setback& setback, xd_ep_operation operation);
  template <Operation Op>
  Setback finish(Op& op);

  Lockstep lockstep_;
  Scratch scratch_;
  std::atomic<bool> busy_{false};
  alignas(64) std::uint64_t errors_ = 0;  // written by operations, read by anybody
};

// A rank whose arguments are bad goes through the same steps with nothing but its failure, so that
// its peers learn it at once and the epochs stay together. Fatal errors leave from any step.
template <class Make>
void CpuGroup::run(xd_ep_operation operation, Make&& make) {
  const Turn turn(*this, operation);
  const StandardFloatModes modes;
  const Context context{*this, lockstep_, scratch_};
  using Op = decltype(make(context));
  std::optional<Op> op;
  Setback setback;
  try {
    op.emplace(make(context));
  } catch (...) {
    setback = current_setback(rank());
    setback.met_by_all = true;  // the peers hear of it by this rank's record
  }
  lockstep_.begin(operation);
  setback = carry_out(op, std::move(setback));
  if (!setback) return;
  // Release: as kernels do, although there is nothing here that a thread would have to find.
  std::atomic_ref(errors_).fetch_add(1, std::memory_order_release);
  if (config().fatal_errors) finish_comm(setback, operation);
  give_back(setback, operation, lockstep_.epoch());
}

template <Operation Op>
Setback CpuGroup::carry_out(std::optional<Op>& op, Setback setback) {
  if (op) {
    op->stage_in();
    lockstep_.enter(op->record());
    op->announce();
  } else {
    lockstep_.enter({.status = static_cast<std::uint8_t>(setback.status)});
  }
  lockstep_.await();
  if (!setback) setback = move(*op);
  lockstep_.leave();
  if (!setback) setback = finish(*op);
  return setback;
}

// What goes wrong here without being fatal (no memory for an error's text, a peer's record that
// names no memory of its) is this rank's setback alone, and it still leaves with the others.
template <Operation Op>
Setback CpuGroup::move(Op& op) {
  try {
    if (Setback found = disagreement(lockstep_.records(), rank())) return found;
    if (Setback found = op.obstacle()) return found;
    op.move();
    return {};
  } catch (...) {
    if (comm().fatal_error() != nullptr) throw;
    return current_setback(rank());
  }
}

// The operation has ended: peers that meet an error of it do so without this rank.
void CpuGroup::finish_comm(const Setback& setback, xd_ep_operation operation) {
  comm().raise_cause({.status = setback.status,
                      .rank = rank(),
                      .peer = setback.rank,
                      .group = number(),
                      .operation = operation,
                      .expected_epoch = lockstep_.epoch(),
                      .met_by_all = setback.met_by_all ? 1 : 0},
                     cause(setback, operation, lockstep_.epoch()));
}

template <Operation Op>
Setback CpuGroup::finish(Op& op) {
  try {
    return op.finish();
  } catch (...) {
    return current_setback(rank());
  }
}

}  // namespace

std::unique_ptr<Group> make_group(std::shared_ptr<Comm> comm, const xd_ep_config* config) {
  return std::make_unique<CpuGroup>(std::move(comm), config);
}

xd_ep_memory group_memory(const Config& config) {
  xd_ep_memory memory XD_EP_MEMORY_INIT;
  const GroupMap map = GroupMap::make(config);
  memory.symmetric_bytes = map.end;
  memory.staging_bytes = map.end - map.staging;
  memory.private_bytes = Scratch::bytes(config);
  return memory;
}

}  // namespace xd::ep::cpu
