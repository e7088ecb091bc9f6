#include "ep/cuda/executor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <span>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "cuda/known_memory.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "ep/cuda/call_memory.h"
#include "ep/cuda/failed_calls.h"
#include "ep/cuda/kernel_params.h"
#include "ep/cuda/local.h"
#include "ep/cuda/report.h"
#include "ep/cuda/sm_ledger.h"
#include "ep/records.h"

namespace xd::ep::cuda {
namespace {

constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;  // of shared device memory

// Rows cross between devices once for all of a token's rows, and partial sums are pushed.
Keeps keeps_of(const Config& config) {
  return {.lists = config.layout.row_per_expert,
          .items = config.layout.row_per_expert || config.staging,
          .partials = config.layout.row_per_expert || config.any_staging,
          .chunks = true};
}

class CudaGroup final : public Group {
 public:
  CudaGroup(std::shared_ptr<Comm> comm, const xd_ep_config* config);
  ~CudaGroup() override;

  void prepare(const xd_ep_prepare_args* args, xd_stream stream) override {
    run(XD_EP_PREPARE, stream, [&] { start_prepare(read_prepare(args, call_context()), stream); });
  }
  void dispatch(const xd_ep_dispatch_args* args, xd_stream stream) override {
    run(XD_EP_DISPATCH, stream,
        [&] { start_dispatch(read_dispatch(args, call_context()), stream); });
  }
  void combine(const xd_ep_combine_args* args, xd_stream stream) override {
    run(XD_EP_COMBINE, stream, [&] { start_combine(read_combine(args, call_context()), stream); });
  }
  void dispatch_bwd(const xd_ep_dispatch_bwd_args* args, xd_stream stream) override {
    run(XD_EP_DISPATCH_BWD, stream,
        [&] { start_combine(read_dispatch_bwd(args, call_context()), stream); });
  }
  void combine_bwd(const xd_ep_combine_bwd_args* args, xd_stream stream) override {
    run(XD_EP_COMBINE_BWD, stream,
        [&] { start_dispatch(read_combine_bwd(args, call_context()), stream); });
  }
  void row_experts(const xd_ep_plan_row_experts_args* args, xd_stream stream) override {
    comm().check_open();
    const xd::cuda::DeviceGuard guard(comm().device().device_id);
    const RowExpertsCall call = read_row_experts(args, call_context());
    require_memory(call, plan_bytes_, known_memory_);
    start_row_experts(call, plan_binding(), stream);
  }

  xd_ep_status take_status() override {
    collect_report();
    return Group::take_status();
  }

  const volatile std::uint64_t* watch() const override { return &report_.as<Report>()->errors; }

 protected:
  void take_failed_turn(std::int32_t operation, Error&& error, xd_stream stream) override {
    run(operation, stream, [&] { throw std::move(error); });
  }

 private:
  void collect_report() {
    const std::lock_guard lock(report_mutex_);
    reader_.collect(*report_.as<Report>(), *this);
  }

  Comm::Cause cause_of(const FatalError& error);
  std::uint32_t launch_failed_turn(std::int32_t operation, const Setback& setback,
                                   xd_stream stream);
  bool at_rest() const;
  void keep_for_good() noexcept;
  void check_limits() const;
  void require_shared_memory() const;
  void share_memory();
  void describe_group();
  void describe_ranks();

  // Arguments that are bad here still take this rank's turn, so that its peers learn it at once and
  // the epochs stay together.
  template <class Start>
  void run(std::int32_t operation, xd_stream stream, Start&& start);

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
  // Of the multiprocessors that the stream's kernels run on.
  int budget_on(xd_stream stream) const {
    return std::min(budget_, xd::cuda::multiprocessors_of(stream, limits_.sms));
  }
  void log_shape(int operation, const LaunchShape& shape, const Traffic& traffic,
                 int budget) const {
    if (!log_enabled("plan")) return;
    log_line(concat("[plan] ", explain(Family::kOperations.name(operation), shape, traffic,
                                       config().num_sms, budget)));
  }
  void start_prepare(const PrepareCall& call, xd_stream stream);
  template <class Call>
  void start_dispatch(const Call& call, xd_stream stream);
  template <class Call>
  void start_combine(const Call& call, xd_stream stream);

