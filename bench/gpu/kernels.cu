#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cuda/atomic>
#include <cuda/ptx>

#include "device.h"

namespace bench::gpu {
namespace {

namespace ptx = cuda::ptx;
using SystemWord = cuda::atomic_ref<std::uint32_t, cuda::thread_scope_system>;

// ---- Common start ------------------------------------------------------------------------------

__device__ bool reaches(std::uint32_t* word, std::uint32_t round, std::uint64_t give_up) {
  SystemWord reached(*word);
  while (reached.load(cuda::memory_order_acquire) < round) {
    if (ptx::get_sreg_globaltimer() > give_up) return false;
  }
  return true;
}

__global__ void gate_kernel(const __grid_constant__ Gate gate) {
  const std::uint64_t give_up = ptx::get_sreg_globaltimer() + 20'000'000'000ull;
  const int peer = static_cast<int>(threadIdx.x);
  bool all_here = true;
  if (peer == 0) all_here = reaches(const_cast<std::uint32_t*>(gate.host), gate.round, give_up);
  __syncthreads();
  if (peer < gate.ranks) {
    SystemWord(gate.slots[peer][gate.rank]).store(gate.round, cuda::memory_order_release);
    all_here = all_here && reaches(&gate.slots[gate.rank][peer], gate.round, give_up);
  }
  if (!all_here) *gate.failed = 1;
}

// ---- Stamps ------------------------------------------------------------------------------------

__global__ void stamp_kernel(std::uint64_t* to) { *to = ptx::get_sreg_globaltimer(); }
__global__ void __launch_bounds__(1024) nothing_kernel() {}

// ---- Payload -----------------------------------------------------------------------------------

__device__ std::uint32_t draw(std::uint64_t seed, int source, int token, std::int64_t column) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15u + (static_cast<std::uint64_t>(source) << 56) +
                    (static_cast<std::uint64_t>(token) << 24) + static_cast<std::uint64_t>(column);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return static_cast<std::uint32_t>(x >> 40);
}

__device__ float number_of(std::uint32_t drawn) {
  return static_cast<float>(static_cast<int>(drawn & 15) - 8);
}

__device__ std::size_t cell_bytes(Cell cell) {
  return cell == Cell::byte ? 1 : cell == Cell::fp32 ? 4 : 2;
}

__device__ std::uint32_t cell_bits(Cell cell, std::uint32_t drawn, int factor) {
  if (cell == Cell::byte) return drawn & 0xff;
  // Adding zero turns the -0 of 0 * -8 into the +0 of an empty sum.
  const float value = number_of(drawn) * static_cast<float>(factor) + 0.0f;
  if (cell == Cell::fp32) return __float_as_uint(value);
  if (cell == Cell::fp16) return __half_as_ushort(__float2half_rn(value));
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ std::uint32_t load_cell(Cell cell, const void* rows, std::int64_t at) {
  switch (cell_bytes(cell)) {
    case 1:
      return static_cast<const std::uint8_t*>(rows)[at];
    case 2:
      return static_cast<const std::uint16_t*>(rows)[at];
    default:
      return static_cast<const std::uint32_t*>(rows)[at];
  }
}

__device__ void store_cell(Cell cell, void* rows, std::int64_t at, std::uint32_t bits) {
  switch (cell_bytes(cell)) {
    case 1:
      static_cast<std::uint8_t*>(rows)[at] = static_cast<std::uint8_t>(bits);
      break;
    case 2:
      static_cast<std::uint16_t*>(rows)[at] = static_cast<std::uint16_t>(bits);
      break;
    default:
      static_cast<std::uint32_t*>(rows)[at] = bits;
  }
}

// One block per row and turn.
__global__ void fill_kernel(Payload payload, int source, void* rows, std::int64_t count) {
  for (std::int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    for (std::int64_t column = threadIdx.x; column < payload.columns; column += blockDim.x) {
      const std::uint32_t drawn = draw(payload.seed, source, static_cast<int>(row), column);
      store_cell(payload.cell, rows, row * payload.columns + column,
                 cell_bits(payload.cell, drawn, 1));
    }
  }
}

__global__ void check_kernel(Payload payload, const void* rows, const Origin* origins,
                             std::int64_t count, unsigned long long* wrong) {
  unsigned long long mine = 0;
  for (std::int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const Origin origin = origins[row];
    for (std::int64_t column = threadIdx.x; column < payload.columns; column += blockDim.x) {
      const std::uint32_t drawn = draw(payload.seed, origin.source, origin.token, column);
      const std::uint32_t expected =
          origin.factor == 0 ? 0 : cell_bits(payload.cell, drawn, origin.factor);
      mine += load_cell(payload.cell, rows, row * payload.columns + column) != expected;
    }
  }
  if (mine != 0) atomicAdd(wrong, mine);
}

__global__ void check_norms_kernel(Payload payload, const float* norms, const Origin* origins,
                                   std::int64_t count, unsigned long long* wrong) {
  __shared__ int norm;
  for (std::int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const Origin origin = origins[row];
    if (threadIdx.x == 0) norm = 0;
    __syncthreads();
    int mine = 0;
    for (std::int64_t column = threadIdx.x; column < payload.columns; column += blockDim.x) {
      const auto number =
          static_cast<int>(number_of(draw(payload.seed, origin.source, origin.token, column)));
      mine += number * number;
    }
    atomicAdd(&norm, mine);
    __syncthreads();
    const float expected = origin.factor == 0 ? 0.0f : static_cast<float>(norm);
    if (threadIdx.x == 0 && norms[row] != expected) atomicAdd(wrong, 1ull);
    __syncthreads();
  }
}

// One thread per block of 128 columns.
__global__ void check_quantised_kernel(Payload payload, const void* rows, const float* scales,
                                       const Origin* origins, std::int64_t count,
                                       unsigned long long* wrong) {
  const auto* const bytes = static_cast<const std::uint8_t*>(rows);
  const std::int64_t blocks = payload.columns / 128;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count * blocks;
       i += gridDim.x * std::int64_t{blockDim.x}) {
    const Origin origin = origins[i / blocks];
    const std::int64_t first = i % blocks * 128;
    const auto number = [&](int column) {
      if (origin.factor == 0) return 0.0f;
      return number_of(draw(payload.seed, origin.source, origin.token, first + column));
    };
    float largest = 0;
    for (int column = 0; column < 128; ++column) largest = fmaxf(largest, fabsf(number(column)));
    const float scale = largest == 0 ? 1.0f : largest / 448.0f;
    unsigned long long bad = 0;
    // The scale of a padding row is zero like the row.
    bad += scales[i] != (origin.factor == 0 ? 0.0f : scale);
    for (int column = 0; column < 128; ++column) {
      const float scaled = number(column) * (1.0f / scale);
      bad += bytes[i * 128 + column] != __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
    }
    if (bad != 0) atomicAdd(wrong, bad);
  }
}

// ---- Wire floor --------------------------------------------------------------------------------

// Every warp takes pieces of its own; neighbouring pieces go to different blocks.
__global__ void __launch_bounds__(1024)
    store_kernel(const Piece* pieces, std::int64_t count, const std::byte* from) {
  constexpr int kBatch = 8;  // loads in flight per thread
  constexpr std::uint32_t kStep = 32 * sizeof(uint4);
  const std::uint32_t lane = threadIdx.x % 32;
  const std::int64_t warps = gridDim.x * std::int64_t{blockDim.x / 32};
  for (std::int64_t i = threadIdx.x / 32 * std::int64_t{gridDim.x} + blockIdx.x; i < count;
       i += warps) {
    const Piece piece = pieces[i];
    for (std::uint32_t at = lane * sizeof(uint4); at < piece.bytes; at += kBatch * kStep) {
      uint4 batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (at + k * kStep < piece.bytes) {
          batch[k] = *reinterpret_cast<const uint4*>(from + piece.from + at + k * kStep);
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (at + k * kStep < piece.bytes) {
          *reinterpret_cast<uint4*>(piece.to + at + k * kStep) = batch[k];
        }
      }
    }
  }
}

inline constexpr int kBulkWarps = 6;
inline constexpr int kStages = 4;
inline constexpr int kAhead = 2;  // loads are issued this many pieces before they are needed

struct BulkShared {
  alignas(128) std::byte stage[kBulkWarps][kStages][kPieceBytes];
  std::uint64_t loaded[kBulkWarps][kStages];
};

// One lane per warp moves pieces through the warp's stages.
__global__ void __launch_bounds__(kBulkWarps * 32)
    bulk_kernel(const Piece* pieces, std::int64_t count, const std::byte* from) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<BulkShared*>(memory);
  if (threadIdx.x % 32 != 0) return;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const std::int64_t first = warp * std::int64_t{gridDim.x} + blockIdx.x;
  const std::int64_t warps = gridDim.x * std::int64_t{kBulkWarps};
  for (std::uint64_t& barrier : shared.loaded[warp]) ptx::mbarrier_init(&barrier, 1);
  ptx::fence_proxy_async();

