#include "ep/bulk/group.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <span>

#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "cuda/known_memory.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "ep/bulk/cuda/call_memory.h"
#include "ep/bulk/cuda/kernel_params.h"
#include "ep/bulk/cuda/local.h"
#include "ep/bulk/cuda/remote/group.h"
#include "ep/bulk/cuda/report.h"
#include "ep/bulk/records.h"
#include "ep/executors.h"
#include "ep/plan/cuda/device_slot_table.h"
#include "ep/plan/cuda/sm_ledger.h"
#include "turn/device/runner.h"

namespace xd::ep::cuda {
namespace {

constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;  // in which devices share memory

// Rows cross between devices once for all of a token's rows, and partial sums are pushed.
Keeps keeps_of(const Config& config) {
  return {.lists = config.layout.row_per_expert,
          .items = config.pushes_sums(),
          .partials = config.pushes_sums() || config.any_staging,
          .chunks = true};
}

class CudaGroup final : public Group {
 public:
  CudaGroup(std::shared_ptr<Comm> comm, const xd_ep_config* config);
  ~CudaGroup() override;

  void prepare(const xd_ep_prepare_args* args, xd_stream stream) override {
    run(XD_EP_PREPARE, read_prepare, args, stream);
  }
  void dispatch(const xd_ep_dispatch_args* args, xd_stream stream) override {
    run(XD_EP_DISPATCH, read_dispatch, args, stream);
  }
  void combine(const xd_ep_combine_args* args, xd_stream stream) override {
    run(XD_EP_COMBINE, read_combine, args, stream);
  }
  void dispatch_bwd(const xd_ep_dispatch_bwd_args* args, xd_stream stream) override {
    run(XD_EP_DISPATCH_BWD, read_dispatch_bwd, args, stream);
  }
  void combine_bwd(const xd_ep_combine_bwd_args* args, xd_stream stream) override {
    run(XD_EP_COMBINE_BWD, read_combine_bwd, args, stream);
  }
  void set_placement(const xd_ep_placement* placement, xd_stream stream) override;
  void tell_loads(const DLTensor* loads, std::int32_t clear, xd_stream stream) override;
  void row_experts(const xd_ep_plan_row_experts_args* args, xd_stream stream) override {
    comm().errors().check_open();
    const xd::cuda::DeviceGuard guard(comm().device().device_id);
    const RowExpertsCall call = read_row_experts(args, call_context());
    require_memory(call, plan_bytes_, known_memory_);
    start_row_experts(call, plan_binding(), stream);
  }

  void collect_losses() override { losses_.collect(*runner_.report(), slots_, *this); }
  xd_ep_status take_status() override {
    runner_.collect();
    collect_losses();
    return Group::take_status();
  }

  const volatile std::uint64_t* watch() const override { return runner_.watch(); }

 protected:
  void take_failed_turn(std::int32_t operation, Error&& error, xd_stream stream) override {
    runner_.run(operation, stream, [&] { throw std::move(error); });
  }

 private:
  void keep_for_good() noexcept;
  void check_limits() const;
  void require_shared_memory() const;
  void require_strips() const;
  void describe_group();
  void describe_ranks();

  void launch_failed_turn(const turn::Call& call, std::uint32_t number, xd_stream stream) const;

  GroupView view() const { return {*this, device_, segment_base(rank())}; }
  std::byte* segment_base(int r) const { return segments_[at(r)]->base(); }

