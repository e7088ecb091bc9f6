// Column sums of all ranks, added: a small all-reduce by words behind an operation.
//
// It comes behind the launch that has opened or done the operation, in the same stream, so it finds
// in Control whether all ranks have agreed; only then does it move anything, and then it does on
// all ranks. Its words have a place of their own, by the operation's parity: a peer has taken those
// of two operations ago before it entered the operation in between, and this rank has seen it
// enter.
//
// Each thread pushes a vector before it waits for the same one of the peers, so it does not matter
// which blocks run at once.
#include "gemm/cuda/elements.cuh"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/launch.cuh"
#include "gemm/cuda/turn.cuh"

namespace xd::gemm::cuda {
namespace {

constexpr int kThreads = 128;

// Sums by ascending rank; false after a fatal error.
__device__ inline bool add_ranks(const ColumnMeetingParams& p, std::int64_t i, const uint4& own,
                                 float (&sum)[4]) {
  const Group& group = p.group;
  const std::uint64_t epoch = group.control->opened;
  const device::KernelWait site{XD_PHASE_ROWS, group.number, p.operation, epoch};
  for (int source = 0; source < group.ranks(); ++source) {
    uint4 v = own;
    std::byte* const words = group.areas[group.rank()].base +
                             group.map.columns_of(epoch, source, group.ranks()) + i * 16;
    if (source != group.rank() && !take_words(group.comm, site, words, source, v)) return false;
    float part[4];
    widen<DType::f32>(v, part);
    for (int e = 0; e < 4; ++e) sum[e] += part[e];
  }
  return true;
}

__global__ void __launch_bounds__(kThreads)
    column_meeting_kernel(const __grid_constant__ ColumnMeetingParams p) {
  const Group& group = p.group;
  if (group.control->agreed == 0) return;
  const std::uint64_t epoch = group.control->opened;
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < p.columns / 4;
       i += stride) {
    const uint4 own = reinterpret_cast<const uint4*>(p.own)[i];
    for (int d = 1; d < group.ranks(); ++d) {
      const int peer = (group.rank() + d) % group.ranks();
      push_words(group.areas[peer].base + group.map.columns_of(epoch, group.rank(), group.ranks()) +
                     i * 16,
                 own);
    }
    float sum[4] = {};
    if (!add_ranks(p, i, own, sum)) return;
    for (int e = 0; e < 4; ++e) p.sums[i * 4 + e] = sum[e];
  }
}

}  // namespace

void launch_column_meeting(const ColumnMeetingParams& params, int multiprocessors,
                           cudaStream_t stream) {
  const std::int64_t blocks = (params.columns / 4 + kThreads - 1) / kThreads;
  launch_plain(column_meeting_kernel, params,
               static_cast<int>(blocks < multiprocessors ? blocks : multiprocessors), kThreads,
               stream);
}

void load_columns() { load_kernel(column_meeting_kernel); }

}  // namespace xd::gemm::cuda
