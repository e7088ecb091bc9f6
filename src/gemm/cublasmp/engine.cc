#include "gemm/cublasmp/engine.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "cuda/data_type.h"

namespace xd::gemm::cublasmp {
namespace {

constexpr std::array kOperations = {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALL_REDUCE};
constexpr std::size_t kGranularity = std::size_t{2} << 20;
// Of the products that connect the ranks.
constexpr std::int64_t kSmallTokens = 128, kSmallColumns = 256;

// Columns whose rows are multiples of 16 bytes, at most so many.
std::int64_t whole(std::int64_t columns) { return std::max<std::int64_t>(columns / 16, 1) * 16; }

// Of sums the bounds may not say K.
Sizes largest_sizes(const Config& config) {
  return {.tokens = config.max_tokens,
          .n = whole(config.max_n),
          .k = whole(config.max_k > 0 ? config.max_k : config.max_n)};
}

Sizes small_sizes(const Config& config) {
  const Sizes largest = largest_sizes(config);
  return {.tokens = std::min(largest.tokens, kSmallTokens),
          .n = std::min(largest.n, kSmallColumns),
          .k = std::min(largest.k, kSmallColumns)};
}

}  // namespace

Engine::Engine(const Library& library, const Config& config, const Ranks& ranks,
               xd::cuda::Stream stream)
    : library_(library), config_(config), stream_(std::move(stream)) {
  try {
    connect(ranks);
    abilities_.version = library_.version;
    nccl::Properties properties;
    library_.nccl.check(library_.nccl.CommQueryProperties(comm_, &properties),
                        "CommQueryProperties");
    abilities_.multicast = properties.multicast;
    library_.mp.check(library_.mp.Create(&handle_, stream_.get()), "Create");
    make_grids(ranks.count);
    make_descriptors();
    take_memory();
  } catch (...) {
    give_up();  // the other ranks are not at their ends
    throw;
  }
}

void Engine::connect(const Ranks& ranks) {
  if (ranks.lent != nullptr) {
    comm_ = ranks.lent;
    return;
  }
  library_.nccl.check(library_.nccl.CommInitRank(&comm_, ranks.count, ranks.id, ranks.rank),
                      "CommInitRank");
  own_comm_ = true;
}

void Engine::make_grids(int ranks) {
  const mp::Functions& mp = library_.mp;
  mp.check(mp.GridCreate(ranks, 1, mp::kColumnMajor, comm_, &column_), "GridCreate");
  mp.check(mp.GridCreate(1, ranks, mp::kRowMajor, comm_, &row_), "GridCreate");
}

// The contents of descriptors are set before each use.
void Engine::make_descriptors() {
  const mp::Functions& mp = library_.mp;
  for (mp::Matrix* matrix : {&first_, &second_, &d_}) {
    mp.check(mp.MatrixDescriptorCreate(1, 1, 1, 1, 0, 0, 1, CUDA_R_16BF, row_, matrix),
             "MatrixDescriptorCreate");
  }
  mp.check(mp.MatmulDescriptorCreate(&operation_, mp::kCompute32F), "MatmulDescriptorCreate");
}

// As much as the largest calls of the context need, by any algorithm, and the small ones. All ranks
// ask for the same.
void Engine::take_memory() {
  Bytes most;
  const auto note = [&](const ProductCall& call, DType d_type) {
    try {
      const Operands operands = operands_of(call, nullptr, false);
      const Bytes bytes = bytes_for(cublasmp::describe(call, config_, d_type, false), operands);
      most = {std::max(most.device, bytes.device), std::max(most.host, bytes.host)};
    } catch (const Error& error) {
      if (error.status() != XD_ERROR_UNSUPPORTED) throw;
    }
  };
  for (ProductCall& call : plain_calls(largest_sizes(config_))) {
    for (int algo = XD_GEMM_ALGO_CUBLASMP; algo <= XD_GEMM_ALGO_CUBLASMP_FUSED; ++algo) {
      call.algo = static_cast<xd_gemm_algo>(algo);
      if (!obstacle(call, config_, abilities_).empty()) continue;
      note(call, call.d.type);
      note(call, DType::f32);
    }
  }
  for (const ProductCall& call : plain_calls(small_sizes(config_))) note(call, call.d.type);
  reserve_host_memory(most.host);
  memory_bytes_ = round_up(std::max<std::size_t>(most.device, 1), kGranularity);
  const mp::Functions& mp = library_.mp;
  mp.check(mp.Malloc(column_, &memory_, memory_bytes_), "Malloc");
  mp.check(mp.BufferRegister(row_, memory_, memory_bytes_), "BufferRegister");
  registered_ = true;
}

std::size_t Engine::small_bytes(const Config& config) {
  return 3 * at(config.ranks * kSmallTokens) * at(kSmallColumns) * sizeof(float);
}

void Engine::enqueue_small(std::byte* matrices) {
  const std::size_t bytes = small_bytes(config_) / 3;
  for (const ProductCall& call : plain_calls(small_sizes(config_))) {
    const Description description = cublasmp::describe(call, config_, call.d.type, false);
    Operands operands = operands_of(call, matrices + 2 * bytes, false);
    operands.first = matrices;
    operands.second = matrices + bytes;
    try {
      require(description, operands);
      enqueue(description, operands, stream_.get());
    } catch (const Error& error) {
      if (error.status() != XD_ERROR_UNSUPPORTED || stopped()) throw;
    }
  }
}

// A product of each operation that the context is for, by cuBLASMp's default algorithm.
std::vector<ProductCall> Engine::plain_calls(const Sizes& sizes) {
  starts_.clear();
  for (int r = 0; r <= config_.ranks; ++r) starts_.push_back(r * sizes.tokens);
  std::vector<ProductCall> calls;
  for (const xd_gemm_operation operation : kOperations) {
    if (!config_.has(operation)) continue;
    ProductCall call{.operation = operation};
    call.a.type = call.b.type = config_.type;
    call.d.type = dtype_bytes(config_.type) == 1 ? DType::bf16 : config_.type;
    call.algo = XD_GEMM_ALGO_CUBLASMP;
    call.shares = Shares(starts_);
    call.a_rows = operation == XD_GEMM_ALL_GATHER ? sizes.tokens : call.shares.all();
    call.n = sizes.n;
    call.k = sizes.k;
    if (obstacle(call, config_, abilities_).empty()) calls.push_back(call);
  }
  return calls;
}

void Engine::set(mp::Attribute attribute, const void* value, std::size_t bytes) {
  library_.mp.check(library_.mp.MatmulDescriptorSetAttribute(operation_, attribute, value, bytes),
                    "MatmulDescriptorSetAttribute");
}

void Engine::describe(mp::Matrix matrix, const Spread& s) {
  library_.mp.check(library_.mp.MatrixDescriptorInit(
                        s.rows, s.columns, s.block_rows, s.block_columns, 0, 0, s.pitch,
                        xd::cuda::data_type(s.type), s.parts_of_columns ? row_ : column_, matrix),
                    "MatrixDescriptorInit");
}

void Engine::describe(const Description& description, const Operands& operands) {
  library_.mp.check(library_.mp.MatmulDescriptorInit(operation_, description.compute),
                    "MatmulDescriptorInit");
  const auto transposed = [](bool is) { return is ? mp::kTransposed : mp::kNotTransposed; };
  set(mp::kTransposeFirst, transposed(description.transpose_first));
  set(mp::kTransposeSecond, transposed(description.transpose_second));
  set(mp::kAlgorithm, description.algorithm);
  if (config_.num_comm_sms > 0) set(mp::kMultiprocessors, std::int32_t{config_.num_comm_sms});
  set(mp::kEpilogue, description.epilogue);
  if ((description.epilogue & mp::kEpilogueBias) != 0) {
    set(mp::kBiasType, xd::cuda::data_type(operands.bias_type));
    set(mp::kBiasPointer, operands.bias);
  }
  // Otherwise terms travel as float32, which is twice as much.
  if (description.sums) set(mp::kTransferType, xd::cuda::data_type(description.d.type));
  const auto scale = [this](mp::Attribute mode, mp::Attribute pointer, const float* value) {
    if (value == nullptr) return;
    set(mode, mp::kScaleScalar);
    set(pointer, value);
  };
  scale(mp::kFirstScaleMode, mp::kFirstScalePointer, operands.first_scale);
  scale(mp::kSecondScaleMode, mp::kSecondScalePointer, operands.second_scale);
  describe(first_, description.first);
  describe(second_, description.second);
  describe(d_, description.d);
}

Engine::Bytes Engine::bytes_for(const Description& s, const Operands& o) {
  describe(s, o);
  Bytes bytes;
  library_.mp.check_product(
      library_.mp.Matmul_bufferSize(handle_, operation_, s.m, s.n, s.k, &o.alpha, o.first, 1, 1,
                                    first_, o.second, 1, 1, second_, &o.beta, o.c, 1, 1, d_, o.d, 1,
                                    1, d_, &bytes.device, &bytes.host),
      "Matmul_bufferSize");
  return bytes;
}

void Engine::reserve_host_memory(std::size_t bytes) {
  const std::size_t has = host_memory_.empty() ? 0 : host_memory_.back().size();
  // At least twice as much, so that those that stay are less than the last one.
  if (bytes > has) host_memory_.emplace_back(std::max(bytes, 2 * has));
}

void Engine::require_running() const {
  if (stopped()) fail(XD_ERROR_UNSUPPORTED, "cuBLASMp was stopped by an error of the communicator");
}

void Engine::require(const Description& description, const Operands& operands) {
  const std::lock_guard lock(mutex_);
  require_running();
  const Bytes bytes = bytes_for(description, operands);
  if (bytes.device > memory_bytes_) {
    fail(XD_ERROR_UNSUPPORTED, "cuBLASMp needs ", bytes.device,
         " bytes of working memory for this call, the context has ", memory_bytes_);
  }
  reserve_host_memory(bytes.host);
}

// The handle has its own stream again also where the product has failed: the caller's may be gone
// when the handle is next used.
void Engine::enqueue(const Description& s, const Operands& o, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  require_running();
  const mp::Functions& mp = library_.mp;
  describe(s, o);
  std::vector<std::byte> none;
  std::vector<std::byte>& host = host_memory_.empty() ? none : host_memory_.back();
  mp.check(mp.SetStream(handle_, stream), "SetStream");
  const mp::Status status = mp.Matmul(handle_, operation_, s.m, s.n, s.k, &o.alpha, o.first, 1, 1,
                                      first_, o.second, 1, 1, second_, &o.beta, o.c, 1, 1, d_, o.d,
                                      1, 1, d_, memory_, memory_bytes_, host.data(), host.size());
  const mp::Status reset = mp.SetStream(handle_, stream_.get());
  mp.check_product(status, "Matmul");
  mp.check(reset, "SetStream");
}

std::string why_not_lent(const Library& library) {
  if (library.nccl.CommRevoke != nullptr) return "";
  int version = 0;
  library.nccl.check(library.nccl.GetVersion(&version), "GetVersion");
  return concat(
      "config.nccl_comm needs an NCCL with ncclCommRevoke, without which waits in a lent "
      "communicator have no bound, found NCCL ",
      version_text(version));
}

// The mutex is not taken: its holder may be what waits.
void Engine::stop() noexcept {
  if (stopped_.exchange(true) || comm_ == nullptr) return;
  if (library_.nccl.CommRevoke != nullptr) {
    const nccl::Result result = library_.nccl.CommRevoke(comm_, 0);
    if (result == nccl::kSuccess || result == nccl::kInProgress) return;
  }
  abort();  // frees what products use, but ends them first
}

void Engine::give_up() noexcept {
  const std::lock_guard lock(mutex_);
  stopped_.store(true);
  abort();
}

void Engine::abort() noexcept {
  if (own_comm_ && !aborted_.exchange(true)) library_.nccl.CommAbort(comm_);
}

// A communicator that has been stopped takes part in nothing any more.
void Engine::release() noexcept {
  if (stopped() || std::exchange(released_, true)) return;
  const mp::Functions& mp = library_.mp;
  if (operation_ != nullptr) mp.MatmulDescriptorDestroy(operation_);
  for (const mp::Matrix matrix : {first_, second_, d_}) {
    if (matrix != nullptr) mp.MatrixDescriptorDestroy(matrix);
  }
  if (registered_) mp.BufferDeregister(row_, memory_);
  if (memory_ != nullptr) mp.Free(column_, memory_);
  for (const mp::Grid grid : {row_, column_}) {
    if (grid != nullptr) mp.GridDestroy(grid);
  }
  if (handle_ != nullptr) mp.Destroy(handle_);
  if (own_comm_) library_.nccl.CommDestroy(comm_);
}

}  // namespace xd::gemm::cublasmp
