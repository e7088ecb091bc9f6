// Products of experts' rows, by the tensor cores of compute capability 9.0. A block computes one
// tile of d and ends: blocks share the device with whatever else runs there, and wait for nobody.
//
//   warps 0-7  two warpgroups. Of a tile of 128 rows each has 64, and all columns; of one of 64
//              rows both have all, and half of the columns each. They multiply, and store.
//   warp 8     one thread, which loads the operands, up to kStages stages ahead. Of e4m3 three
//              more warps stand idle, so that the registers of a warpgroup go to the two others.
//
//   shared memory    written by                        read by
//   tile             warp 0, from the offsets          all, behind a barrier of the block
//   stage: a, b      copies of the tensor maps         the warpgroups' products
//   full[stage]      the loader, which expects bytes,  the warpgroups, before they multiply
//                    and the copies
//   empty[stage]     each of the 8 warps, when its     the loader, before it loads again
//                    products have read the stage
//   rows of d        each warp for itself, in what     the same warp, which stores whole vectors
//                    were stages, behind a barrier
//
// Tiles. The tiles of an expert follow one another, rows first: neighbours share columns of b. The
// host does not know the zones, so it launches as many blocks as there can be tiles; the others end
// at once. A zone begins at any row, and so may a box of rows. A box that ends in rows of another
// zone, or as zeros behind row R, gives rows of d that are not stored. If `outer`, sums run over
// rows, and rows behind the zone are set to zero in shared memory before the last products.
//
// Stages. 128 bytes of each line, in the order of bytes that CU_TENSOR_MAP_SWIZZLE_128B gives: the
// 16-byte unit u of the 128-byte row r lies at unit u ^ r % 8. Stages begin at multiples of 1024.
//
//   Lie::lines    row r = line r, 64 elements of it (128 of e4m3). Eight rows are 1024 bytes, the
//                 descriptor's stride; its leading offset means nothing. The next 32 bytes of the
//                 sum are 32 bytes on.
//   Lie::across   chunks of 64 lines, 8192 bytes each: row r = element r of these lines. Eight
//                 rows are 1024 bytes, the stride; a chunk is the leading offset. The next 16
//                 elements of the sum are 16 rows = 2048 bytes on.
//
// Sums. A warpgroup has one accumulator for each element of d, to which products are added in the
// order of the sum. Tensor cores keep fewer bits of sums of e4m3; so each stage is summed for
// itself (128 products), and these sums are added in float32 while the next stage is multiplied.
// A stage is also what scales of blocks are for, and the columns of a warpgroup: its sums are
// multiplied by a factor for each row as they are added.
#include <cuda_runtime.h>

#include "base/error.h"
#include "cuda/error.h"
#include "cuda/ptx_sm90a.cuh"
#include "ep/experts/cuda/grouped/tile.cuh"

namespace xd::ep::cuda {
namespace {

// ---- Loads -------------------------------------------------------------------------------------

// The copies that a barrier waits for read this device's own memory and end by themselves, and the
// products that it waits for do, too. The bound is for mistakes: better an error than a hang.
__device__ void await(std::uint64_t* barrier, unsigned parity) {
  constexpr std::uint64_t kMostNs = 10'000'000'000;
  if (ptx::mbarrier_try_wait(barrier, parity)) return;
  const std::uint64_t begin = ptx::global_timer_ns();
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
    if (ptx::global_timer_ns() - begin > kMostNs) __trap();
  }
}

// A place in the ring of stages.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
  __device__ int before() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

template <class S>
__device__ int steps_of(const Tile& tile) {
  return tiles_of(tile.depth, S::kKind.depth());
}

// Loads 128 bytes of each line: lines [line, line + kLines), from element `at` of the sum on.
template <Lie kLie, int kLines>
__device__ void load_operand(std::byte* to, const CUtensorMap& map, int line, int at, int matrix,
                             std::uint64_t* full) {
  if constexpr (kLie == Lie::lines) {
    ptx::tensor_load(to, &map, at, line, matrix, full);
  } else {
#pragma unroll
    for (int i = 0; i < kLines / 64; ++i) {
      ptx::tensor_load(to + i * kChunkBytes, &map, line + i * 64, at, matrix, full);
    }
  }
}

// One thread.
template <class S>
__device__ void load_all(const GroupedParams& p, const Tile& tile, Shared& shared,
                         std::byte* stages) {
  constexpr GroupedKind kKind = S::kKind;
  Ring<S::kStages> ring;
  const int steps = steps_of<S>(tile);
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.advance()) {
    await(&shared.empty[ring.stage], ring.parity ^ 1);  // the first round finds all of them empty
    std::uint64_t* const full = &shared.full[ring.stage];
    std::byte* const to = stages + ring.stage * S::kStageBytes;
    const int at = tile.first + step * kKind.depth();
    ptx::mbarrier_arrive_expect_bytes(full, S::kStageBytes);
    load_operand<kKind.a(), kKind.tile_rows>(to, p.a, tile.row, at, 0, full);
    load_operand<kKind.b, kKind.tile_columns()>(to + S::kABytes, p.b, tile.column, at,
                                                kKind.outer ? 0 : tile.expert, full);
  }
}

