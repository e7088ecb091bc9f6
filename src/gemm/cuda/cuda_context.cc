#include "gemm/cuda/cuda_context.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <span>
#include <utility>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "comm/feature.h"
#include "cuda/known_memory.h"
#include "cuda/stream.h"
#include "gemm/cuda/call_shape.h"
#include "gemm/cuda/fill.h"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/sizes.h"
#include "gemm/cuda/transfer.h"
#include "gemm/cuda/tuning.h"
#include "gemm/executors.h"
#include "turn/disagreement.h"

namespace xd::gemm::cuda {
namespace {

OperationError operation_error_of(const Report& report, const Context& context) {
  const std::span<const Record> records(report.record, at(context.config().ranks));
  if (OperationError found = turn::disagreement<Family>(records, context.rank())) return found;
  return {.status = XD_ERROR_MISMATCH, .text = "ranks disagree", .rank = report.rank};
}

using xd::cuda::claim;
using xd::cuda::KnownMemory;

void require_memory(const ProductCall& c, KnownMemory& known) {
  known.require({claim(c.a), claim(c.b), claim(c.d), claim(c.c), claim(c.bias),
                 claim(c.pre_activation), claim(c.bias_grad), claim(c.a_scale), claim(c.b_scale),
                 claim(c.d_scale), claim(c.d_amax), claim(c.gathered), claim(c.gathered_scale)});
}

void require_memory(const TransferCall& c, KnownMemory& known) {
  known.require({claim(c.in), claim(c.out)});
  if (c.product) require_memory(*c.product, known);
}

// The reason why cuBLASMp cannot run on a stream; empty if it can.
const char* obstacle_on(xd_stream stream) {
  if (xd::cuda::is_captured(stream)) {
    return "cannot be captured, since the ranks agree before it is enqueued";
  }
  if (xd::cuda::is_of_green_context(stream)) {
    return "stream: belongs to a green context, expected one of the device's own context";
  }
  return "";
}

// The message of a rank to the others in one step is bounded.
constexpr std::size_t kTunedAtOnce = 16;
using TunedPiece = std::array<TunedProduct, kTunedAtOnce>;

std::ptrdiff_t count_of(const std::vector<TunedProduct>& all, std::size_t first) {
  return static_cast<std::ptrdiff_t>(std::min(kTunedAtOnce, all.size() - first));
}

TunedPiece piece_of(const std::vector<TunedProduct>& all, std::size_t first) {
  TunedPiece piece{};
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
  std::copy_n(begin, count_of(all, first), piece.begin());
  return piece;
}

}  // namespace

CudaContext::CudaContext(std::shared_ptr<Comm> owner, const xd_gemm_config* user)
    : Context(owner, user),
      known_memory_(KnownMemory::of(comm().device().device_id)),
      starts_(at(config().ranks) + 1),
      runner_(
          *this, false, [this](const Report& report) { return operation_error_of(report, *this); },
          [this](const turn::Call& call, std::uint32_t launch, xd_stream stream) {
            fail_turn(call, launch, stream);
          }) {
  memory_->comm = std::move(owner);
  memory_->segments = comm().share(kCreateContext, static_cast<std::size_t>(map_of(config()).end));
  if (PeerMappedCells::cell_bytes(config()) != 0) {
    const xd::cuda::DeviceGuard guard(comm().device().device_id);
    memory_->cells = std::make_unique<PeerMappedCells>(comm(), config());
  }
  comm().collective().agree(kCreateContext, [this] {
    allocate();
    return Collective::Contribution{};
  });
  tune();
  if (config().is_for_cublasmp()) {
    cublasmp_ = std::make_unique<cublasmp::AttendedEngine>(comm(), config());
  }
  runner_.begin();
}

// Everything that operations need, of this rank alone.
void CudaContext::allocate() {
  const int device = comm().device().device_id;
  const xd::cuda::DeviceGuard guard(device);
  if (const char* reason = xd::cuda::why_no_products(); *reason != '\0') {
    fail(XD_ERROR_UNSUPPORTED, reason);
  }
  if (config().ranks > kMaxDeviceRanks) {
    fail(XD_ERROR_UNSUPPORTED, "config: ", config().ranks, " ranks, expected at most ",
         kMaxDeviceRanks, " on CUDA devices");
  }
  runner_.allocate();
  memory_->scratch =
      xd::cuda::DeviceBuffer(device, scratch_bytes(config()), "products before they are summed");
  memory_->exact = xd::cuda::DeviceBuffer(device, exact_bytes(config()) + column_bytes(config()),
                                          "results before they are rounded");
  fill_ones(device);
  memory_->scales = xd::cuda::DeviceBuffer(device, 2 * scales_bytes(config()), "copies of scales");
  memory_->block_scales = xd::cuda::DeviceBuffer(device, block_scale_bytes(config()),
                                                 "scales per 128 columns, laid out anew");
  memory_->products = std::make_unique<Products>(device);
  memory_->side = std::make_unique<SideStream>(device);
  memory_->side->reserve(at(config().ranks) + 4);
  memory_->meeting = std::make_unique<Meeting>(device);
  gather_ = std::make_unique<StartedGather>(device);
  load_kernels();
  empty_words();
  describe();
}

// All ranks measure at once, and take what rank 0 has found. No rank goes on before all have ended
// their products, some of which store into the cells of their peers.
void CudaContext::tune() {
  const int device = comm().device().device_id;
  std::vector<TunedProduct> found;
  const auto counts = comm().collective().agree_on(kCreateContext, [&] {
    const xd::cuda::DeviceGuard guard(device);
    if (env().gemm_tune != 0) {
      found = Tuner(device, config(),
                    {.scratch = shop_.scratch,
                     .scratch_bytes = shop_.scratch_bytes,
                     .workspace = memory_->products->workspace(),
                     .stitched = shop_.stitched,
                     .cell_bytes = shop_.cell_bytes})
                  .measure();
    }
    return found.size();
  });
  found.resize(counts.front());
  for (std::size_t first = 0; first < found.size(); first += kTunedAtOnce) {
    const auto pieces =
        comm().collective().agree_on(kCreateContext, [&] { return piece_of(found, first); });
    std::copy_n(pieces.front().begin(), count_of(found, first),
                found.begin() + static_cast<std::ptrdiff_t>(first));
  }
  comm().collective().agree(kCreateContext, [&] {
    const xd::cuda::DeviceGuard guard(device);
    memory_->products->take(std::move(found));
    warm_up();
    return Collective::Contribution{};
  });
}

void CudaContext::fill_ones(int device) {
  memory_->ones = xd::cuda::DeviceBuffer(device, scales_bytes(config()), "scales of 1");
  const std::vector<float> some(4096, 1.0f);
  fill(memory_->ones, std::as_bytes(std::span(some)), xd::cuda::Stream(device));
}

// No word has arrived yet. Peers push words only after this step.
void CudaContext::empty_words() const {
  const ContextMap map = map_of(config());
  const xd::cuda::Stream stream(comm().device().device_id);
  std::byte* const own = memory_->segments[at(rank())]->base();
  XD_CUDA_CHECK(cudaMemsetAsync(own + map.words, 0xFF, map.end - map.words, stream.get()));
  stream.synchronize();
}

void CudaContext::describe() {
  shop_.map = map_of(config());
  std::vector<HeapRange> areas;
  for (const auto& segment : memory_->segments) {
    areas.push_back({segment->base(), segment->bytes()});
    shop_.areas.push_back(segment->base());
  }
  memory_->tables = xd::cuda::DeviceBuffer(comm().device().device_id, std::span(areas).size_bytes(),
                                           "a context's tables");
  memory_->tables.write(0, areas.data(), std::span(areas).size_bytes());
  shop_.group = {.comm = comm().device_comm(),
                 .number = number(),
                 .fatal_errors = false,
                 .control = runner_.control(),
                 .report = runner_.report(),
                 .areas = memory_->tables.as<const HeapRange>(),
                 .map = shop_.map};
  describe_cells();
  shop_.scratch = memory_->scratch.data();
  shop_.scratch_bytes = memory_->scratch.bytes();
  shop_.columns = memory_->exact.as<float>();
  shop_.exact = memory_->exact.data() + column_bytes(config());
  shop_.exact_bytes = exact_bytes(config());
  shop_.ones = memory_->ones.as<const float>();
  shop_.a_scales = memory_->scales.as<float>();
  shop_.b_scales = shop_.a_scales + scales_count(config());
  shop_.scales_count = scales_count(config());
  shop_.block_scales = memory_->block_scales.data();
  shop_.block_scale_bytes = memory_->block_scales.bytes();
  shop_.products = memory_->products.get();
  shop_.side = memory_->side.get();
  // Ranks that share a device run at once, and so do their blocks.
  shop_.multiprocessors = std::max(1, comm().multiprocessors() / comm().ranks_on_device());
  shop_.comm_multiprocessors = config().num_comm_sms;
  shop_.shares_device = comm().ranks_on_device() > 1;
  shop_.keeps_gathered = config().keep_gathered;
}

void CudaContext::describe_cells() {
  if (memory_->cells) {
    shop_.cell_bytes = PeerMappedCells::cell_bytes(config());
    for (int r = 0; r < config().ranks; ++r) shop_.cell_at.push_back(memory_->cells->at_owner(r));
    shop_.own_cells = memory_->cells->own();
    shop_.stitched = memory_->cells->view();
    return;
  }
  shop_.cell_bytes = shop_.map.cell_bytes;
  for (std::byte* area : shop_.areas) shop_.cell_at.push_back(area + shop_.map.cell_of(rank()));
  shop_.own_cells = shop_.areas[at(rank())] + shop_.map.cells;
}

// The products that operations of these bounds are made of: all orders of elements, finished by
// cuBLASLt or to be finished.
void CudaContext::warm_up() {
  const std::int64_t rows = config().all_tokens();
  for (const xd::cuda::ProductShape& shape : warmed_shapes(config())) {
    memory_->products->warm_up(shape, rows);
  }
  memory_->products->load_tuned(all_products());
  // Kernels that wait for a thread of this process may run when a call would load one.
  if (comm().local_ranks() > 1) memory_->products->load_all(all_products());
}

// A turn may be over while products and copies behind it still run, or may not have begun yet: the
// marks on the streams tell. Graphs leave no marks, and there the turn has to do. cuBLASMp comes
// first, since what it waits for in these streams may have to be ended.
CudaContext::~CudaContext() {
  cublasmp_.reset();
  bool rests = true;
  xd::cuda::try_on_device(comm().device().device_id, [&] {
    const auto deadline = Deadline::after_ms(Runner::kPatienceMs);
    rests = memory_->side->comes_to_rest(deadline) && gather_->comes_to_rest(deadline);
  });
  if (!rests || !runner_.end()) keep_for_good();
}

// Everything that a kernel of this context may touch is never freed.
void CudaContext::keep_for_good() noexcept {
  static std::atomic<Memory*> all{nullptr};  // found from here, so that it is not lost
  log_warning("a context was destroyed while an operation of it runs [rank ", rank(), " of ",
              config().ranks, "]: its memory is kept until the process ends");
  Memory* const kept = memory_.release();
  kept->of_turns = runner_.take_memory();
  kept->next = all.load();
  while (!all.compare_exchange_weak(kept->next, kept)) {
  }
}

// Launches that have been enqueued of an operation end at the mark, also where the rest could not
// be.
template <class Work>
void CudaContext::enqueue(const EnqueuedTurn& turn, xd_stream stream, Work&& work) {
  begin(turn.params(), stream);
  try {
    work();
  } catch (...) {
    xd::cuda::try_on_device(comm().device().device_id, [&] { end(stream); });
    throw;
  }
  end(stream);
}

// ---- Calls -------------------------------------------------------------------------------------

void CudaContext::product(xd_gemm_operation operation, const xd_gemm_args* args, xd_stream stream) {
  run(operation, stream, [&](bool& entered) {
    gather_->join(stream);
    const ProductCall call = read_product(operation, args, call_context(starts_));
    start(call, stream, entered);
    if (operation == XD_GEMM_ALL_GATHER && config().keep_gathered) keep(call, args->a->dtype);
  });
}

void CudaContext::keep(const ProductCall& call, DLDataType type) {
  kept_.data = shop_.areas[at(rank())] + shop_.map.gathered;
  const std::int64_t all = call.shares.all();
  kept_.rows = call.transpose_a ? call.k : all;
  kept_.columns = call.transpose_a ? all : call.k;
  kept_.pitch_bytes = at(kept_.columns) * dtype_bytes(call.a.type);
  kept_.dtype = type;
}

void CudaContext::bulk(const xd_gemm_bulk_args* args, xd_stream stream) {
  run(XD_GEMM_BULK, stream, [&](bool& entered) {
    gather_->join(stream);
    const TransferCall call = read_bulk(args, call_context(starts_));
    require_memory(call, known_memory_);
    if (call.product) require_supported(*call.product);
    const EnqueuedTurn turn = next_turn(record_of(call), entered);
    const Transfer work(shop_, call, turn, stream);
    work.describe_product();
    enqueue(turn, stream, [&] { work.enqueue(); });
  });
}

void CudaContext::start_all_gather(const xd_gemm_gather_args* args, xd_stream stream) {
  require_order(XD_GEMM_START_ALL_GATHER, stream);
  if (gather_->under_way()) {
    give_back({.status = XD_ERROR_BUSY,
               .text = "a gather is under way, expected xd_gemm_wait before the next one; peers do "
                       "not hear of this call",
               .rank = rank()},
              XD_GEMM_START_ALL_GATHER, 0);
  }
  run(XD_GEMM_START_ALL_GATHER, stream, [&](bool& entered) {
    gather_->join(stream);
    const TransferCall call = read_gather(args, call_context(starts_));
    require_memory(call, known_memory_);
    const EnqueuedTurn turn = next_turn(record_of(call), entered);
    enqueue(turn, stream, [&] { Transfer(shop_, call, turn, stream).begin(); });
    gather_->begin(stream, *memory_->side);
  });
}

void CudaContext::wait(xd_stream stream) {
  require_order(XD_GEMM_START_ALL_GATHER, stream);
  const xd::cuda::DeviceGuard guard(comm().device().device_id);
  XD_REQUIRE(!gather_->can_be_waited_for() || xd::cuda::takes_work(stream),
             "stream: takes no work because of a capture, expected another stream");
  gather_->wait(stream);
}

// Refuses a call that could not be ordered behind the context's own stream, before it touches
// anything.
void CudaContext::require_order(std::int32_t operation, xd_stream stream) {
  comm().errors().check_usable();
  const xd::cuda::DeviceGuard guard(comm().device().device_id);
  const char* const obstacle = gather_->obstacle(stream, *memory_->side);
  if (obstacle == nullptr) return;
  give_back({.status = XD_ERROR_BUSY,
             .text = concat("stream: ", obstacle, "; peers do not hear of this call"),
             .rank = rank()},
            operation, 0);
}

void CudaContext::fail_turn(const turn::Call& call, std::uint32_t launch, xd_stream stream) {
  gather_->join(stream);
  Record record;
  record.call = call;
  bool entered = false;
  const EnqueuedTurn turn(turn_params(record, launch), entered);
  enqueue(turn, stream, [&] { launch_failed(turn.params(), stream); });
}

// Before an operation enqueues anything. One of another stream than the last one's must find that
// one ended: its rows and working memory are used again. Behind the look it also waits for what the
// last one may have enqueued since. Graphs are looked at by their own openings, which do not stand
// behind those of other operations in the context's stream. The first one finds nothing before it,
// and does without the look: where ranks are threads that share a device, each launch in front of
// an opening is one more that may stand in a hardware queue behind a kernel that waits for it.
void CudaContext::begin(const TurnParams& turn, xd_stream stream) {
  met_ = false;
  const bool first = !last_ && !captured_;
  if (xd::cuda::is_captured(stream)) {
    captured_ = true;
    last_.reset();
    return;
  }
  // cudaStreamPerThread is another stream on every thread.
  if (!first && (last_ != stream || stream == cudaStreamPerThread)) {
    launch_expect_idle(turn, stream);
    memory_->side->follow_end(stream);
  }
  last_ = stream;
}

void CudaContext::end(xd_stream stream) {
  if (last_) memory_->side->mark_end(stream);
}

xd_gemm_view CudaContext::gathered() {
  comm().errors().check_usable();
  XD_REQUIRE(kept_.data != nullptr,
             "context: keeps no gathered rows, expected keep_gathered = 1 and an all_gather as its "
             "last operation");
  return kept_;
}

Problem CudaContext::problem(const ProductCall& call) const {
  Problem problem = problem_of(call, config());
  xd::cuda::ProductShape shape =
      product_shape(call, call.a_rows, call.a_rows, call.wide_type(), false);
  // Their times are taken to be those of products without such scales, which alone are measured.
  if (shape.has_block_scales()) shape.a_scale_mode = shape.b_scale_mode = -1;
  problem.times = memory_->products->times_of(shape);
  shape.stores_at_peers = true;
  problem.peer_store_times = memory_->products->times_of(shape);
  return problem;
}

// The way of a call. Throws UNSUPPORTED where the algorithm that was asked for cannot run.
Option CudaContext::choose(const ProductCall& call, const char* hinders_cublasmp) const {
  require_supported(call);
  std::string hindered = is_cublasmp(call.algo) ? cublasmp_obstacle(call) : "";
  if (is_cublasmp(call.algo) && hindered.empty()) hindered = hinders_cublasmp;
  if (is_cublasmp(call.algo) && hindered.empty()) return {.algo = call.algo, .products = 1};
  const Problem problem = this->problem(call);
  const Capacity capacity =
      capacity_of(call, shop_.map, shop_.stitched != nullptr ? shop_.cell_bytes : 0);
  const Options options = options_of(machine_, problem, capacity);
  const Option* asked = call.algo == XD_GEMM_ALGO_AUTO ? options.best() : options.find(call.algo);
  const bool runs = asked != nullptr && asked->obstacle == Obstacle::none;
  if (runs) return *asked;
  const Option* best = options.best();
  if (best != nullptr && config().allow_fallback) return *best;
  if (!hindered.empty()) {
    fail(XD_ERROR_UNSUPPORTED, "algo = ", algo_name(call.algo), ": ", hindered);
  }
  if (asked == nullptr) {
    fail(XD_ERROR_UNSUPPORTED, "no algorithm can run:\n", text_of(options, problem, capacity));
  }
  fail(XD_ERROR_UNSUPPORTED, "algo = ", algo_name(call.algo), ": ",
       text_of(asked->obstacle, problem, capacity));
}

void CudaContext::start(const ProductCall& call, xd_stream stream, bool& entered) {
  require_memory(call, known_memory_);
  Option option = choose(call, is_cublasmp(call.algo) ? obstacle_on(stream) : "");
  if (is_cublasmp(option.algo)) {
    if (start_by_cublasmp(call, option, stream, entered)) return;
    option = choose(call, "refuses the call");
  }
  Record record = record_of(call, option.algo);
  record.mover = static_cast<std::uint8_t>(option.mover);
  const EnqueuedTurn turn = next_turn(record, entered);
  const Operation work(shop_, call, option, turn, stream);
  work.describe_products();  // finds what cuBLASLt cannot do before anything is launched
  enqueue(turn, stream, [&] { work.enqueue(); });
}

xd_gemm_plan_info CudaContext::plan_of(const ProductCall& call) const {
  const Option option = choose(call);
  const xd::cuda::DeviceGuard guard(comm().device().device_id);
  bool entered = false;
  const EnqueuedTurn nothing({}, entered);
  if (!is_cublasmp(option.algo)) {
    Operation(shop_, call, option, nothing, nullptr).describe_products();
  }
  const Problem problem = this->problem(call);
  const Capacity capacity =
      capacity_of(call, shop_.map, shop_.stitched != nullptr ? shop_.cell_bytes : 0);
  xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
  info.algo = option.algo;
  info.num_products = option.products;
  info.estimate_us = option.us;
  info.gemm_us = option.gemm_us;
  info.transfer_us = option.transfer_us;
  ProductCall by_cublasmp = call;
  if (!is_cublasmp(call.algo)) by_cublasmp.algo = XD_GEMM_ALGO_CUBLASMP;
  const std::string hindered = cublasmp_obstacle(by_cublasmp);
  const std::string text =
      concat(text_of(options_of(machine_, problem, capacity), problem, capacity),
             algo_name(by_cublasmp.algo), ": ",
             hindered.empty() ? "not estimated, and never taken by AUTO" : hindered, "\n");
  std::strncpy(info.text, text.c_str(), sizeof(info.text) - 1);
  return info;
}

// ---- The executor ------------------------------------------------------------------------------

namespace {

std::unique_ptr<Context> make_context(std::shared_ptr<Comm> comm, const xd_gemm_config* config) {
  return std::make_unique<CudaContext>(std::move(comm), config);
}

}  // namespace

const Executor kExecutor{
    .device_type = kDLCUDA,
    .make_context = make_context,
    .context_memory = context_memory,
    .availability =
        [] {
          const Feature device = xd::feature(XD_FEATURE_CUDA);
          if (!device.available) return device;
          const char* reason = xd::cuda::why_no_products();
          return Feature{*reason == '\0', *reason == '\0' ? "available" : reason};
        },
    .cublasmp =
        [] {
          const Feature device = xd::feature(XD_FEATURE_CUDA);
          if (!device.available) return device;
          const char* reason = cublasmp::why_no_library();
          return Feature{*reason == '\0', *reason == '\0' ? "available" : reason};
        }};

}  // namespace xd::gemm::cuda
