#include "ep/bulk/group.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/float_modes.h"
#include "ep/bulk/cpu/local.h"
#include "ep/bulk/cpu/operations.h"
#include "ep/executors.h"
#include "turn/host/runner.h"

namespace xd::ep::cpu {
namespace {

Keeps keeps_of(const Config& config) {
  return {.lists = config.layout.row_per_expert && config.staging};
}

class CpuGroup final : public Group {
 public:
  CpuGroup(std::shared_ptr<Comm> comm, const xd_ep_config* config)
      : Group(std::move(comm), config, keeps_of), lockstep_(*this) {
    lockstep_.reach_machines(*this);
    subject().counters().counts_rows.set(1);
    this->comm().collective().agree(Family::kCreate, [this] {
      scratch_.reserve(this->config());
      return Collective::Contribution{};
    });
  }

  void prepare(const xd_ep_prepare_args* args, xd_stream) override {
    run<PrepareOp>(XD_EP_PREPARE, read_prepare, args);
  }
  void set_placement(const xd_ep_placement* placement, xd_stream) override {
    require_logical_experts(config());
    runner_.run(XD_EP_SET_PLACEMENT, [&] {
      order_.begin();
      return SetPlacementOp(Context{*this, lockstep_, scratch_, order_}, placement);
    });
  }
  void enter_view(xd_stream) override;
  void dispatch(const xd_ep_dispatch_args* args, xd_stream) override {
    run<DispatchOp>(XD_EP_DISPATCH, read_dispatch, args);
  }
  void combine(const xd_ep_combine_args* args, xd_stream) override {
    run<CombineOp>(XD_EP_COMBINE, read_combine, args);
  }
  void dispatch_bwd(const xd_ep_dispatch_bwd_args* args, xd_stream) override {
    run<DispatchBwdOp>(XD_EP_DISPATCH_BWD, read_dispatch_bwd, args);
  }
  void combine_bwd(const xd_ep_combine_bwd_args* args, xd_stream) override {
    run<CombineBwdOp>(XD_EP_COMBINE_BWD, read_combine_bwd, args);
  }
  void row_experts(const xd_ep_plan_row_experts_args* args, xd_stream) override {
    comm().errors().check_open();
    fill_row_experts(read_row_experts(args, call_context()), plan_binding());
  }

  void tell_loads(const DLTensor* loads, std::int32_t clear, xd_stream) override {
    require_logical_experts(config());
    comm().errors().check_open();
    scratch_.loads.tell(read_loads(loads, clear, call_context()), clear != 0);
  }

  const volatile std::uint64_t* watch() const override { return runner_.watch(); }

 protected:
  void take_failed_turn(std::int32_t operation, Error&& error, xd_stream) override {
    // No operation is made; the order of parts is touched once the group is this call's.
    runner_.run(operation, [&]() -> PrepareOp {
      order_.begin();
      throw std::move(error);
    });
  }

 private:
  template <class Operation, class Args, class Call>
  void run(xd_ep_operation operation, Call (*read)(const Args*, const CallContext&),
           const Args* args) {
    const StandardFloatModes modes;
    Record record;
    runner_.run(operation, [&] {
      order_.begin();
      Operation made(Context{*this, lockstep_, scratch_, order_}, read(args, call_context()));
      record = made.record();
      if constexpr (std::is_base_of_v<PlanOperation, Operation>) {
        if (!made.counts_rows()) record.rows = 0;
      }
      return made;
    });
    if (operation != XD_EP_PREPARE) count_rows(record.rows, record.row_bytes);
  }

  Lockstep lockstep_;
  Scratch scratch_;
  PartOrder order_;
  turn::HostRunner<Family> runner_{*this, lockstep_, config().fatal_errors};
};

void CpuGroup::enter_view(xd_stream) {
  const auto find = [&] {
    require_outlives_losses(config());
    const View view = comm().views().known().now;
    if (view.members.has(rank())) return view;
    fail(XD_ERROR_PEER_LOST, "the others have gone on without ", comm().errors().names().of(rank()),
         ", which is not in view ", view.number);
  };
  runner_.enter_view(XD_EP_ENTER_VIEW, find, [&] {
    for (int i = 0; i < 2; ++i) order_.begin();  // nothing is under way any more
    const CountLayout counts{config().experts, config().ranks};
    Members members;
    for (const int r : ranks()) {
      if (lockstep_.takes_part(r)) {
        members.add(r);
      } else {
        std::fill_n(scratch_.table.begin() + static_cast<std::ptrdiff_t>(at(r) * counts.size()),
                    counts.size(), 0U);
      }
    }
    keep_members(members);
  });
}

std::unique_ptr<Group> make_group(std::shared_ptr<Comm> comm, const xd_ep_config* config) {
  return std::make_unique<CpuGroup>(std::move(comm), config);
}

xd_ep_memory group_memory(const Config& config) {
  xd_ep_memory memory = shared_memory_of(config, keeps_of);
  memory.private_bytes = Scratch::bytes(config);
  return memory;
}

}  // namespace

const BulkExecutor kBulk{.device_type = kDLCPU,
                         .make_group = make_group,
                         .group_memory = group_memory,
                         .routing_layout = [](const RoutingLayoutCall& call, const DLDevice&,
                                              xd_stream) { fill_routing_layout(call); }};

}  // namespace xd::ep::cpu
