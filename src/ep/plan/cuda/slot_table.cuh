// The end of a change of a group's table of slots, in the kernel that has met its peers.
#pragma once

#include "cuda/ptx.cuh"
#include "ep/plan/cuda/slot_table.h"

namespace xd::ep::cuda {

// All threads of one block. `agreed`: all ranks take the table; else the old one stays.
__device__ inline void end_change(const SlotTableChange& change, bool agreed) {
  if (change.image == nullptr) return;
  if (agreed) {
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x; i < change.image_words; i += blockDim.x) {
      change.words[i] = change.image[i];
    }
    if (threadIdx.x == 0) change.table->hash = change.hash;
  }
  __syncthreads();
  if (threadIdx.x == 0) ptx::st_release_sys(change.image_read, 1);
}

}  // namespace xd::ep::cuda