  const auto load = [&](std::int64_t turn) {
    const std::int64_t i = first + turn * warps;
    if (i >= count) return;
    const Piece piece = pieces[i];
    std::uint64_t* const barrier = &shared.loaded[warp][turn % kStages];
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier,
                                   piece.bytes);
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, shared.stage[warp][turn % kStages],
                       from + piece.from, piece.bytes, barrier);
  };
  for (int turn = 0; turn < kAhead; ++turn) load(turn);
  for (std::int64_t turn = 0; first + turn * warps < count; ++turn) {
    // The last store from the stage that is loaded next was issued kStages - kAhead turns ago.
    ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kStages - kAhead - 1>());
    load(turn + kAhead);
    const auto parity = static_cast<std::uint32_t>(turn / kStages & 1);
    while (!ptx::mbarrier_try_wait_parity(&shared.loaded[warp][turn % kStages], parity)) continue;
    const Piece piece = pieces[first + turn * warps];
    ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, piece.to,
                       shared.stage[warp][turn % kStages], piece.bytes);
    ptx::cp_async_bulk_commit_group();
  }
  ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
}

constexpr int kRowBlocks = 1024;

}  // namespace

void launch_gate(const Gate& gate, cudaStream_t stream) {
  gate_kernel<<<1, 96, 0, stream>>>(gate);
  ok(cudaGetLastError(), "gate");
}