// ---- Products ----------------------------------------------------------------------------------

// Describes an operand in shared memory, from its first line and element on.
template <Lie kLie>
__device__ std::uint64_t describe(const std::byte* operand) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kStride = std::uint64_t{1024 >> 4} << 32;
  constexpr std::uint64_t kLeading = std::uint64_t{kLie == Lie::across ? kChunkBytes >> 4 : 1}
                                     << 16;
  return kSwizzle128 | kStride | kLeading | (ptx::shared_address(operand) & 0x3FFFF) >> 4;
}

// From one product's elements of the sum to the next one's, in units of descriptors' addresses.
template <Lie kLie>
constexpr std::uint64_t kAlong = (kLie == Lie::across ? 16 * kLineBytes : 32) >> 4;

template <class S>
__device__ void multiply(float (&sums)[S::kSums], std::uint64_t a, std::uint64_t b, bool adds) {
  constexpr int kColumnsOfA = S::kKind.a() == Lie::across, kRowsOfB = S::kKind.b == Lie::across;
  if constexpr (S::kKind.type == DType::bf16) {
    ptx::wgmma_bf16<kColumnsOfA, kRowsOfB>(sums, a, b, adds);
  } else if constexpr (S::kKind.type == DType::f16) {
    ptx::wgmma_f16<kColumnsOfA, kRowsOfB>(sums, a, b, adds);
  } else {
    ptx::wgmma_e4m3(sums, a, b, adds);
  }
}

// The descriptors of a warpgroup's operands in the first stage.
struct Operands {
  std::uint64_t a, b;

  // In another stage.
  template <class S>
  __device__ Operands in(int stage) const {
    const std::uint64_t at = static_cast<std::uint64_t>(stage) * (S::kStageBytes >> 4);
    return {a + at, b + at};
  }
};

// Issues a stage's products. `adds`: to what the sums are; else the first one sets them.
template <class S>
__device__ void multiply_stage(float (&sums)[S::kSums], const Operands& operands, bool adds) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    multiply<S>(sums, operands.a + i * kAlong<S::kKind.a()>, operands.b + i * kAlong<S::kKind.b>,
                adds || i > 0);
  }
  ptx::wgmma_commit();
}

// Where a warpgroup's part of the tile begins.
struct Part {
  int row, column;
};
template <class S>
__device__ Part part_of(int warpgroup) {
  if (S::kKind.tile_rows == 128) return {warpgroup * 64, 0};
  return {0, warpgroup * S::kColumns};
}

// Sets a stage's rows to zero from `first` on, for products that come behind. Both operands lie
// across. All warpgroups.
template <class S>
__device__ void clear_rows(std::byte* stage, int first) {
  constexpr int kUnits = kLineBytes / 16, kChunks = S::kStageBytes / kChunkBytes;
  const int units = (64 - first) * kUnits;
  for (int i = static_cast<int>(threadIdx.x); i < units * kChunks; i += kConsumers) {
    std::byte* const chunk = stage + i / units * kChunkBytes;
    *reinterpret_cast<uint4*>(chunk + (first * kUnits + i % units) * 16) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(1, kConsumers);
}

template <class S>
__device__ Operands operands_of(const std::byte* stages, const Part& part) {
  // Of Lie::lines a line takes 128 bytes, of Lie::across 64 lines take a chunk: the same.
  return {describe<S::kKind.a()>(stages + part.row * kLineBytes),
          describe<S::kKind.b>(stages + S::kABytes + part.column * kLineBytes)};
}

// This thread's sums of the tile, to which each stage's products are added as they come. All
// warpgroups.
template <class S>
__device__ void compute(const Tile& tile, Shared& shared, std::byte* stages, const Part& part,
                        float (&sums)[S::kSums]) {
  constexpr GroupedKind kKind = S::kKind;
  const bool tells = threadIdx.x % 32 == 0;
  const int steps = steps_of<S>(tile);
  const Operands operands = operands_of<S>(stages, part);
  Ring<S::kStages> ring;
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.advance()) {
    await(&shared.full[ring.stage], ring.parity);
    const int rest = tile.depth - step * kKind.depth();
    if (kKind.outer && rest < kKind.depth()) {
      clear_rows<S>(stages + ring.stage * S::kStageBytes, rest);
    }
    multiply_stage<S>(sums, operands.in<S>(ring.stage), step > 0);
    ptx::wgmma_wait<1>();  // the products of the stage before have read it
    if (tells && step > 0) ptx::mbarrier_arrive(&shared.empty[ring.before()]);
  }
  ptx::wgmma_wait<0>();
  ptx::settle(sums);
}

