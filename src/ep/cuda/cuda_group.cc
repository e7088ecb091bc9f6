#include "ep/cuda/cuda_group.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "cuda/memory.h"
#include "ep/cuda/calls.h"
#include "ep/cuda/local.h"
#include "ep/cuda/report.h"
#include "ep/records.h"

namespace xd::ep::cuda {
namespace {

constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;  // of shared device memory

class CudaGroup final : public Group {
 public:
  CudaGroup(std::shared_ptr<Comm> comm, const xd_ep_config* config);

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
  void join_failed(std::int32_t operation, const char* text, xd_stream stream) override;
  void row_experts(const xd_ep_plan_row_experts_args* args, xd_stream stream) override {
    comm().check_usable();
    const xd::cuda::DeviceGuard guard(comm().device().device_id);
    start_row_experts(read_row_experts(args, call_context()), plan_binding(), stream);
  }

  xd_ep_status take_status() override {
    collect_report();
    return Group::take_status();
  }

  const volatile std::uint64_t* watch() const override { return &report_.as<Report>()->errors; }

 private:
  void collect_report() {
    const std::lock_guard lock(report_mutex_);
    reader_.collect(*report_.as<Report>(), *this);
  }

  void take_failed_turn(const FailedParams& params, xd_stream stream);
  void check_limits() const;
  void require_shared_memory() const;
  void share_memory();
  void describe_group();

  // Arguments that are bad here still take this rank's turn, so that its peers learn it at once and
  // the epochs stay together.
  template <class Start>
  void run(xd_ep_operation operation, xd_stream stream, Start&& start);

  TurnParams turn(const Turning& turning);
  GroupView view() const { return {this, &device_, segment_base(rank())}; }
  std::byte* segment_base(int r) const { return segments_[at(r)]->base(); }

  Traffic traffic_of(int tokens, std::uint64_t row_bytes, bool receives) const {
    return {.ranks = config().ranks,
            .tokens = tokens,
            .topk = config().max_topk,
            .row_bytes = row_bytes,
            .expert_major = config().expert_major(),
            .receives = receives};
  }
  void log_plan(int operation, const LaunchPlan& plan, const Traffic& traffic) const {
    if (!log_enabled("plan")) return;
    log_line(concat("[plan] ",
                    explain(operation_name(operation), plan, traffic, config().num_sms, budget_)));
  }
  void start_prepare(const PrepareCall& call, xd_stream stream);
  template <class Call>
  void start_dispatch(const Call& call, xd_stream stream);
  template <class Call>
  void start_combine(const Call& call, xd_stream stream);

  DeviceFacts facts_;
  int budget_ = 0;
  std::vector<std::shared_ptr<Segment>> segments_;
  xd::cuda::DeviceBuffer control_, scratch_;
  xd::cuda::PinnedBlock report_;
  GroupDevice device_{};
  // Wraps after 2^32 - 1 launches: numbers only tell apart launches that overlap.
  std::uint32_t next_launch() {
    const std::uint32_t number = ++launches_;
    return number != 0 ? number : next_launch();
  }

