// The kernels of a group's table of slots. Each reads what its operation needs of the table, and
// waits for no peer.
#include "ep/plan/cuda/device_slot_table.h"

#include <algorithm>

#include "base/error.h"
#include "cuda/ptx.cuh"
#include "ep/plan/cuda/launch.cuh"
#include "ep/plan/cuda/load.h"
#include "ep/plan/cuda/slot_table.cuh"
#include "ep/plan/cuda/warp.cuh"

namespace xd::ep::cuda {
namespace {

constexpr int kThreads = 256, kMostBlocks = 64;

int blocks_for(std::int64_t items) {
  const std::int64_t blocks = (items + kThreads - 1) / kThreads;
  return static_cast<int>(std::clamp<std::int64_t>(blocks, 1, kMostBlocks));
}

// ---- Ids of logical experts --------------------------------------------------------------------

struct ToSlotsParams {
  SlotTableDevice* table;
  BatchIds ids;
  std::int64_t choices, topk;  // T * K
  std::int32_t bad;            // an id of no slot
  int rank;
  bool collapse;
  std::int32_t* out;  // [T,K]
};

// A token's second mention of an expert that has no slot is bad, as it is of others, unless the
// group collapses them.
__device__ std::int32_t name_unplaced(const ToSlotsParams& p, std::int64_t choice, std::int64_t id,
                                      unsigned long long& unplaced) {
#pragma unroll 1
  for (std::int64_t before = choice - choice % p.topk; before < choice; ++before) {
    if (id_at(p.ids, before) == id) return p.collapse ? -1 : p.bad;
  }
  ++unplaced;
  return -1;
}

// Bad ids stay bad, and equal ids of a token become equal slots: the batch's kernel judges both.
__device__ std::int32_t name_slot(const ToSlotsParams& p, std::int64_t choice,
                                  unsigned long long& unplaced) {
  const std::int64_t id = id_at(p.ids, choice);
  if (id == -1) return -1;
  if (id < 0 || id >= p.ids.experts) return p.bad;
  const int slot = slot_of(p.table, p.ids, static_cast<int>(id), choice / p.topk, p.rank);
  return slot != SlotTable::kNoSlot ? slot : name_unplaced(p, choice, id, unplaced);
}

// The last block tells the host.
__device__ void tell_unplaced(const ToSlotsParams& p) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Release and acquire: the last block sees what all have added.
  if (ptx::add_acq_rel_gpu(&p.table->arrived, 1) + 1 != gridDim.x) return;
  p.table->arrived = 0;
  tell_unplaced(*p.table);
}

__global__ void __launch_bounds__(kThreads)
    to_slots_kernel(const __grid_constant__ ToSlotsParams p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_kernel_before();
  unsigned long long unplaced = 0;
#pragma unroll 1
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.choices;
       i += std::int64_t{gridDim.x} * kThreads) {
    p.out[i] = name_slot(p, i, unplaced);
  }
  if (unplaced != 0) atomicAdd(&p.table->unplaced, unplaced);
  tell_unplaced(p);
}

// ---- Loads -------------------------------------------------------------------------------------

struct TellLoadsParams {
  unsigned long long* loads;  // [summands][size]
  int summands, size;
  std::int64_t* out;  // [size]
  bool clear;
};

__global__ void __launch_bounds__(kThreads)
    tell_loads_kernel(const __grid_constant__ TellLoadsParams p) {
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < p.size;
       i += static_cast<int>(gridDim.x) * kThreads) {
    unsigned long long sum = 0;
#pragma unroll 1
    for (int s = 0; s < p.summands; ++s) {
      unsigned long long* const load = p.loads + std::int64_t{s} * p.size + i;
      // A prepare may run beside this: no choice of its is lost.
      sum += p.clear ? atomicExch(load, 0ull) : atomicAdd(load, 0ull);
    }
    p.out[i] = static_cast<std::int64_t>(sum);
  }
}

}  // namespace

Tensor DeviceSlotTable::to_slots(const Tensor& topk_idx, const Tensor& replica_hint, bool dependent,
                                 cudaStream_t stream) const {
  XD_CHECK(loads_ == nullptr);  // of bulk groups, which have no room for ids
  Tensor slots = topk_idx;
  slots.type = DType::i32;
  slots.data = reinterpret_cast<std::byte*>(ids_);
  const ToSlotsParams params{.table = device(),
                             .ids = BatchIds::of(config_, topk_idx, replica_hint),
                             .choices = topk_idx.rows * topk_idx.cols,
                             .topk = topk_idx.cols,
                             .bad = config_.experts,
                             .rank = rank_,
                             .collapse = config_.collapse,
                             .out = ids_};
  if (params.choices == 0) return slots;
  const LaunchShape shape{.blocks = blocks_for(params.choices),
                          .first_blocks = 0,
                          .threads = kThreads,
                          .shared_bytes = 0};
  launch_dependent(to_slots_kernel, params, shape, dependent, stream);
  return slots;
}

void DeviceSlotTable::tell_loads(const Tensor& out, bool clear, cudaStream_t stream) const {
  const bool by_rank = out.rows * out.cols > config_.logical_experts;
  const TellLoadsParams params{.loads = loads_,
                               .summands = by_rank ? 1 : config_.ranks,
                               .size = static_cast<int>(out.rows * out.cols),
                               .out = out.as<std::int64_t>(),
                               .clear = clear};
  launch_plain(tell_loads_kernel, blocks_for(params.size), kThreads, stream, params);
}

void load_slot_table() { load_plain(to_slots_kernel, tell_loads_kernel); }

}  // namespace xd::ep::cuda
