// Local calls: they read this rank's plan or choices, without any peer.
//
//   memory            written by          read by
//   row_experts       its kernel          the caller, later in the stream
//   layout's outputs  its kernel          likewise
//
// The routing layout is counted by the blocks of one cluster, each for its share of the tokens;
// then each adds up its share of the columns over all blocks' shared memory. So it needs no working
// memory, and any number of these kernels may run at a time.
#include "ep/bulk/cuda/local.h"
#include "ep/plan/plan_check.h"

#include <cooperative_groups.h>

#include "base/error.h"
#include "comm/device/comm.h"
#include "cuda/device.h"
#include "cuda/error.h"
#include "ep/bulk/cuda/call_memory.h"
#include "ep/plan/config.h"
#include "ep/plan/cuda/load.h"
#include "ep/plan/cuda/warp.cuh"

namespace xd::ep::cuda {
namespace {

// An int32 or int64 output.
struct Numbers {
  std::byte* data;  // nullptr = not given
  bool wide;        // int64

  __device__ void put(std::int64_t at, std::int64_t value) const {
    if (wide) {
      reinterpret_cast<std::int64_t*>(data)[at] = value;
    } else {
      reinterpret_cast<std::int32_t*>(data)[at] = static_cast<std::int32_t>(value);
    }
  }
};

Numbers numbers(const Tensor& tensor) {
  return {tensor ? tensor.data : nullptr, tensor.type == DType::i64};
}

// ---- Experts of rows ---------------------------------------------------------------------------

struct RowExpertsParams {
  const std::byte* plan;
  std::uint64_t plan_bytes;
  PlanTerms terms;
  Numbers out;
  std::int64_t rows;
};

__device__ bool is_plan_of(const PlanHeader& h, const RowExpertsParams& p) {
  const PlanTerms& t = p.terms;
  return !header_fault(h, p.plan_bytes) && h.rank == t.rank && h.ranks == t.ranks &&
         h.experts == t.experts && h.expert_ranks == t.expert_ranks && h.hosts == t.hosts &&
         h.local_experts == t.local_experts && h.layout == t.layout;
}

constexpr int kRowThreads = 256;

__global__ void __launch_bounds__(kRowThreads)
    row_experts_kernel(const __grid_constant__ RowExpertsParams p) {
  extern __shared__ std::int32_t ends[];  // [L] where each zone ends
  __shared__ PlanHeader header;
  __shared__ int zones;  // 0: no such plan
  if (threadIdx.x < sizeof(PlanHeader) / sizeof(std::uint64_t)) {
    reinterpret_cast<std::uint64_t*>(&header)[threadIdx.x] =
        reinterpret_cast<const std::uint64_t*>(p.plan)[threadIdx.x];
  }
  __syncthreads();
  if (threadIdx.x == 0) zones = is_plan_of(header, p) ? header.local_experts : 0;
  __syncthreads();
  const auto* offsets =
      reinterpret_cast<const std::int32_t*>(p.plan + (zones > 0 ? map_of(header).offset : 0));
  for (int e = static_cast<int>(threadIdx.x); e < zones; e += kRowThreads) ends[e] = offsets[e + 1];
  __syncthreads();
  for (std::int64_t row = std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x; row < p.rows;
       row += std::int64_t{gridDim.x} * kRowThreads) {
    int low = 0, high = zones;  // the first zone that ends behind the row lies in [low, high]
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends[middle] > row) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    p.out.put(row, low < zones ? low : -1);
  }
}

// ---- Routing layout ----------------------------------------------------------------------------

struct LayoutParams {
  const void* topk_idx;
  bool wide_ids;
  int experts, ranks, topk;
  int each;  // experts of every rank, in order; 0 = as HomesParams says
  std::int64_t tokens;
  Numbers per_rank, per_expert, bad_ids;
  std::uint8_t* in_rank;  // [T,W]; nullptr = not given
};

// The parameters where the caller says which rank holds each expert. Ranks travel with the launch,
// which a graph keeps, so that nothing has to stay in memory for it.
struct HomesParams {
  static constexpr int kBits = 7;  // of a rank
  static_assert(kMaxDeviceRanks <= 1 << kBits);

  LayoutParams layout;
  std::uint32_t words[kMaxDeviceExperts * kBits / 32 + 1];

