#include "ep/slots/group.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <span>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "cuda/known_memory.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "ep/executors.h"
#include "ep/experts/cuda/experts.h"
#include "ep/plan/cuda/device_slot_table.h"
#include "ep/plan/cuda/sm_ledger.h"
#include "ep/slots/cuda/call_params.h"
#include "ep/slots/cuda/kernels.h"
#include "ep/slots/cuda/remote/group.h"
#include "ep/slots/cuda/report.h"
#include "ep/slots/cuda/shape.h"
#include "ep/slots/cuda/tables.h"
#include "turn/device/runner.h"

namespace xd::ep::cuda {
namespace {

constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;  // in which devices share memory

LlSizes sizes_of(const LlConfig& c) {
  return {.ranks = c.ranks,
          .experts = c.experts,
          .local_experts = c.local_experts,
          .max_tokens = c.max_tokens,
          .max_topk = c.max_topk,
          .stages = ll_stages(c.in_flight),
          .masks = c.masks_lost_peers,
          .max_row_bytes = c.max_row_bytes,
          .max_partial_bytes = c.max_wire_bytes(),
          .has_slots = c.has_slots()};
}

class CudaLlGroup final : public LlGroup {
 public:
  CudaLlGroup(std::shared_ptr<Comm> comm, const xd_ll_config* config);
  ~CudaLlGroup() override;

  void dispatch(const xd_ll_dispatch_args* args, xd_stream stream) override {
    run(XD_LL_DISPATCH, stream, [&](LlHalves& halves, bool& entered) {
      return start_dispatch(args, halves, entered, stream);
    });
  }
  void combine(const xd_ll_combine_args* args, xd_stream stream) override {
    run(XD_LL_COMBINE, stream, [&](LlHalves& halves, bool& entered) {
      return start_combine(args, halves, entered, stream);
    });
  }
  void set_placement(const xd_ep_placement* placement, xd_stream stream) override {
    require_logical_experts(config());
    comm().require_not_captured(stream);
    run(XD_LL_SET_PLACEMENT, stream, [&](LlHalves& halves, bool& entered) {
      start_set_placement(placement, halves, entered, stream);
      return LlOperationError{};
    });
  }
  void mask_set(std::int32_t peer, std::int32_t masked, xd_stream stream) override;
  void mask_get(const DLTensor* mask, xd_stream stream) override;
  void reset(xd_stream stream) override;

  void collect_losses() override {
    const std::lock_guard lock(losses_mutex_);
    const std::uint64_t bad =
        std::atomic_ref(runner_.report()->total_bad_ids).load(std::memory_order_relaxed);
    count_bad_ids(static_cast<std::int64_t>(bad - bad_ids_));
    bad_ids_ = bad;
    const std::int64_t unplaced = slots_.unplaced();
    count_unplaced(unplaced - unplaced_);
    unplaced_ = unplaced;
  }
  xd_ll_status take_status() override {
    runner_.collect();
    collect_losses();
    const LlReport& report = *runner_.report();
    xd_ll_status status = LlGroup::take_status();
    LlFamily::tell_masks(report.masked, report.masked_by, status);
    return status;
  }
  const volatile std::uint64_t* watch() const override { return runner_.watch(); }
  // The count of which kernels show the host a copy.
  const std::uint64_t* fault_word() const override { return &runner_.control()->errors; }

 protected:
  void take_failed_turn(std::int32_t operation, Error&& error, xd_stream stream) override {
    runner_.run(
        operation, stream, [&] { throw std::move(error); }, failed_turn(kUnknownHalves));
  }

 private:
  using Runner = turn::DeviceRunner<LlFamily, LlControl, LlReport>;

  int device_id() const { return comm().device().device_id; }
  void check_limits() const;
  void share_memory();
  std::vector<HeapRange> near_areas() const;
  void choose_shapes();
  void describe_group();
  void describe_tables();
  void load_kernels();
  std::size_t room() const { return limits_.shared_bytes - kStaticSharedBytes; }
  // A dependent launch takes multiprocessors while it waits for the launch before it. Where others
  // may need them so that that one ends, another rank on this device or this rank's other pipeline
  // on another stream, launches begin one after the other.
  bool may_depend() const {
    return env().ll_dependent != 0 && limits_.ranks_on_device == 1 && 2 * blocks_ > limits_.sms &&
           remote_ == nullptr;
  }