// A stage's sums, on their way to those of the tile.
template <class S>
struct StageSums {
  float sums[S::kSums];
  float factors[2];  // with scales of blocks: of the thread's rows
};

// The scales of blocks that a thread's sums take.
template <class S>
class BlockScales {
 public:
  __device__ BlockScales(const GroupedParams& p, const Tile& tile, const Part& part) {
    const int thread = static_cast<int>(threadIdx.x);
    const int row = part.row + thread / 32 % 4 * 16 + thread % 32 / 4;
    // A row that is not stored takes the scales of one that is.
    for (int h = 0; h < 2; ++h) {
      of_rows_[h] = p.a_scale + (tile.row + min(row + 8 * h, tile.rows - 1)) * p.a_scale_stride;
    }
    const std::int64_t block = min(tile.column + part.column, p.n - 1) / 128;
    of_columns_ = p.b_scale + tile.expert * p.b_scale_stride + block * p.b_scale_row_stride;
  }
  // Reads those of a stage.
  __device__ void read(int stage, float (&factors)[2]) const {
    const float of_columns = __ldg(of_columns_ + stage);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factors[h] = __fmul_rn(__ldg(of_rows_[h] + stage), of_columns);
    }
  }

 private:
  const float* of_rows_[2];
  const float* of_columns_;
};

// This thread's sums of the tile, of stages that are summed for themselves, in two sets of
// registers by turns: one is added while the next stage's products run. All warpgroups.
template <class S>
__device__ void compute_promoted(const GroupedParams& p, const Tile& tile, Shared& shared,
                                 std::byte* stages, const Part& part, float (&sums)[S::kSums]) {
  const bool tells = threadIdx.x % 32 == 0;
  const Operands operands = operands_of<S>(stages, part);
  Ring<S::kStages> ring;
  [[maybe_unused]] const BlockScales<S> scales(p, tile, part);
  StageSums<S> even, odd;
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  int begun = 0;
  const auto begin = [&](StageSums<S>& stage) {
    await(&shared.full[ring.stage], ring.parity);
    multiply_stage<S>(stage.sums, operands.in<S>(ring.stage), false);
    if constexpr (S::kKind.block_scales) scales.read(begun++, stage.factors);
    ring.advance();
  };
  int ended = 0;
  const auto add = [&](StageSums<S>& stage) {
    ptx::settle(stage.sums);
    if (tells) ptx::mbarrier_arrive(&shared.empty[ended]);
    if (++ended == S::kStages) ended = 0;
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) {
      if constexpr (S::kKind.block_scales) {
        sums[i] = __fmaf_rn(stage.sums[i], stage.factors[i / 2 % 2], sums[i]);
      } else {
        sums[i] = __fadd_rn(sums[i], stage.sums[i]);
      }
    }
  };
  int left = steps_of<S>(tile);
  if (left == 0) return;
  begin(even);
#pragma unroll 1
  for (; left > 2; left -= 2) {
    begin(odd);
    ptx::wgmma_wait<1>();
    add(even);
    begin(even);
    ptx::wgmma_wait<1>();
    add(odd);
  }
  if (left == 2) {
    begin(odd);
    ptx::wgmma_wait<1>();
    add(even);
    ptx::wgmma_wait<0>();
    add(odd);
  } else {
    ptx::wgmma_wait<0>();
    add(even);
  }
}

// ---- Stores ------------------------------------------------------------------------------------

