// Lays scales per 128 columns out as cuBLASLt takes them (block_scales.h). Waits for nobody.
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/launch.cuh"

namespace xd::gemm::cuda {
namespace {

constexpr int kSide = 32, kLines = 8, kThreads = kSide * kLines;

// Transposes by tiles: scales of a row lie beside one another where they are loaded, and those of a
// block where they are stored.
__device__ inline void transpose_a(const BlockScalesParams& p) {
  __shared__ float tile[kSide][kSide + 1];
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const std::int64_t across = (p.blocks + kSide - 1) / kSide;
  const std::int64_t tiles = (p.rows + kSide - 1) / kSide * across;
  for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const std::int64_t row = t / across * kSide, block = t % across * kSide;
    for (int i = y; i < kSide; i += kLines) {
      if (row + i >= p.rows || block + x >= p.blocks) continue;
      tile[i][x] = p.a != nullptr ? p.a[(row + i) * p.blocks + block + x] : 1.0f;
    }
    __syncthreads();
    for (int i = y; i < kSide; i += kLines) {
      if (row + x < p.rows && block + i < p.blocks) *p.place_of(row + x, block + i) = tile[x][i];
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    block_scales_kernel(const __grid_constant__ BlockScalesParams p) {
  transpose_a(p);
  if (p.b_to == nullptr) return;
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < p.b_rows * p.b_pitch; i += stride) {
    const std::int64_t row = i / p.b_pitch, block = i - row * p.b_pitch;
    const bool given = p.b != nullptr && block < p.blocks;
    p.b_to[i] = given ? p.b[row * p.blocks + block] : 1.0f;
  }
}

}  // namespace

void launch_block_scales(const BlockScalesParams& params, int multiprocessors,
                         cudaStream_t stream) {
  const std::int64_t scales = params.rows * params.blocks + params.b_rows * params.b_pitch;
  launch_plain(block_scales_kernel, params, blocks_for(scales, kSide * kSide, multiprocessors),
               kThreads, stream);
}

void load_block_scales() { load_kernel(block_scales_kernel); }

}  // namespace xd::gemm::cuda