  // The shape of a launch that does these halves.
  LaunchShape dispatch_shape(const LlStep& step, LlDispatchParams& params) const;
  // `units`: pieces of rows that a receive half sums.
  LaunchShape combine_shape(const LlStep& step, std::int64_t units = 0) const;
  static std::int64_t units_of(const LlCombineParams& params) {
    const std::int64_t vectors =
        params.row_bytes / ll_vector_bytes(params.form, static_cast<DType>(params.type));
    return params.out_rows * ((vectors + kLlMoverThreads - 1) / kLlMoverThreads);
  }
  LlStep step_of(const LlHalves& halves) {
    return {.send = halves.send,
            .receive = halves.receive,
            .failed = false,
            .silent = false,
            .launch = runner_.next_launch()};
  }

  // start(halves, entered) returns the mistake of a receive half that has taken its turn all the
  // same. It sets the halves of the call when it knows them, and `entered` as DeviceRunner::run().
  template <class Start>
  void run(xd_ll_operation operation, xd_stream stream, Start&& start) {
    LlOperationError bad;
    LlHalves halves = kUnknownHalves;
    runner_.run(
        operation, stream, [&](bool& entered) { bad = start(halves, entered); },
        failed_turn(halves));
    if (bad) give_back(bad, operation, 0);
  }
  // A failed call is the whole operation. One that is known to have both halves takes no turn where
  // it would overtake another one, and only its kernel knows that.
  static constexpr LlHalves kUnknownHalves{.send = true, .receive = false};
  Runner::LaunchFailed failed_turn(const LlHalves& halves) const {
    return [this, &halves](const turn::Call& call, std::uint32_t number, xd_stream stream) {
      launch_failed_turn(call, halves, number, stream);
    };
  }
  template <class Read, class Params>
  LlOperationError add_receive_half(const Read& read, Params& params);
  LlOperationError start_dispatch(const xd_ll_dispatch_args* args, LlHalves& halves, bool& entered,
                                  xd_stream stream);
  LlOperationError start_combine(const xd_ll_combine_args* args, LlHalves& halves, bool& entered,
                                 xd_stream stream);
  void start_set_placement(const xd_ep_placement* placement, LlHalves& halves, bool& entered,
                           xd_stream stream);
  void enqueue_dispatch(LlGivenParams& params, bool& entered, xd_stream stream) const;
  void launch_failed_turn(const turn::Call& call, const LlHalves& halves, std::uint32_t number,
                          xd_stream stream) const;
  template <class Params>
  void enqueue(Params& params, const LaunchShape& shape, int pipeline, xd_stream stream) const {
    if (verifies_) launch_verify(device_, pipeline, stream);
    launch(params, shape, stream);
  }
  // Where ranks are on other machines.
  void enqueue_remote(LlGivenParams& params, bool& entered, xd_stream stream) const {
    if (verifies_) launch_verify(device_, kLlDispatch, stream);
    const auto shape = [&](const LlStep& step) { return dispatch_shape(step, params); };
    remote_->enqueue(params, shape, entered, stream);
  }
  void enqueue_remote(LlCombineParams& params, bool& entered, xd_stream stream) const {
    if (verifies_) launch_verify(device_, kLlCombine, stream);
    const auto shape = [&](const LlStep& step) { return combine_shape(step, units_of(params)); };
    remote_->enqueue(params, shape, entered, stream);
  }