void load_gate() {
  cudaFuncAttributes attributes{};
  ok(cudaFuncGetAttributes(&attributes, gate_kernel), "loading the gate");
}

void launch_stamp(std::uint64_t* to, cudaStream_t stream) {
  stamp_kernel<<<1, 1, 0, stream>>>(to);
  ok(cudaGetLastError(), "stamp");
}

void launch_nothing(int blocks, int threads, cudaStream_t stream) {
  nothing_kernel<<<blocks, threads, 0, stream>>>();
  ok(cudaGetLastError(), "a kernel that does nothing");
}

void fill_rows(const Payload& payload, int source, void* rows, std::int64_t count,
               cudaStream_t stream) {
  fill_kernel<<<kRowBlocks, 256, 0, stream>>>(payload, source, rows, count);
  ok(cudaGetLastError(), "fill");
}

void check_rows(const Payload& payload, const void* rows, const Origin* origins, std::int64_t count,
                unsigned long long* wrong, cudaStream_t stream) {
  check_kernel<<<kRowBlocks, 256, 0, stream>>>(payload, rows, origins, count, wrong);
  ok(cudaGetLastError(), "check");
}

void check_norms(const Payload& payload, const float* norms, const Origin* origins,
                 std::int64_t count, unsigned long long* wrong, cudaStream_t stream) {
  check_norms_kernel<<<kRowBlocks, 256, 0, stream>>>(payload, norms, origins, count, wrong);
  ok(cudaGetLastError(), "check of products");
}

void check_quantised(const Payload& payload, const void* rows, const float* scales,
                     const Origin* origins, std::int64_t count, unsigned long long* wrong,
                     cudaStream_t stream) {
  check_quantised_kernel<<<kRowBlocks, 256, 0, stream>>>(payload, rows, scales, origins, count,
                                                         wrong);
  ok(cudaGetLastError(), "check of quantised rows");
}

void prepare_movers() {
  ok(cudaFuncSetAttribute(bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                          sizeof(BulkShared)),
     "shared memory of the bulk copies");
}

void launch_pieces(Mover mover, int blocks, const Piece* pieces, std::int64_t count,
                   const std::byte* from, cudaStream_t stream) {
  if (mover == Mover::stores) {
    store_kernel<<<blocks, 1024, 0, stream>>>(pieces, count, from);
  } else {
    bulk_kernel<<<blocks, kBulkWarps * 32, sizeof(BulkShared), stream>>>(pieces, count, from);
  }
  ok(cudaGetLastError(), "wire floor");
}

}  // namespace bench::gpu