  void set(int expert, int rank) {
    const int bit = expert * kBits;
    const std::uint64_t pair = static_cast<std::uint64_t>(rank) << bit % 32;
    words[bit / 32] |= static_cast<std::uint32_t>(pair);
    words[bit / 32 + 1] |= static_cast<std::uint32_t>(pair >> 32);
  }
  __device__ int rank_of(int expert) const {
    const int bit = expert * kBits;
    return static_cast<int>(
        __funnelshift_r(words[bit / 32], words[bit / 32 + 1], static_cast<unsigned>(bit % 32)) &
        ((1u << kBits) - 1));
  }
};
static_assert(sizeof(HomesParams) <= 4096);  // the limit of every device

constexpr int kLayoutBlocks = 8;  // one cluster, on every device
constexpr int kLayoutThreads = 512;

class LayoutCounter {
 public:
  // `counts`: [E + W + 1] in shared memory: tokens per expert, tokens per rank, bad ids. `homes`:
  // [E] rank of each expert, likewise; nullptr = equally many experts on every rank, in order.
  __device__ LayoutCounter(const LayoutParams& params, std::uint32_t* counts,
                           const std::uint8_t* homes)
      : p_(params), counts_(counts), homes_(homes), lane_(static_cast<int>(threadIdx.x % 32)) {}

  // This block's tokens, as many at a time as a warp's lanes hold; the next ids are fetched
  // meanwhile.
  __device__ void count_all() const {
    const int each = 32 / p_.topk;  // tokens of a step
    const bool active = lane_ / p_.topk < each;
    const std::int64_t warps = kLayoutBlocks * (kLayoutThreads / 32);
    const std::int64_t warp = blockIdx.x + std::int64_t{threadIdx.x / 32} * kLayoutBlocks;
    std::int64_t first = warp * each;
    std::int64_t next = id_at(first, active);
    while (first < p_.tokens) {
      const std::int64_t id = next, now = first;
      first += warps * each;
      next = id_at(first, active);
      count(now, each, id);
    }
  }

 private:
  // This lane's choice of the tokens from `first` on; -1 where there is none.
  __device__ std::int64_t id_at(std::int64_t first, bool active) const {
    const std::int64_t token = first + lane_ / p_.topk;
    if (!active || token >= p_.tokens) return -1;
    const std::int64_t at = first * p_.topk + lane_;
    return p_.wide_ids ? static_cast<const std::int64_t*>(p_.topk_idx)[at]
                       : static_cast<const std::int32_t*>(p_.topk_idx)[at];
  }

  // True on the first lane of the token with this key; keys are below 2^16.
  __device__ bool first_of_token(bool valid, int key) const {
    const auto token = static_cast<unsigned>(lane_ / p_.topk);
    return first_of_equals(token << 16 | static_cast<unsigned>(key), valid);
  }

  __device__ void count(std::int64_t first, int each, std::int64_t id) const {
    const bool valid = id >= 0 && id < p_.experts;
    const int expert = valid ? static_cast<int>(id) : 0;
    const int rank = homes_ != nullptr ? homes_[expert] : expert / p_.each;
    if (first_of_token(valid, expert)) atomicAdd(counts_ + expert, 1u);
    const bool goes_there = first_of_token(valid, rank);
    if (goes_there) atomicAdd(counts_ + p_.experts + rank, 1u);
    const unsigned bad = __ballot_sync(kAllLanes, !valid && id != -1);
    if (lane_ == 0 && bad != 0) {
      atomicAdd(counts_ + p_.experts + p_.ranks, static_cast<unsigned>(__popc(bad)));
    }
    if (p_.in_rank == nullptr) return;
    const std::int64_t tokens = min(static_cast<std::int64_t>(each), p_.tokens - first);
    std::uint8_t* flags = p_.in_rank + first * p_.ranks;
    for (std::int64_t i = lane_; i < tokens * p_.ranks; i += 32) flags[i] = 0;
    __syncwarp();  // zeros first
    if (goes_there) flags[lane_ / p_.topk * p_.ranks + rank] = 1;
  }