  std::shared_ptr<Comm> keeps_comm_;  // and so its memory, which kernels use
  const bool verifies_ = env().ll_verify != 0;
  const std::size_t plan_bytes_;
  xd::cuda::KnownMemory& known_memory_;
  LaunchLimits limits_;
  int blocks_ = 0;
  SmShare share_;
  LlSizes sizes_;
  Segments segments_;
  std::unique_ptr<LlRemoteGroup> remote_;  // where some ranks are on other machines
  xd::cuda::DeviceBuffer tables_;
  DeviceSlotTable slots_;
  xd::cuda::DeviceBuffer verdict_;  // LlVerdictMap
  LlDevice device_{};
  std::mutex losses_mutex_;
  std::uint64_t bad_ids_ = 0;  // bad ids that the group has been told of
  std::int64_t unplaced_ = 0;  // likewise choices of experts without a slot
  Runner runner_{*this, config().fatal_errors,
                 [this](const LlReport& report) { return operation_error_of(report, *this); }};
};

CudaLlGroup::CudaLlGroup(std::shared_ptr<Comm> owner, const xd_ll_config* user)
    : LlGroup(owner, user),
      keeps_comm_(std::move(owner)),
      plan_bytes_(plan_size(config())),
      known_memory_(xd::cuda::KnownMemory::of(device_id())),
      sizes_(sizes_of(config())) {
  // Both are equal on all ranks.
  if (!comm().hosts().all_are_near()) require_no_wires(config());
  if (config().masks_lost_peers)
    comm().require_all_near("low latency with on_peer_loss = XD_LL_PEER_LOSS_MASK on GPUs");
  sizes_.rows_last = !comm().hosts().all_are_near();
  share_memory();
  if (!comm().hosts().all_are_near()) {
    remote_ =
        std::make_unique<LlRemoteGroup>(*this, near_areas(), LlWordsMap::make<LlRecord>(sizes_));
  }
  comm().collective().agree(LlFamily::kCreate, [this] {
    const xd::cuda::DeviceGuard guard(device_id());
    check_limits();
    choose_shapes();
    runner_.allocate();
    slots_ = DeviceSlotTable(config(), slot_table(), rank(), device_id(), false);
    verdict_ = xd::cuda::DeviceBuffer(device_id(), LlVerdictMap::make(config(), plan_bytes_).end,
                                      "a group's table of slots");
    describe_group();
    describe_tables();
    load_kernels();
    return Collective::Contribution{};
  });
  share_ = SmShare(device_id(), blocks_, limits_.sms);
  runner_.begin();
}

CudaLlGroup::~CudaLlGroup() { static_cast<void>(runner_.end()); }

void CudaLlGroup::check_limits() const {
  const LlConfig& c = config();
  // Counts of rows from each source lie in shared memory.
  const std::int64_t counters = std::int64_t{c.ranks} * c.local_experts;
  if (counters > 65536 || c.local_experts >= 65535) {
    fail(XD_ERROR_UNSUPPORTED, "config.num_experts = ", c.experts, ": rank ", rank(), " has ",
         c.local_experts, " of them on ", c.ranks,
         " ranks, expected at most 65536 / num_ranks on CUDA devices");
  }
  // Rows have room for so many scales and weights.
  const LlRowForm form =
      ll_row_form(static_cast<std::uint32_t>(c.max_row_bytes),
                  static_cast<std::uint32_t>(c.max_row_bytes / 2 / 128 * 4), true, c.max_topk);
  if (form.tail_words() > kLlMostTailWords) {
    fail(XD_ERROR_UNSUPPORTED, "config.hidden: rows have ", c.max_row_bytes,
         " bytes, expected at most 220000 in low latency on CUDA devices");
  }
}

void CudaLlGroup::share_memory() {
  segments_ = comm().share(LlFamily::kCreate, LlWordsMap::make<LlRecord>(sizes_).end);
}

std::vector<HeapRange> CudaLlGroup::near_areas() const {
  std::vector<HeapRange> areas(at(config().ranks), HeapRange{});
  for (const NearRank r : near())
    areas[at(r)] = {segments_[at(r)]->base(), segments_[at(r)]->bytes()};
  return areas;
}

void CudaLlGroup::choose_shapes() {
  int shared_bytes = 0;
  XD_CUDA_CHECK(
      cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_id()));
  limits_ = {.sms = comm().multiprocessors(),
             .shared_bytes = at(shared_bytes),
             .ranks_on_device = comm().ranks_on_device()};
  const int all = limits_.sms / limits_.ranks_on_device;
  blocks_ = config().num_sms != 0 ? std::min(config().num_sms, all) : all;
  XD_REQUIRE(blocks_ >= kLlFewestBlocks, "config.num_sms = ", config().num_sms,
             ", expected at least ", kLlFewestBlocks, " in low latency, on a device with ",
             limits_.sms, " multiprocessors and ", limits_.ranks_on_device, " ranks");
}

void CudaLlGroup::describe_group() {
  const LlConfig& c = config();
  LlDevice& g = device_;
  g.comm = comm().device_comm();
  if (c.wait_timeout_ms != 0) g.comm.timeout_ms = c.wait_timeout_ms;
  g.number = number();
  g.fatal_errors = c.fatal_errors;
  g.masks = c.masks_lost_peers;
  g.collapse = c.collapse;
  g.dependent = may_depend();
  g.experts = c.experts;
  g.local_experts = c.local_experts;
  g.max_tokens = c.max_tokens;
  g.max_topk = c.max_topk;
  g.in_flight = c.in_flight;
  g.stages = ll_stages(c.in_flight);
  g.most_blocks = blocks_;
  g.control = runner_.control();
  g.report = runner_.report();
  g.own_area = segments_[at(rank())]->base();
  g.map = LlWordsMap::make<LlRecord>(sizes_);
  g.ids = LlIdWords::make(c.experts, c.max_topk);
  g.terms = plan_terms();
  // A plan has room for all items that may come, and items for so many choices, so that kernels
  // know where each part lies.
  g.terms.keeps_items = c.max_topk;
  g.plan = LlPlanMap::make({.local_experts = c.local_experts,
                            .tokens = c.max_tokens,
                            .topk = c.max_topk,
                            .items = std::int64_t{c.ranks} * c.max_tokens});
  g.nonce = nonce();
  g.slots = slots_.device();
}

// Also frees all staging for the first time. All ranks do before any of them begins an operation.
void CudaLlGroup::describe_tables() {
  const LlConfig& c = config();
  const LlTables tables = LlTables::make(c, blocks_);
  const std::vector<HeapRange> areas = near_areas();
  const std::vector<std::uint32_t> places = ll_places(c);
  const std::vector<std::uint32_t> order = ll_order(sizes_, rank(), ll_senders(blocks_));
  tables_ = xd::cuda::DeviceBuffer(device_id(), tables.end, "a group's tables");
  tables_.write(tables.areas, areas.data(), std::span(areas).size_bytes());
  tables_.write(tables.places, places.data(), std::span(places).size_bytes());
  tables_.write(tables.order, order.data(), std::span(order).size_bytes());
  const HostMap& hosts = comm().hosts();
  std::vector<RankBits> of_host(at(hosts.num_hosts()));
  for (int r = 0; r < c.ranks; ++r) of_host[at(hosts.host_of(r))].add(r);
  tables_.write(tables.hosts, of_host.data(), std::span(of_host).size_bytes());
  std::byte* const base = tables_.data();
  device_.areas = reinterpret_cast<const HeapRange*>(base + tables.areas);
  device_.places = reinterpret_cast<const std::uint32_t*>(base + tables.places);
  device_.order = reinterpret_cast<const std::uint32_t*>(base + tables.order);
  device_.num_hosts = hosts.num_hosts();
  device_.hosts = reinterpret_cast<const RankBits*>(base + tables.hosts);
  for (int pipeline = 0; pipeline < 2; ++pipeline) {
    device_.counts[pipeline] =
        reinterpret_cast<turn::PipelineCount*>(base + tables.counts[pipeline]);
  }
  const xd::cuda::Stream stream(device_id());
  const std::uint64_t staging = std::min(device_.map.rows, device_.map.partials);
  XD_CUDA_CHECK(
      cudaMemsetAsync(device_.own_area + staging, 0xFF, device_.map.end - staging, stream.get()));
  if (remote_ != nullptr) remote_->give_credits(device_, stream.get());
  stream.synchronize();
}

// Loads every kernel, and checks that each launch that there may be fits the device.
void CudaLlGroup::load_kernels() {
  LlDispatchParams params{};
  LlStep step{.send = true, .receive = true, .failed = false, .silent = false, .launch = 0};
  load_ll_control();
  load_slot_table();
  load_experts();
  if (remote_ != nullptr) {
    remote_->load(device_, dispatch_shape(step, params), room(), combine_shape(step));
  } else {
    load_ll_dispatch(device_, dispatch_shape(step, params), room());
    load_ll_given(device_, dispatch_shape(step, params), room());
    load_ll_combine(combine_shape(step), config().wire_formats != 0);
  }
  step.receive = false;
  dispatch_shape(step, params);
  step.send = false;
  step.receive = true;
  dispatch_shape(step, params);
}

// ---- Calls -------------------------------------------------------------------------------------

LaunchShape CudaLlGroup::dispatch_shape(const LlStep& step, LlDispatchParams& params) const {
  // A call that has failed waits for no rows.
  const bool sends_only = step.send && (!step.receive || step.failed);
  const bool receives_only = step.receive && !step.send;
  const std::int64_t rows = std::int64_t{config().ranks} * config().max_tokens;
  const int blocks = sends_only      ? ll_send_blocks(blocks_)
                     : receives_only ? ll_receive_blocks_of_rows(blocks_, rows)
                                     : blocks_;
  params.senders = receives_only ? 0 : ll_senders(blocks_);
  params.smem = ll_smem_layout(sizes_, room());
  if (params.smem.end > room()) {
    fail(XD_ERROR_UNSUPPORTED, "config: dispatch needs ", params.smem.end,
         " bytes of shared memory per block, this device has ", room());
  }
  return {.blocks = blocks,
          .first_blocks = params.senders,
          .threads = kLlDispatchThreads,
          .shared_bytes = params.smem.end};
}

LaunchShape CudaLlGroup::combine_shape(const LlStep& step, std::int64_t units) const {
  const bool receives_only = step.receive && !step.send;
  return {.blocks = receives_only ? ll_receive_blocks(blocks_, units) : blocks_,
          .first_blocks = 0,
          .threads = kLlCombineBlockThreads,
          .shared_bytes = 0};
}

// A mistake in a receive half by itself comes back: its kernel starts all the same, and takes
// the operation without its rows.
template <class Read, class Params>
LlOperationError CudaLlGroup::add_receive_half(const Read& read, Params& params) {
  try {
    const auto call = read_ll_receive(read.args, call_context());
    if (read.halves.send) require_fits(call, params.record);
    add_receive(call, plan_bytes_, known_memory_, params);
  } catch (...) {
    if (read.halves.send) throw;
    params.step.silent = true;
    return turn::current_operation_error<LlFamily>(rank());
  }
  return {};
}

LlOperationError CudaLlGroup::start_dispatch(const xd_ll_dispatch_args* args, LlHalves& halves,
                                             bool& entered, xd_stream stream) {
  const auto read = read_ll_args(args);
  halves = read.halves;
  LlGivenParams params{};
  params.group = device_;
  params.step = step_of(read.halves);
  params.record.call.operation = XD_LL_DISPATCH;
  LlDispatchSend send;
  if (read.halves.send) {
    send = read_ll_send(read.args, call_context());
    add_send(send, known_memory_, params);
  }
  const LlOperationError bad =
      read.halves.receive ? add_receive_half(read, params) : LlOperationError{};
  if (slots_ && read.halves.send) {
    const bool dependent = device_.dependent;
    params.topk_idx = slots_.to_slots(send.topk_idx, send.replica_hint, dependent, stream).data;
    params.wide_ids = false;
  }
  enqueue_dispatch(params, entered, stream);
  return bad;
}

void CudaLlGroup::enqueue_dispatch(LlGivenParams& params, bool& entered, xd_stream stream) const {
  if (remote_ != nullptr) return enqueue_remote(params, entered, stream);
  const LaunchShape shape = dispatch_shape(params.step, params);
  enqueue(params, shape, kLlDispatch, stream);
}

// It takes its turn as a dispatch without tokens. Where all ranks agree that one makes a plan, by
// which the kernel behind it knows.
void CudaLlGroup::start_set_placement(const xd_ep_placement* placement, LlHalves& halves,
                                      bool& entered, xd_stream stream) {
  const SlotTable table = SlotTable::read(placement, config(), rank());
  constexpr std::uint32_t kRowBytes = 16;  // of the rows that nobody sends
  const LlVerdictMap map = LlVerdictMap::make(config(), plan_bytes_);
  LlGivenParams params{};
  params.group = device_;
  params.step = step_of(LlHalves{});
  params.record.call.operation = XD_LL_SET_PLACEMENT;
  params.record.fingerprint = table.hash();
  params.record.dtype = params.recv_type = static_cast<std::uint8_t>(DType::bf16);
  params.record.row_bytes = params.recv_row_bytes = kRowBytes;
  params.record.topk = 1;
  params.form = ll_row_form(kRowBytes, 0, false, 0);
  params.scale_element = sizeof(float);
  params.plan = verdict_.data() + map.plan;
  params.counts = reinterpret_cast<std::int32_t*>(verdict_.data() + map.counts);
  params.rows.alignment = 1;
  if (!config().has_slots()) {
    params.rows.row_offsets = reinterpret_cast<std::int64_t*>(verdict_.data() + map.row_offsets);
  }
  slots_.change(table, [&](const SlotTableChange& change) {
    // The call is right. While others are between their halves, it takes no turn.
    halves = {};
    XD_CUDA_CHECK(cudaMemsetAsync(params.plan, 0, sizeof(PlanHeader), stream));
    enqueue_dispatch(params, entered, stream);
    entered = true;
    launch_end_change(change, reinterpret_cast<const PlanHeader*>(params.plan), stream);
  });
}

LlOperationError CudaLlGroup::start_combine(const xd_ll_combine_args* args, LlHalves& halves,
                                            bool& entered, xd_stream stream) {
  const auto read = read_ll_args(args);
  halves = read.halves;
  LlCombineParams params{};
  params.group = device_;
  params.step = step_of(read.halves);
  params.record.call.operation = XD_LL_COMBINE;
  if (read.halves.send) {
    add_send(read_ll_send(read.args, call_context()), plan_bytes_, known_memory_, params);
  }
  const LlOperationError bad =
      read.halves.receive ? add_receive_half(read, params) : LlOperationError{};
  if (remote_ != nullptr) {
    enqueue_remote(params, entered, stream);
    return bad;
  }
  enqueue(params, combine_shape(params.step, units_of(params)), kLlCombine, stream);
  return bad;
}

// The whole operation, with only a status. A receive half whose kernel cannot be launched has
// nothing to send in its place: what this throws finishes the communicator.
void CudaLlGroup::launch_failed_turn(const turn::Call& call, const LlHalves& halves,
                                     std::uint32_t number, xd_stream stream) const {
  if (!halves.send) fail(XD_ERROR_INTERNAL, "a receive half could not be launched");
  bool entered = false;
  const LlStep step{
      .send = true, .receive = halves.receive, .failed = true, .silent = false, .launch = number};
  if (call.operation == XD_LL_COMBINE) {
    LlCombineParams params{};
    params.group = device_;
    params.step = step;
    params.record.call = call;
    params.type = static_cast<std::uint8_t>(DType::bf16);
    if (remote_ != nullptr) return enqueue_remote(params, entered, stream);
    return enqueue(params, combine_shape(step), kLlCombine, stream);
  }
  LlGivenParams params{};
  params.group = device_;
  params.step = step;
  params.record.call = call;
  params.scale_element = sizeof(float);
  enqueue_dispatch(params, entered, stream);
}

// ---- Masks -------------------------------------------------------------------------------------

void CudaLlGroup::mask_set(std::int32_t peer, std::int32_t masked, xd_stream stream) {
  require_masks();
  require_maskable(peer, masked, rank(), config());
  comm().errors().check_usable();
  const xd::cuda::DeviceGuard guard(device_id());
  launch_mask_set(device_, peer, masked != 0, stream);
}

void CudaLlGroup::mask_get(const DLTensor* mask, xd_stream stream) {
  require_masks();
  comm().errors().check_open();
  const xd::cuda::DeviceGuard guard(device_id());
  const Tensor out = read_ll_mask(mask, call_context());
  known_memory_.require({{out.name, out.data, out.bytes(), true}});
  launch_mask_get(device_, out.as<std::int32_t>(), stream);
}

void CudaLlGroup::reset(xd_stream stream) {
  require_masks();
  comm().errors().check_usable();
  const xd::cuda::DeviceGuard guard(device_id());
  launch_reset(device_, runner_.next_launch(), stream);
}

std::unique_ptr<LlGroup> make_group(std::shared_ptr<Comm> comm, const xd_ll_config* config) {
  return std::make_unique<CudaLlGroup>(std::move(comm), config);
}

xd_ll_memory group_memory(const LlConfig& config) {
  constexpr int kMostBlocks = 256;
  xd_ll_memory memory XD_LL_MEMORY_INIT;
  memory.symmetric_bytes = round_up(LlWordsMap::make<LlRecord>(sizes_of(config)).end, kGranularity);
  memory.private_bytes = LlTables::make(config, kMostBlocks).end + sizeof(LlControl) +
                         sizeof(LlReport) + DeviceSlotTable::bytes(config, false) +
                         LlVerdictMap::make(config, plan_size(config)).end;
  return memory;
}

}  // namespace

const SlotsExecutor kSlots{
    .device_type = kDLCUDA, .make_group = make_group, .group_memory = group_memory};

}  // namespace xd::ep::cuda