// This thread's sums, times their scales. Row and column: where the warp's rows of d begin.
template <class S>
__device__ void apply_scales(const GroupedParams& p, const Tile& tile, int row, int column,
                             float (&sums)[S::kSums]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float of_row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h + lane / 4;
    of_row[h] = r < tile.rows ? p.a_scale[tile.row + r] : 0.0f;
  }
  const float* const scales = p.b_scale + static_cast<std::int64_t>(tile.expert) * p.n;
#pragma unroll
  for (int i = 0; i < S::kSums; ++i) {
    const int c = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    const float of_column = c < p.n ? scales[c] : 0.0f;
    sums[i] = __fmul_rn(__fmul_rn(sums[i], of_row[i / 2 % 2]), of_column);
  }
}

// Stores float32, each thread its own sums: four lanes have 32 bytes in a row.
template <class S>
__device__ void store_wide(const GroupedParams& p, const Tile& tile, float* d, int row, int column,
                           const float (&sums)[S::kSums]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < S::kSums; i += 2) {
    const int r = row + i / 2 % 2 * 8 + lane / 4, c = column + i / 4 * 8 + lane % 4 * 2;
    if (r >= tile.rows || c >= p.n) continue;
    float* const to = d + r * p.d_row_stride + c;
    if (c + 1 < p.n) {
      float2 pair = p.accumulate ? *reinterpret_cast<const float2*>(to) : make_float2(0.0f, 0.0f);
      pair = p.accumulate ? make_float2(pair.x + sums[i], pair.y + sums[i + 1])
                          : make_float2(sums[i], sums[i + 1]);
      *reinterpret_cast<float2*>(to) = pair;
    } else {
      *to = p.accumulate ? *to + sums[i] : sums[i];
    }
  }
}

// Stores halves through shared memory, whose rows are 16 bytes longer so that lanes meet no bank
// twice. `place`: the warp's own.
template <class S>
__device__ void store_narrow(const GroupedParams& p, const Tile& tile, std::uint16_t* d, int row,
                             int column, const float (&sums)[S::kSums], std::byte* place) {
  constexpr int kPitch = S::kColumns * 2 + 16, kVectors = S::kColumns / 8;
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < S::kSums; i += 2) {
    std::byte* const to = place + (i / 2 % 2 * 8 + lane / 4) * kPitch;
    reinterpret_cast<std::uint32_t*>(to)[i / 4 * 4 + lane % 4] =
        p.d_type == DType::bf16 ? ptx::pack_bf16(sums[i], sums[i + 1])
                                : ptx::pack_f16(sums[i], sums[i + 1]);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < 16 * kVectors; i += 32) {
    const int r = i / kVectors, at = i % kVectors * 8, c = column + at;
    if (row + r >= tile.rows || c >= p.n) continue;
    const std::byte* const from = place + r * kPitch + at * 2;
    std::uint16_t* const to = d + (row + r) * p.d_row_stride + c;
    if (c + 8 <= p.n) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int j = 0; j < p.n - c; ++j) to[j] = reinterpret_cast<const std::uint16_t*>(from)[j];
    }
  }
}

template <class S>
__device__ void store(const GroupedParams& p, const Tile& tile, std::byte* stages, const Part& part,
                      float (&sums)[S::kSums]) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int row = part.row + warp % 4 * 16, column = tile.column + part.column;
  if constexpr (S::kPromotes && !S::kKind.block_scales) {
    apply_scales<S>(p, tile, row, column, sums);
  }
  const std::int64_t first =
      tile.row * p.d_row_stride + (S::kKind.outer ? tile.expert * p.d_stride : 0);
  if (p.d_type == DType::f32) {
    return store_wide<S>(p, tile, reinterpret_cast<float*>(p.d) + first, row, column, sums);
  }
  ptx::barrier_sync(1, kConsumers);  // all products have read the stages
  std::byte* const place = stages + warp * (16 * (S::kColumns * 2 + 16));
  store_narrow<S>(p, tile, reinterpret_cast<std::uint16_t*>(p.d) + first, row, column, sums, place);
}