  // What keep_for_good() keeps. Made with the group: there may be no memory when the group goes.
  struct Kept {
    std::shared_ptr<Comm> comm;
    std::vector<std::shared_ptr<Segment>> segments;
    xd::cuda::DeviceBuffer control, scratch, tables;
    xd::cuda::PinnedBlock report, last_look;
    Kept* next = nullptr;
  };
  std::unique_ptr<Kept> kept_ = std::make_unique<Kept>();
  std::shared_ptr<Comm> keeps_comm_;  // and so its memory, which kernels use
  LaunchLimits limits_;
  int budget_ = 0;
  SmShare share_;
  std::size_t plan_bytes_ = 0;
  xd::cuda::KnownMemory& known_memory_;
  std::vector<std::shared_ptr<Segment>> segments_;
  xd::cuda::PinnedBlock report_;
  xd::cuda::PinnedBlock last_look_;  // at GroupState::owner, when the group goes
  xd::cuda::DeviceBuffer control_, scratch_, tables_;
  GroupDevice device_{};
  // Wraps after 2^32 - 1 launches: numbers only tell apart launches that overlap.
  std::uint32_t next_launch() {
    const std::uint32_t number = ++launches_;
    return number != 0 ? number : next_launch();
  }

  std::atomic<std::uint32_t> launches_{0};
  std::mutex report_mutex_;
  ReportReader reader_;
  FailedCalls failed_calls_;  // where errors are fatal
};

CudaGroup::CudaGroup(std::shared_ptr<Comm> owner, const xd_ep_config* user)
    : Group(owner, user, keeps_of),
      keeps_comm_(std::move(owner)),
      plan_bytes_(plan_size(config())),
      known_memory_(xd::cuda::KnownMemory::of(comm().device().device_id)) {
  share_memory();
  comm().agree(Comm::Collective::group, [this] {
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
    const PrepareScratch scratch = PrepareScratch::make(config().experts, config().ranks);
    control_ = xd::cuda::DeviceBuffer(ordinal, sizeof(GroupState), "a group's control block");
    scratch_ = xd::cuda::DeviceBuffer(ordinal, scratch.words * sizeof(std::uint32_t),
                                      "a group's working memory");
    report_ = xd::cuda::PinnedBlock(ordinal, sizeof(Report));
    last_look_ = xd::cuda::PinnedBlock(ordinal, sizeof(GroupState::owner));
    load_kernels(limits_);
    describe_group();
    describe_ranks();
    return Comm::Contribution{};
  });
  share_ = SmShare(comm().device().device_id, budget_, limits_.sms - kReservedSms);
  if (config().fatal_errors) {
    comm().explain_by(number(), [this](const FatalError& error) { return cause_of(error); });
  }
}

// The caller has promised that no operation runs any more. A kernel that does run would write into
// memory that has become somebody else's: it is waited for, within bounds.
CudaGroup::~CudaGroup() {
  bool rests = true;
  xd::cuda::try_on_device(comm().device().device_id, [&] { rests = at_rest(); });
  if (config().fatal_errors) {
    static_cast<void>(comm().fatal_error());  // what it says needs this group
    comm().explain_by(number(), {});
  }
  if (!rests) keep_for_good();
}

// False: a kernel of this group is still running. (One that has not begun is not seen.)
bool CudaGroup::at_rest() const {
  constexpr int kPatienceMs = 2000;
  // A fatal error ends every wait of a kernel within a millisecond, but it may leave the group
  // owned: what is still owned then runs no more.
  constexpr int kFailedMs = 100;
  const auto deadline =
      Deadline::after_ms(comm().fatal_error() == nullptr ? kPatienceMs : kFailedMs);
  const auto* owner = last_look_.as<std::uint64_t>();
  do {
    // A look that has not ended may still come, and needs both memories: nothing is at rest.
    if (!control_.read(offsetof(turn::DeviceControl, owner), last_look_.data(), sizeof(*owner),
                       deadline)) {
      return false;
    }
    if (static_cast<std::uint32_t>(*owner) == 0) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  } while (!deadline.passed());
  return comm().fatal_error() != nullptr;
}

// Everything that a kernel of this group may touch is never freed.
void CudaGroup::keep_for_good() noexcept {
  static std::atomic<Kept*> all{nullptr};  // found from here, so that it is not lost
  log_warning("a group was destroyed while an operation of it runs [rank ", rank(), " of ",
              config().ranks, "]: its memory is kept until the process ends");
  Kept* const kept = kept_.release();
  *kept = {std::move(keeps_comm_), std::move(segments_), std::move(control_),   std::move(scratch_),
           std::move(tables_),     std::move(report_),   std::move(last_look_), all.load()};
  while (!all.compare_exchange_weak(kept->next, kept)) {
  }
}

// What a kernel of this group says of an error that it has raised. A mistake that a call has found
// on the host is known to the host alone; which call that was, and at which epoch, to the kernel
// alone.
Comm::Cause CudaGroup::cause_of(const FatalError& error) {
  Report& report = *report_.as<Report>();
  // Relaxed: it was written before the error, which has been taken over with acquire.
  const auto launch = std::atomic_ref(report.fatal_launch).load(std::memory_order_relaxed);
  if (const auto call = failed_calls_.find(launch)) {
    return cause(call->setback, call->operation, error.expected_epoch);
  }
  if (const Setback found = ReportReader::look(report, *this)) {
    return cause(found, report.operation, report.epoch);
  }
  return {.peer = error.peer, .text = {}};
}

void CudaGroup::check_limits() const {
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

// Of prepare, which needs most: dispatch takes fewer warps where there is less.
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

void CudaGroup::share_memory() {
  segments_ = comm().share(Comm::Collective::group, GroupMap::make(config()).end);
  for (int r = 0; r < config().ranks; ++r) {
    require_size(segments_[at(r)], GroupMap::make(config_of(r)).end, r);
  }
}

void CudaGroup::describe_group() {
  const Config& c = config();
  GroupDevice& g = device_;
  g.comm = comm().device_comm();
  g.number = number();
  g.experts = c.experts;
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
  g.codec_experts = static_cast<std::uint32_t>(c.layout.codes_per_row(c.local_experts));
  g.control = control_.as<GroupState>();
  g.report = report_.as<Report>();
  g.map = GroupMap::make(c);
  g.chunk_stride = summed_chunks().bound(c.max_tokens);
  g.lists_stride = GroupMap::list_words(c);
}

void CudaGroup::describe_ranks() {
  const RankTables tables = RankTables::make(config().ranks);
  std::vector<HeapRange> areas;
  std::vector<std::uint32_t> base{0};
  for (int r = 0; r < config().ranks; ++r) {
    areas.push_back({segment_base(r), segments_[at(r)]->bytes()});
    base.push_back(base.back() + static_cast<std::uint32_t>(capacities()[at(r)]));
    if (config_of(r).keeps.items) {
      device_.keeps_items_mask[r / 64] |= std::uint64_t{1} << (r % 64);
    }
  }
  tables_ = xd::cuda::DeviceBuffer(comm().device().device_id, tables.end, "a group's tables");
  tables_.write(tables.areas, areas.data(), std::span(areas).size_bytes());
  tables_.write(tables.base, base.data(), std::span(base).size_bytes());
  device_.areas = reinterpret_cast<const HeapRange*>(tables_.data() + tables.areas);
  device_.base = reinterpret_cast<const std::uint32_t*>(tables_.data() + tables.base);
}

template <class Start>
void CudaGroup::run(std::int32_t operation, xd_stream stream, Start&& start) {
  comm().check_usable();
  const xd::cuda::DeviceGuard guard(comm().device().device_id);
  Setback setback;
  try {
    // Here and not by the launch, which would take that capture down.
    XD_REQUIRE(stream != nullptr || xd::cuda::takes_work(stream),
               "stream = NULL, expected another stream while a blocking one is captured");
    return start();
  } catch (...) {
    setback = turn::current_setback<Family>(rank());
  }
  const std::uint32_t launch = launch_failed_turn(operation, setback, stream);
  if (launch == 0) {
    setback.text +=
        ": the stream takes no work because of a capture, so nothing was enqueued and peers do not "
        "hear of this call";
  }
  give_back(setback, operation, launch);
}

// Returns the number of the launch; 0: the stream takes no kernel, because its capture has been
// invalidated or because another one forbids it. Then nothing of this call has been enqueued: it is
// as if it had not been made, on this rank and on the others. If the launch fails otherwise (a
// stream of another device), the peers would wait for the timeout: that is fatal.
std::uint32_t CudaGroup::launch_failed_turn(std::int32_t operation, const Setback& setback,
                                            xd_stream stream) {
  FailedParams params = failed_params(
      {static_cast<std::uint8_t>(setback.status), static_cast<std::uint8_t>(operation)}, view());
  params.turn.launch = next_launch();
  if (!xd::cuda::takes_work(stream)) return 0;
  if (config().fatal_errors) failed_calls_.note(params.turn.launch, operation, setback);
  try {
    launch(params, {.blocks = 1, .first_blocks = 0, .threads = 128, .shared_bytes = 0}, stream);
  } catch (...) {
    if (!xd::cuda::takes_work(stream)) {
      failed_calls_.forget(params.turn.launch);
      return 0;
    }
    comm().raise({.status = XD_ERROR_INTERNAL,
                  .rank = rank(),
                  .peer = rank(),
                  .group = number(),
                  .operation = params.turn.record.call.operation},
                 Comm::Spread::everywhere);
  }
  return params.turn.launch;
}

void CudaGroup::start_prepare(const PrepareCall& call, xd_stream stream) {
  require_memory(call, plan_bytes_, known_memory_);
  PrepareParams params = prepare_params(call, view());
  params.turn.launch = next_launch();
  params.scratch = scratch_.as<std::uint32_t>();
  const int budget = budget_on(stream);
  const LaunchShape shape =
      prepare_shape(config().experts, config().ranks, params.tokens, budget, limits_);
  log_shape(XD_EP_PREPARE, shape, {config().ranks, params.tokens, 0, false}, budget);
  launch(params, shape, stream);
}

template <class Call>
void CudaGroup::start_dispatch(const Call& call, xd_stream stream) {
  require_memory(call, plan_bytes_, known_memory_);
  DispatchStart start = dispatch_params(call, view());
  DispatchParams& params = start.params;
  const int tokens = static_cast<int>(start.tokens.rows);
  const Traffic traffic = traffic_of(tokens, params.recv_tokens.row_bytes, params.receives);
  const int budget = budget_on(stream);
  const LaunchShape shape =
      dispatch_shape(traffic, params.send, params.fan_out, config().num_sms, budget, limits_);
  params.turn.launch = next_launch();
  params.send_blocks = shape.first_blocks;
  log_shape(params.turn.record.call.operation, shape, traffic, budget);
  launch(params, start.tokens.type, shape, stream);
}

template <class Call>
void CudaGroup::start_combine(const Call& call, xd_stream stream) {
  require_memory(call, plan_bytes_, known_memory_);
  CombineStart start = combine_params(call, view());
  CombineParams& params = start.params;
  const Traffic traffic = traffic_of(start.tokens, params.row_bytes, params.pushes);
  const int budget = budget_on(stream);
  const LaunchShape shape = combine_shape(traffic, config().num_sms, budget, limits_);
  params.turn.launch = next_launch();
  params.push_blocks = shape.first_blocks;
  log_shape(params.turn.record.call.operation, shape, traffic, budget);
  launch(params, start.type, shape, stream);
}

std::unique_ptr<Group> make_group(std::shared_ptr<Comm> comm, const xd_ep_config* config) {
  return std::make_unique<CudaGroup>(std::move(comm), config);
}

xd_ep_memory group_memory(const Config& config) {
  Config kept = config;
  kept.keeps = keeps_of(config);
  xd_ep_memory memory XD_EP_MEMORY_INIT;
  memory.symmetric_bytes = round_up(GroupMap::make(kept).end, kGranularity);
  memory.staging_bytes = GroupMap::staging_bytes(kept, keeps_of);
  memory.private_bytes =
      PrepareScratch::make(config.experts, config.ranks).words * sizeof(std::uint32_t) +
      RankTables::make(config.ranks).end + sizeof(GroupState) + sizeof(Report);
  return memory;
}

}  // namespace

const Executor kExecutor{.device_type = kDLCUDA,
                         .make_group = make_group,
                         .group_memory = group_memory,
                         .routing_layout = start_routing_layout};

}  // namespace xd::ep::cuda