  const LayoutParams& p_;
  std::uint32_t* counts_;
  const std::uint8_t* homes_;
  const int lane_;
};

__device__ void put_column(const LayoutParams& p, int column, std::uint32_t count) {
  const Numbers& to = column < p.experts             ? p.per_expert
                      : column < p.experts + p.ranks ? p.per_rank
                                                     : p.bad_ids;
  const int at = column < p.experts             ? column
                 : column < p.experts + p.ranks ? column - p.experts
                                                : 0;
  if (to.data != nullptr) to.put(at, count);
}

__device__ int columns_of(const LayoutParams& p) { return p.experts + p.ranks + 1; }

// The kernels have written `homes` before; this begins with a barrier of the block.
__device__ void lay_out(const LayoutParams& p, std::uint32_t* counts, const std::uint8_t* homes) {
  const int columns = columns_of(p);
  for (int c = static_cast<int>(threadIdx.x); c < columns; c += kLayoutThreads) counts[c] = 0;
  __syncthreads();
  LayoutCounter(p, counts, homes).count_all();
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();  // releases and acquires: all blocks' counts are there
  for (int c = static_cast<int>(blockIdx.x) * kLayoutThreads + static_cast<int>(threadIdx.x);
       c < columns; c += kLayoutBlocks * kLayoutThreads) {
    std::uint32_t sum = 0;
    for (unsigned b = 0; b < kLayoutBlocks; ++b) sum += *cluster.map_shared_rank(counts + c, b);
    put_column(p, c, sum);
  }
  cluster.sync();  // no block ends while others read its counts
}

__global__ void __cluster_dims__(kLayoutBlocks, 1, 1) __launch_bounds__(kLayoutThreads)
    routing_layout_kernel(const __grid_constant__ LayoutParams p) {
  extern __shared__ std::uint32_t counts[];
  lay_out(p, counts, nullptr);
}

__global__ void __cluster_dims__(kLayoutBlocks, 1, 1) __launch_bounds__(kLayoutThreads)
    homes_layout_kernel(const __grid_constant__ HomesParams p) {
  extern __shared__ std::uint32_t counts[];
  auto* homes = reinterpret_cast<std::uint8_t*>(counts + columns_of(p.layout));
  for (int e = static_cast<int>(threadIdx.x); e < p.layout.experts; e += kLayoutThreads) {
    homes[e] = static_cast<std::uint8_t>(p.rank_of(e));
  }
  lay_out(p.layout, counts, homes);
}

template <class Params>
void launch(void (*kernel)(Params), const Params& params, int blocks, int threads,
            std::size_t shared_bytes, cudaStream_t stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  XD_CUDA_CHECK(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                       dim3(static_cast<unsigned>(threads)), arguments, shared_bytes, stream));
}

}  // namespace

void load_local() { load_plain(row_experts_kernel, routing_layout_kernel, homes_layout_kernel); }

void start_row_experts(const RowExpertsCall& call, const PlanBinding& binding,
                       cudaStream_t stream) {
  require_plan_bytes(call.plan.data, call.plan.bytes);
  if (call.row_experts.rows == 0) return;
  const Config& config = *binding.config;
  const RowExpertsParams params{.plan = static_cast<const std::byte*>(call.plan.data),
                                .plan_bytes = call.plan.bytes,
                                .terms = terms_of(binding),
                                .out = numbers(call.row_experts),
                                .rows = call.row_experts.rows};
  constexpr std::int64_t kMostBlocks = 64, kRowsPerThread = 4;
  const std::int64_t each = kRowThreads * kRowsPerThread;
  const auto blocks = static_cast<int>(std::min((params.rows + each - 1) / each, kMostBlocks));
  launch(row_experts_kernel, params, blocks, kRowThreads,
         static_cast<std::size_t>(config.local_experts) * sizeof(std::int32_t), stream);
}

void start_routing_layout(const RoutingLayoutCall& call, const DLDevice& device,
                          cudaStream_t stream) {
  const ExpertMap& map = call.expert_tables.map();
  if (map.experts > kMaxDeviceExperts) {
    fail(XD_ERROR_UNSUPPORTED, "num_experts = ", map.experts, ", expected at most ",
         kMaxDeviceExperts, " on CUDA devices");
  }
  const xd::cuda::DeviceGuard guard(device.device_id);
  require_memory(call, xd::cuda::KnownMemory::of(device.device_id));
  const LayoutParams params{
      .topk_idx = call.topk_idx.data,
      .wide_ids = call.topk_idx.type == DType::i64,
      .experts = map.experts,
      .ranks = map.ranks,
      .topk = static_cast<int>(call.topk_idx.cols),
      .each = map.each,
      .tokens = call.topk_idx.rows,
      .per_rank = numbers(call.rows_per_rank),
      .per_expert = numbers(call.rows_per_expert),
      .bad_ids = numbers(call.bad_ids),
      .in_rank = call.token_in_rank ? call.token_in_rank.as<std::uint8_t>() : nullptr};
  const std::size_t columns = static_cast<std::size_t>(map.experts) + map.ranks + 1;
  const std::size_t counts_bytes = columns * sizeof(std::uint32_t);
  if (!map.has_tables()) {
    return launch(routing_layout_kernel, params, kLayoutBlocks, kLayoutThreads, counts_bytes,
                  stream);
  }
  HomesParams homes{.layout = params, .words = {}};
  for (int e = 0; e < map.experts; ++e) homes.set(e, map.rank_of(e));
  launch(homes_layout_kernel, homes, kLayoutBlocks, kLayoutThreads,
         counts_bytes + static_cast<std::size_t>(map.experts), stream);
}

}  // namespace xd::ep::cuda