  Traffic traffic_of(int tokens, std::uint64_t row_bytes, bool receives) const {
    return {.ranks = config().ranks,
            .tokens = tokens,
            .topk = config().max_topk,
            .row_bytes = row_bytes,
            .row_per_expert = config().layout.row_per_expert,
            .receives = receives};
  }
  // The budget within the multiprocessors that the stream's kernels run on.
  int budget_on(xd_stream stream) const {
    return std::min(budget_, xd::cuda::multiprocessors_of(stream, limits_.sms));
  }
  // The multiprocessors that the caller asks for; 0 = none in particular.
  int num_sms_of(const Portion& portion) const {
    XD_REQUIRE(portion.num_sms <= budget_, "num_sms = ", portion.num_sms,
               ", expected at most the group's ", budget_);
    return portion.num_sms > 0 ? portion.num_sms : config().num_sms;
  }
  void log_shape(int operation, const LaunchShape& shape, const Traffic& traffic, int num_sms,
                 int budget) const {
    if (!log_enabled("plan")) return;
    log_line(concat("[plan] ",
                    explain(Family::kOperations.name(operation), shape, traffic, num_sms, budget)));
  }

  template <class Args, class Call>
  void run(xd_ep_operation operation, Call (*read)(const Args*, const CallContext&),
           const Args* args, xd_stream stream) {
    runner_.run(operation, stream, [&] { start(read(args, call_context()), stream); });
  }
  void start(const PrepareCall& call, xd_stream stream);
  void start(const DispatchCall& call, xd_stream stream) { start_dispatch(call, stream); }
  void start(const CombineCall& call, xd_stream stream) { start_combine(call, stream); }
  void start(const DispatchBwdCall& call, xd_stream stream) { start_combine(call, stream); }
  void start(const CombineBwdCall& call, xd_stream stream) { start_dispatch(call, stream); }
  template <class Call>
  void start_dispatch(const Call& call, xd_stream stream);
  template <class Call>
  void start_combine(const Call& call, xd_stream stream);

  using Runner = turn::DeviceRunner<Family, GroupState, Report>;