// ---- The kernel --------------------------------------------------------------------------------

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    grouped_kernel(const __grid_constant__ GroupedParams p) {
  __shared__ Shared shared;
  std::byte* const start = ptx::dynamic_shared();
  std::byte* const stages = start + (1024 - ptx::shared_address(start) % 1024) % 1024;
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (warp == 0) find_tile<S>(p, shared.tile);
  if (threadIdx.x == kConsumers) {
    if (p.rows > 0) {  // else there are no maps
      ptx::prefetch_tensor_map(&p.a);
      ptx::prefetch_tensor_map(&p.b);
    }
    for (int i = 0; i < S::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], kConsumers / 32);
    }
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_shared();
  }
  __syncthreads();
  const Tile tile = shared.tile;
  if (tile.rows == 0) return;
  if (warp >= kConsumers / 32) {
    if constexpr (S::kPromotes) ptx::give_registers<40>();
    if (threadIdx.x == kConsumers) load_all<S>(p, tile, shared, stages);
    return;
  }
  if constexpr (S::kPromotes) ptx::take_registers<232>();
  if (p.accumulate && tile.depth == 0) return;
  const Part part = part_of<S>(warp / 4);
  float sums[S::kSums];
  if constexpr (S::kPromotes) {
    compute_promoted<S>(p, tile, shared, stages, part, sums);
  } else {
    compute<S>(tile, shared, stages, part, sums);
  }
  store<S>(p, tile, stages, part, sums);
}

// ---- Launches ----------------------------------------------------------------------------------

struct Kernel {
  void (*function)(GroupedParams);
  unsigned threads;
  int shared_bytes;
};

template <DType kType, bool kOuter, Lie kB, int kTileRows, bool kBlockScales = false>
constexpr Kernel kernel() {
  using S = Shape<kType, kOuter, kB, kTileRows, kBlockScales>;
  return {grouped_kernel<S>, S::kThreads, S::kSharedBytes};
}

template <DType kType>
Kernel kernel_of_16_bit(const GroupedKind& kind) {
  if (kind.outer) return kernel<kType, true, Lie::across, 128>();
  if (kind.tile_rows == 64) {
    return kind.b == Lie::lines ? kernel<kType, false, Lie::lines, 64>()
                                : kernel<kType, false, Lie::across, 64>();
  }
  return kind.b == Lie::lines ? kernel<kType, false, Lie::lines, 128>()
                              : kernel<kType, false, Lie::across, 128>();
}

template <bool kBlockScales>
Kernel kernel_of_e4m3(const GroupedKind& kind) {
  return kind.tile_rows == 64 ? kernel<DType::e4m3, false, Lie::lines, 64, kBlockScales>()
                              : kernel<DType::e4m3, false, Lie::lines, 128, kBlockScales>();
}

Kernel kernel_for(const GroupedKind& kind) {
  XD_CHECK(kind.outer ? kind.b == Lie::across && kind.type != DType::e4m3
                      : kind.b == Lie::lines || kind.type != DType::e4m3);
  if (kind.type == DType::bf16) return kernel_of_16_bit<DType::bf16>(kind);
  if (kind.type == DType::f16) return kernel_of_16_bit<DType::f16>(kind);
  return kind.block_scales ? kernel_of_e4m3<true>(kind) : kernel_of_e4m3<false>(kind);
}

// Lets a kernel have its shared memory.
void allow_shared(const Kernel& kernel) {
  XD_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.function),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     kernel.shared_bytes));
}

void load(const Kernel& kernel) {
  cudaFuncAttributes attributes{};
  XD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel.function)));
  allow_shared(kernel);
}

}  // namespace

void load_grouped_kernels() {
  for (const DType type : {DType::bf16, DType::f16, DType::e4m3}) {
    for (const int rows : {64, 128}) {
      load(kernel_for({.type = type, .b = Lie::lines, .tile_rows = rows}));
      if (type == DType::e4m3) {
        load(kernel_for({.type = type, .b = Lie::lines, .tile_rows = rows, .block_scales = true}));
        continue;
      }
      load(kernel_for({.type = type, .b = Lie::across, .tile_rows = rows}));
    }
    if (type != DType::e4m3) load(kernel_for({.type = type, .outer = true, .b = Lie::across}));
  }
}

void launch_grouped(const GroupedKind& kind, const GroupedParams& params, int blocks,
                    cudaStream_t stream) {
  const Kernel kernel = kernel_for(kind);
  allow_shared(kernel);
  kernel.function<<<static_cast<unsigned>(blocks), kernel.threads,
                    static_cast<std::size_t>(kernel.shared_bytes), stream>>>(params);
  XD_CUDA_CHECK(cudaGetLastError());
}

}  // namespace xd::ep::cuda