  std::atomic<std::uint32_t> launches_{0};
  std::mutex report_mutex_;
  ReportReader reader_;
};

CudaGroup::CudaGroup(std::shared_ptr<Comm> owner, const xd_ep_config* user)
    : Group(std::move(owner), user) {
  share_memory();
  comm().agree(Comm::Collective::group, [this] {
    check_limits();
    const int ordinal = comm().device().device_id;
    const xd::cuda::DeviceGuard guard(ordinal);
    int shared_bytes = 0;
    XD_CUDA_CHECK(
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
    facts_ = {.sms = comm().multiprocessors(),
              .shared_bytes = at(shared_bytes),
              .ranks_on_device = comm().ranks_on_device()};
    budget_ = sm_budget(config(), facts_);
    require_shared_memory();
    const PrepareScratch scratch = PrepareScratch::make(config().experts, config().ranks);
    control_ = xd::cuda::DeviceBuffer(ordinal, sizeof(Control), "a group's control block");
    scratch_ = xd::cuda::DeviceBuffer(ordinal, scratch.words * sizeof(std::uint32_t),
                                      "a group's working memory");
    report_ = xd::cuda::PinnedBlock(ordinal, sizeof(Report));
    load_kernels(facts_);
    describe_group();
    return Comm::Contribution{};
  });
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
      plan_prepare(config().experts, config().ranks, 0, budget_, facts_).shared_bytes +
      kStaticSharedBytes;
  if (needed > facts_.shared_bytes) {
    fail(XD_ERROR_UNSUPPORTED, "config.num_experts = ", config().experts, " on ", config().ranks,
         " ranks needs ", needed, " bytes of shared memory per block, this device has ",
         facts_.shared_bytes);
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
  const GroupMap map = GroupMap::make(c);
  GroupDevice& g = device_;
  g.comm = comm().device_comm();
  g.number = number();
  g.experts = c.experts;
  g.local_experts = c.local_experts;
  g.max_tokens = c.max_tokens;
  g.max_topk = c.max_topk;
  g.alignment = static_cast<int>(c.alignment);
  g.expert_major = c.expert_major();
  g.drop = c.overflow == XD_EP_OVERFLOW_DROP;
  g.collapse = c.collapse;
  g.zero_tail = c.zero_tail;
  g.keeps_items = c.keeps_items();
  g.capacity = c.capacity;
  g.capacities_hash = plan_binding().capacities;
  g.plan_head_bytes = PlanMap::make({.local_experts = c.local_experts,
                                     .items = c.keeps_items() ? c.capacity : 0,
                                     .ranks = c.ranks})
                          .code;
  g.codec_experts = c.expert_major() ? 1 : static_cast<std::uint32_t>(c.local_experts);
  g.control = control_.as<Control>();
  g.report = report_.as<Report>();
  for (int r = 0; r < c.ranks; ++r) {
    g.base[r + 1] = g.base[r] + static_cast<std::uint32_t>(capacities()[at(r)]);
    g.area[r] = segment_base(r);
    g.area_bytes[r] = segments_[at(r)]->bytes();
    if (config_of(r).keeps_items()) g.keeps_items_mask[r / 64] |= std::uint64_t{1} << (r % 64);
  }
  g.record = map.record;
  g.done = map.done;
  g.counts = map.counts;
  g.kept = map.kept;
  g.chunk = map.chunk;
  g.listed = map.listed;
  g.items = map.items;
  g.lists = map.lists;
  g.partials = map.partials;
  g.chunk_stride = summed_chunks().bound(c.max_tokens);
  g.lists_stride = GroupMap::list_words(c);
}

template <class Start>
void CudaGroup::run(xd_ep_operation operation, xd_stream stream, Start&& start) {
  comm().check_usable();
  const xd::cuda::DeviceGuard guard(comm().device().device_id);
  Setback setback;
  try {
    return start();
  } catch (...) {
    setback = current_setback(rank());
  }
  FailedParams params{.turn =
                          turn({.record = {.operation = static_cast<std::uint8_t>(operation)}})};
  params.turn.record.status = static_cast<std::uint8_t>(setback.status);
  take_failed_turn(params, stream);
  give_back(setback, operation, params.turn.launch);
}

// If not even that can be launched (a stream of another device), the peers would wait for the
// timeout: that is fatal.
void CudaGroup::take_failed_turn(const FailedParams& params, xd_stream stream) {
  try {
    launch(params, {.blocks = 1, .first_blocks = 0, .threads = 128, .shared_bytes = 0}, stream);
  } catch (...) {
    comm().raise({.status = XD_ERROR_INTERNAL,
                  .rank = rank(),
                  .peer = rank(),
                  .group = number(),
                  .operation = params.turn.record.operation},
                 Comm::Spread::everywhere);
  }
}

void CudaGroup::join_failed(std::int32_t operation, const char* text, xd_stream stream) {
  const bool known = operation >= XD_EP_PREPARE && operation <= XD_EP_COMBINE_BWD;
  const std::string cause(text != nullptr ? text : "", text != nullptr ? ::strnlen(text, 255) : 0);
  run(known ? static_cast<xd_ep_operation>(operation) : XD_EP_PREPARE, stream, [&] {
    XD_REQUIRE(known, "operation = ", operation, ", expected an xd_ep_operation");
    fail(XD_ERROR_INVALID_ARGUMENT, cause);
  });
}

TurnParams CudaGroup::turn(const Turning& turning) {
  TurnParams params{};
  params.group = device_;
  params.launch = next_launch();
  params.record = turning.record;
  params.plan = static_cast<const std::byte*>(turning.plan.data);
  params.plan_bytes = turning.plan.bytes;
  params.num_checks = turning.num_checks;
  std::ranges::copy(turning.checks, params.checks);
  return params;
}

void CudaGroup::start_prepare(const PrepareCall& call, xd_stream stream) {
  PrepareParams params = prepare_params(call, view());
  params.turn = turn({.record = describe(call)});
  params.scratch = scratch_.as<std::uint32_t>();
  const LaunchPlan plan =
      plan_prepare(config().experts, config().ranks, params.tokens, budget_, facts_);
  log_plan(XD_EP_PREPARE, plan, {config().ranks, params.tokens, 0, false});
  launch(params, plan, stream);
}

template <class Call>
void CudaGroup::start_dispatch(const Call& call, xd_stream stream) {
  DispatchStart start = dispatch_params(call, view());
  DispatchParams& params = start.params;
  const int tokens = static_cast<int>(start.tokens.rows);
  const Traffic traffic = traffic_of(tokens, params.recv_tokens.row_bytes, params.receives);
  const LaunchPlan plan =
      plan_dispatch(traffic, params.send, params.fan_out, config().num_sms, budget_, facts_);
  params.turn = turn(start.turning);
  params.send_blocks = plan.first_blocks;
  log_plan(start.turning.record.operation, plan, traffic);
  launch(params, start.tokens.type, plan, stream);
}

template <class Call>
void CudaGroup::start_combine(const Call& call, xd_stream stream) {
  CombineStart start = combine_params(call, view());
  CombineParams& params = start.params;
  const Traffic traffic = traffic_of(start.tokens, params.row_bytes, params.pushes);
  const LaunchPlan plan = plan_combine(traffic, config().num_sms, budget_, facts_);
  params.turn = turn(start.turning);
  params.push_blocks = plan.first_blocks;
  log_plan(start.turning.record.operation, plan, traffic);
  launch(params, start.type, plan, stream);
}

}  // namespace

std::unique_ptr<Group> make_group(std::shared_ptr<Comm> comm, const xd_ep_config* config) {
  return std::make_unique<CudaGroup>(std::move(comm), config);
}

xd_ep_memory group_memory(const Config& config) {
  xd_ep_memory memory XD_EP_MEMORY_INIT;
  Config on_device = config;
  on_device.cuda = true;
  const GroupMap map = GroupMap::make(on_device);
  memory.symmetric_bytes = round_up(map.end, kGranularity);
  memory.staging_bytes = map.end - map.staging;
  memory.private_bytes =
      PrepareScratch::make(config.experts, config.ranks).words * sizeof(std::uint32_t) +
      sizeof(Control) + sizeof(Report);
  return memory;
}

}  // namespace xd::ep::cuda