  // The memory that keep_for_good() keeps. It is made with the group: there may be no memory when
  // the group goes.
  struct Kept {
    std::shared_ptr<Comm> comm;
    std::vector<std::shared_ptr<Segment>> segments;
    xd::cuda::DeviceBuffer scratch, tables;
    Runner::Memory of_turns;
    std::unique_ptr<RemoteGroup> remote;
    DeviceSlotTable slots;
    Kept* next = nullptr;
  };
  std::unique_ptr<Kept> kept_ = std::make_unique<Kept>();
  std::shared_ptr<Comm> keeps_comm_;  // and so its memory, which kernels use
  LaunchLimits limits_;
  int budget_ = 0;
  SmShare share_;
  std::size_t plan_bytes_ = 0;
  xd::cuda::KnownMemory& known_memory_;
  Segments segments_;
  std::unique_ptr<RemoteGroup> remote_;  // where some ranks are on other machines
  xd::cuda::DeviceBuffer scratch_, tables_;
  DeviceSlotTable slots_;
  GroupDevice device_{};
  ExpertMap experts_;                         // with tables in device memory
  const std::uint32_t* host_keys_ = nullptr;  // CombineParams::host_keys
  LossCounter losses_;
  Runner runner_{*this, config().fatal_errors,
                 [this](const Report& report) { return operation_error_of(report, *this); },
                 [this](const turn::Call& call, std::uint32_t number, xd_stream stream) {
                   launch_failed_turn(call, number, stream);
                 }};
};

CudaGroup::CudaGroup(std::shared_ptr<Comm> owner, const xd_ep_config* user)
    : Group(owner, user, keeps_of),
      keeps_comm_(std::move(owner)),
      plan_bytes_(plan_size(config())),
      known_memory_(xd::cuda::KnownMemory::of(comm().device().device_id)) {
  segments_ = share_memory();
  if (!comm().hosts().all_are_near()) remote_ = std::make_unique<RemoteGroup>(*this);
  comm().collective().agree(Family::kCreate, [this] {
    check_limits();
    const int ordinal = comm().device().device_id;
    const xd::cuda::DeviceGuard guard(ordinal);
    int shared_bytes = 0;
    XD_CUDA_CHECK(
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
    limits_ = {.sms = comm().multiprocessors(),
               .shared_bytes = at(shared_bytes),
               .ranks_on_device = comm().ranks_on_device()};
    budget_ = sm_budget(config(), limits_);
    require_shared_memory();
    require_strips();
    const PrepareScratch scratch = PrepareScratch::make(config().experts, config().ranks);
    runner_.allocate();
    scratch_ = xd::cuda::DeviceBuffer(ordinal, scratch.words * sizeof(std::uint32_t),
                                      "a group's working memory");
    slots_ = DeviceSlotTable(config(), slot_table(), rank(), ordinal, true);
    load_kernels(limits_, remote_ != nullptr, config().wire_formats != 0);
    describe_group();
    describe_ranks();
    if (remote_ != nullptr) runner_.set_control(&GroupState::remote, remote_->device());
    return Collective::Contribution{};
  });
  share_ = SmShare(comm().device().device_id, budget_, limits_.sms - kReservedSms);
  runner_.begin();
}

CudaGroup::~CudaGroup() {
  collect_losses();  // for XD_LOG=stats
  if (!runner_.end()) keep_for_good();
}

// Everything that a kernel of this group may touch is never freed.
void CudaGroup::keep_for_good() noexcept {
  static std::atomic<Kept*> all{nullptr};  // found from here, so that it is not lost
  log_warning("a group was destroyed while an operation of it runs [rank ", rank(), " of ",
              config().ranks, "]: its memory is kept until the process ends");
  if (remote_ != nullptr) remote_->outlive_group();
  Kept* const kept = kept_.release();
  *kept = {std::move(keeps_comm_), std::move(segments_), std::move(scratch_), std::move(tables_),
           runner_.take_memory(),  std::move(remote_),   std::move(slots_),   all.load()};
  while (!all.compare_exchange_weak(kept->next, kept)) {
  }
}

void CudaGroup::check_limits() const {
  if (!comm().hosts().all_are_near()) require_no_wires(config());
  require_no_resume(config());
  if (config().ranks > kMaxDeviceRanks || config().experts > kMaxDeviceExperts) {
    fail(XD_ERROR_UNSUPPORTED, "config: ", config().ranks, " ranks and ", config().experts,
         " experts, expected at most ", kMaxDeviceRanks, " and ", kMaxDeviceExperts,
         " on CUDA devices");
  }
  // Counts are 32-bit.
  if (at(config().ranks) * at(config().max_tokens) > UINT32_MAX / 2) {
    fail(XD_ERROR_UNSUPPORTED, "config.max_tokens_per_rank = ", config().max_tokens, " on ",
         config().ranks, " ranks, expected less than 2^31 tokens together on CUDA devices");
  }
}

void CudaGroup::require_strips() const {
  const std::uint64_t most = longest_row_in_strips(limits_.sms);
  if (config().max_row_bytes > most) {
    fail(XD_ERROR_UNSUPPORTED, "config.hidden: rows have ", config().max_row_bytes,
         " bytes, expected at most ", most, " on a CUDA device of ", limits_.sms,
         " multiprocessors");
  }
}

// Checks the need of prepare: the others take fewer warps where there is less.
void CudaGroup::require_shared_memory() const {
  const std::size_t needed =
      prepare_shape(config().experts, config().ranks, 0, budget_, limits_).shared_bytes +
      kStaticSharedBytes;
  if (needed > limits_.shared_bytes) {
    fail(XD_ERROR_UNSUPPORTED, "config.num_experts = ", config().experts, " on ", config().ranks,
         " ranks needs ", needed, " bytes of shared memory per block, this device has ",
         limits_.shared_bytes);
  }
}

void CudaGroup::describe_group() {
  const Config& c = config();
  GroupDevice& g = device_;
  g.comm = comm().device_comm();
  g.number = number();
  g.experts = c.experts;
  g.slots = slots_.device();
  g.local_experts = c.local_experts;
  g.max_tokens = c.max_tokens;
  g.terms = terms_of(plan_binding());
  g.layout = c.layout;
  g.drop = c.overflow == XD_EP_OVERFLOW_DROP;
  g.collapse = c.collapse;
  g.fatal_errors = c.fatal_errors;
  g.zero_tail = c.zero_tail;
  g.keeps_items = c.keeps.items;
  g.capacity = c.capacity;
  g.capacities_hash = plan_binding().capacities;
  g.plan_head_bytes = PlanMap::make({.local_experts = c.local_experts,
                                     .items = c.keeps.items ? c.capacity : 0,
                                     .ranks = c.ranks})
                          .code;
  g.codec_experts = static_cast<std::uint32_t>(c.layout.codes_per_row(c.most_local_experts()));
  g.control = runner_.control();
  g.report = runner_.report();
  g.map = GroupMap::make(c);
  g.chunk_stride = summed_chunks().bound(c.max_tokens);
  g.kept_stride = c.most_local_experts();
  g.lists_stride = GroupMap::list_words(c);
}

void CudaGroup::describe_ranks() {
  const ExpertMap& map = config().map();
  const GroupTables tables = GroupTables::make(map);
  std::vector<HeapRange> areas;
  std::vector<std::uint32_t> base{0}, keys;
  for (int r = 0; r < config().ranks; ++r) {
    areas.push_back(comm().hosts().is_near(r)
                        ? HeapRange{segment_base(r), segments_[at(r)]->bytes()}
                        : remote_->stand_in(r));
    base.push_back(base.back() + static_cast<std::uint32_t>(capacities()[at(r)]));
    keys.push_back(host_key(comm().hosts().host_of(r), r));
    if (config_of(r).keeps.items) {
      device_.keeps_items_mask[r / 64] |= std::uint64_t{1} << (r % 64);
    }
  }
  tables_ = xd::cuda::DeviceBuffer(comm().device().device_id, tables.end, "a group's tables");
  tables_.write(tables.areas, areas.data(), std::span(areas).size_bytes());
  tables_.write(tables.base, base.data(), std::span(base).size_bytes());
  tables_.write(tables.host_keys, keys.data(), std::span(keys).size_bytes());
  device_.areas = reinterpret_cast<const HeapRange*>(tables_.data() + tables.areas);
  device_.base = reinterpret_cast<const std::uint32_t*>(tables_.data() + tables.base);
  if (sums_by_host()) {
    host_keys_ = reinterpret_cast<const std::uint32_t*>(tables_.data() + tables.host_keys);
  }
  experts_ = map;
  if (!map.has_tables()) return;
  const auto copy = [&](std::uint64_t offset, const std::uint32_t* from, int words) {
    tables_.write(offset, from, at(words) * sizeof(std::uint32_t));
    return reinterpret_cast<const std::uint32_t*>(tables_.data() + offset);
  };
  experts_.physical_experts = copy(tables.physical_experts, map.physical_experts, map.experts);
  experts_.physical_ranks = copy(tables.physical_ranks, map.physical_ranks, map.experts + 1);
  experts_.firsts = copy(tables.firsts, map.firsts, map.ranks + 1);
}

void CudaGroup::launch_failed_turn(const turn::Call& call, std::uint32_t number,
                                   xd_stream stream) const {
  Record record;
  record.call = call;
  BareParams params = bare_params(record, view());
  params.turn.launch = number;
  launch(params, remote_ != nullptr, stream);
}

void CudaGroup::set_placement(const xd_ep_placement* placement, xd_stream stream) {
  require_logical_experts(config());
  comm().require_not_captured(stream);
  runner_.run(XD_EP_SET_PLACEMENT, stream, [&] {
    const SlotTable table = SlotTable::read(placement, config(), rank());
    BareParams params = bare_params(record_of(table), view());
    params.turn.launch = runner_.next_launch();
    slots_.change(table, [&](const SlotTableChange& change) {
      params.change = change;
      launch(params, remote_ != nullptr, stream);
    });
  });
}

void CudaGroup::tell_loads(const DLTensor* loads, std::int32_t clear, xd_stream stream) {
  require_logical_experts(config());
  comm().errors().check_open();
  const xd::cuda::DeviceGuard guard(comm().device().device_id);
  const Tensor out = read_loads(loads, clear, call_context());
  known_memory_.require({xd::cuda::claim(out, true)});
  slots_.tell_loads(out, clear != 0, stream);
}

void CudaGroup::start(const PrepareCall& call, xd_stream stream) {
  require_memory(call, plan_bytes_, known_memory_);
  PrepareParams params = prepare_params(call, view());
  params.turn.launch = runner_.next_launch();
  params.scratch = scratch_.as<std::uint32_t>();
  params.experts = experts_;
  const int budget = budget_on(stream);
  const LaunchShape shape =
      prepare_shape(config().experts, config().ranks, params.tokens, budget, limits_);
  log_shape(XD_EP_PREPARE, shape,
            {.ranks = config().ranks, .tokens = params.tokens, .topk = params.topk},
            config().num_sms, budget);
  launch(params, remote_ != nullptr, shape, stream);
}

template <class Call>
void CudaGroup::start_dispatch(const Call& call, xd_stream stream) {
  require_memory(call, plan_bytes_, known_memory_);
  DispatchStart start = dispatch_params(call, view());
  DispatchParams& params = start.params;
  const int tokens = static_cast<int>(start.tokens.rows);
  Traffic traffic = traffic_of(tokens, params.recv_tokens.row_bytes, params.receives);
  traffic.staged = params.recv_tokens.staged != nullptr;
  traffic.scaled = params.weights != nullptr;
  const int num_sms = num_sms_of(call.portion), budget = budget_on(stream);
  const LaunchShape shape =
      dispatch_shape(traffic, params.send, params.fan_out, num_sms, budget, limits_);
  params.turn.launch = runner_.next_launch();
  params.send_blocks = shape.first_blocks;
  log_shape(params.turn.record.call.operation, shape, traffic, num_sms, budget);
  launch(params, start.tokens.type, remote_ != nullptr, shape, stream);
}

template <class Call>
void CudaGroup::start_combine(const Call& call, xd_stream stream) {
  require_memory(call, plan_bytes_, known_memory_);
  CombineStart start = combine_params(call, view());
  WireCombineParams& params = start.params;
  Traffic traffic = traffic_of(start.tokens, params.row_bytes, params.pushes);
  traffic.coded = start.wire && params.form == CellForm::codes;
  const int num_sms = num_sms_of(call.portion), budget = budget_on(stream);
  const LaunchShape shape = combine_shape(traffic, num_sms, budget, limits_);
  params.turn.launch = runner_.next_launch();
  params.push_blocks = shape.first_blocks;
  params.host_keys = host_keys_;
  log_shape(params.turn.record.call.operation, shape, traffic, num_sms, budget);
  if (start.wire) return launch(params, start.type, shape, stream);
  launch(static_cast<const CombineParams&>(params), start.type, remote_ != nullptr, shape, stream);
}

std::unique_ptr<Group> make_group(std::shared_ptr<Comm> comm, const xd_ep_config* config) {
  return std::make_unique<CudaGroup>(std::move(comm), config);
}

xd_ep_memory group_memory(const Config& config) {
  require_no_resume(config);
  xd_ep_memory memory = shared_memory_of(config, keeps_of);
  memory.symmetric_bytes = round_up(memory.symmetric_bytes, kGranularity);
  memory.private_bytes =
      PrepareScratch::make(config.experts, config.ranks).words * sizeof(std::uint32_t) +
      DeviceSlotTable::bytes(config, true) + GroupTables::make(config.map()).end +
      sizeof(GroupState) + sizeof(Report);
  return memory;
}

}  // namespace

const BulkExecutor kBulk{.device_type = kDLCUDA,
                         .make_group = make_group,
                         .group_memory = group_memory,
                         .routing_layout = start_routing_layout};

}  // namespace xd::ep::cuda
