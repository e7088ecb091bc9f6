// Epilogues of products that no other rank takes part in, and sums of columns. These kernels wait
// for nobody.
#include "gemm/cuda/epilogue.cuh"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/launch.cuh"

namespace xd::gemm::cuda {
namespace {

constexpr int kThreads = 512, kBlocksPerSm = 2;
// A block of column sums: so many vectors beside one another, and rows at a time.
constexpr int kVectors = 8, kRows = 32;

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    finish_kernel(const __grid_constant__ FinishParams p) {
  constexpr int kElements = kWidth<DType::f32>;
  const std::int64_t row = p.columns / kElements, vectors = p.rows * row;
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  std::uint32_t largest = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors;
       i += stride) {
    float x[kElements];
    load(reinterpret_cast<const std::byte*>(p.product), DType::f32, i * kElements, x);
    finish(p.epilogue, i * kElements, i % row * kElements, x, largest);
  }
  keep_largest(p.epilogue, largest);
}

// The rows of a column are always added in the same order: each thread adds every kRows-th one, and
// then one thread adds what these have.
__global__ void __launch_bounds__(kVectors* kRows)
    column_sum_kernel(const __grid_constant__ ColumnSumParams p) {
  constexpr int kElements = kWidth<DType::f32>;
  __shared__ float part[kRows][kVectors * kElements];
  const int x = static_cast<int>(threadIdx.x) % kVectors;
  const int y = static_cast<int>(threadIdx.x) / kVectors;
  const std::int64_t column = (std::int64_t{blockIdx.x} * kVectors + x) * kElements;
  float total[kElements] = {};
  if (column < p.columns) {
    for (std::int64_t row = y; row < p.rows; row += kRows) {
      float one[kElements];
      load(reinterpret_cast<const std::byte*>(p.values), DType::f32, row * p.columns + column, one);
#pragma unroll
      for (int e = 0; e < kElements; ++e) total[e] += one[e];
    }
  }
#pragma unroll
  for (int e = 0; e < kElements; ++e) part[y][x * kElements + e] = total[e];
  __syncthreads();
  const int mine = static_cast<int>(threadIdx.x);
  const std::int64_t first = std::int64_t{blockIdx.x} * kVectors * kElements;
  if (mine >= kVectors * kElements || first + mine >= p.columns) return;
  float sum = 0;
  for (int r = 0; r < kRows; ++r) sum += part[r][mine];
  p.sums[first + mine] = p.adds ? p.sums[first + mine] + sum : sum;
}

}  // namespace

void launch_finish(const FinishParams& params, int multiprocessors, cudaStream_t stream) {
  launch_plain(finish_kernel, params, multiprocessors * kBlocksPerSm, kThreads, stream);
}

void launch_column_sums(const ColumnSumParams& params, cudaStream_t stream) {
  constexpr std::int64_t kBlock = kVectors * kWidth<DType::f32>;
  launch_plain(column_sum_kernel, params, static_cast<int>((params.columns + kBlock - 1) / kBlock),
               kVectors * kRows, stream);
}

void load_finish() {
  load_kernel(finish_kernel);
  load_kernel(column_sum_kernel);
}

}  // namespace xd::gemm::cuda
