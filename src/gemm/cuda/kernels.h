// The kernels of the CUDA executor as the host starts them.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/cuda/params.h"

namespace xd::gemm::cuda {

// Nothing waits on the host. `type`: of the products.

// So many blocks of a sum fit on a multiprocessor.
inline constexpr int kSumsPerMultiprocessor = 2;

// The first launch of an operation of several: peers may touch this rank's memory once they know
// of it, and when it has ended this rank may touch theirs.
void launch_open(const TurnParams& params, cudaStream_t stream);
// The last launch of an operation whose rows need no sum. The work before it in the stream is all
// that this rank does in peers' memory.
void launch_close(const TurnParams& params, cudaStream_t stream);
// Finishes the communicator with BUSY if an operation of the context runs.
void launch_expect_idle(const TurnParams& params, cudaStream_t stream);
// The turn of a call that failed on the host.
void launch_failed(const TurnParams& params, cudaStream_t stream);
// When it has ended, what these sources have copied has landed.
void launch_landed(const LandedParams& params, cudaStream_t stream);
// The last launch of an operation whose partial sums lie in the cells when all peers have left.
// It waits with all its blocks, of which there are `most_blocks` at most.
void launch_sum(const SumParams& params, DType type, int most_blocks, cudaStream_t stream);
// The same sums, of partial sums that have landed: a launch that waits for nobody.
void launch_part_sum(const SumParams& params, DType type, int most_blocks, cudaStream_t stream);
// Whole operations.
void launch_words(const InlineFlagParams& params, DType type, int multiprocessors,
                  cudaStream_t stream);
void launch_gather_words(const GatherInlineParams& params, int multiprocessors,
                         cudaStream_t stream);
void launch_push(const PushParams& params, int multiprocessors, cudaStream_t stream);
// Work of this rank alone.
void launch_finish(const FinishParams& params, int multiprocessors, cudaStream_t stream);
void launch_block_scales(const BlockScalesParams& params, int multiprocessors, cudaStream_t stream);
void launch_column_sums(const ColumnSumParams& params, cudaStream_t stream);
// Behind an operation in which all ranks have agreed on it.
void launch_column_meeting(const ColumnMeetingParams& params, int multiprocessors,
                           cudaStream_t stream);

// Loads every kernel on the current device.
void load_kernels();

}  // namespace xd::gemm::cuda
