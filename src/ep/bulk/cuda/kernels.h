// The kernels of the CUDA executor as the host starts them: their parameters and their launches.
#pragma once

#include <cuda_runtime_api.h>

#include "base/dtype.h"
#include "ep/bulk/cuda/params.h"
#include "ep/plan/cuda/launch_shape.h"
#include "ep/plan/cuda/row_pieces.h"

namespace xd::ep::cuda {

// The parameters of a turn that moves no rows: of a call that failed on the host, or of a change.
struct BareParams {
  TurnParams turn;
  SlotTableChange change;
};

struct PrepareParams {
  TurnParams turn;
  BatchIds ids;
  int tokens, topk, alignment, parts;
  std::byte* plan;
  PlanMap map;  // computed by the host: kernels have no registers to keep it in
  struct Output {
    void* data;  // nullptr = not given
    bool wide;   // int64
  };
  Output counts, padded_counts, offsets, total, rank_rows;
  std::uint32_t* scratch;  // PrepareScratch
  ExpertMap experts;       // with tables in device memory
};

// The parameters of dispatch, and of combine_bwd, which sends gradients in the same way.
struct DispatchParams {
  TurnParams turn;
  RowPieces send, fan_out;
  int send_blocks;       // blocks that begin with sending; the others begin with receiving
  bool own_rows_direct;  // this rank's own rows go to all their places at once, unless scaled
  bool indices;          // receive tensors have recv_topk_idx
  bool weighs;           // tokens have topk_weights, on this rank or on others
  bool receives;         // rows are fanned out, copied out of staging or scaled here
  const std::byte* tokens;
  StridedRows scales;            // beside tokens; also none where they are made on the way
  const float* topk_weights;     // nullptr = none, or this rank has no tokens
  unsigned scale_alignment = 1;  // alignment of all ranks' recv_scales
  ReceiveRows recv_tokens, recv_scales, recv_weights, recv_topk_idx;
  int num_late;  // how many of these first come together in staging memory
  LateCopy late[3];
  // combine_bwd of a weighted combine, whose rows are scaled where they are received:
  const std::byte* expert_out;  // nullptr = no grad_weights
  const float* weights;
  float* grad_weights;
  std::int64_t grad_weights_rows;
};

// The parameters of combine, and of dispatch_bwd.
struct CombineParams {
  TurnParams turn;
  int push_blocks;        // blocks that begin with partial sums for peers
  bool pushes;            // peers cannot read this rank's rows themselves
  bool sums;              // token rows are summed; else only weights move
  const std::byte* rows;  // [R,H] of this rank
  const float* weights;   // [R]
  std::byte* out;         // [T,H]
  std::uint64_t row_bytes;
  std::uint64_t partial_bytes;  // bytes of all cells of a rank
  // dispatch_bwd:
  ReceiveRows grad_recv_weights;
  bool gradients;            // of topk_weights, on this rank or on others
  float* grad_topk_weights;  // nullptr = none, or this rank has no tokens
  // By rank, in device memory, where sums are made by host; else nullptr.
  const std::uint32_t* host_keys;
};

// The form of partial sums in cells where the wire is not SAME.
enum class CellForm : std::uint8_t {
  payload,  // FLOAT32 of single rows of the payload type, which lose nothing as they are
  floats,   // FLOAT32
  codes     // FP8_*: codes, then a float32 for each scale
};

struct WireCombineParams : CombineParams {
  CellForm form;
  QuantiseFormat codes;
  std::uint64_t cell_bytes;
};

// The words of working memory that prepare needs, for any launch of up to kMaxBlocks blocks.
struct PrepareScratch {
  static constexpr int kMaxBlocks = 64;
  static_assert(kMaxBlocks < turn::kLeastMark);

  std::uint64_t block_counts, block_survivors, kept, words;

  static constexpr PrepareScratch make(int experts, int ranks) {
    // Each block has its counters, and bad ids.
    const std::uint64_t table = kMaxBlocks * (counter_columns(experts, ranks) + 1);
    const auto all = static_cast<std::uint64_t>(experts);
    PrepareScratch s{};
    s.block_counts = 0;
    s.block_survivors = table;
    s.kept = 2 * table;
    s.words = s.kept + all;
    return s;
  }
};

// Each starts a cooperative launch on `stream`; nothing waits. `remote`: some ranks are on other
// machines, as GroupState says.
void launch(const BareParams& params, bool remote, cudaStream_t stream);
void launch(const PrepareParams& params, bool remote, const LaunchShape& shape,
            cudaStream_t stream);
void launch(const DispatchParams& params, DType scaled_type, bool remote, const LaunchShape& shape,
            cudaStream_t stream);
void launch(const CombineParams& params, DType type, bool remote, const LaunchShape& shape,
            cudaStream_t stream);

void launch(const WireCombineParams& params, DType type, const LaunchShape& shape,
            cudaStream_t stream);

// Loads every kernel on the current device and sets its attributes; throws if one cannot run here.
// A kernel that is loaded when it is first launched would wait for kernels that spin. `remote`:
// those of groups over several machines; `wires`: of groups whose combine may have some.
void load_kernels(const LaunchLimits& device, bool remote, bool wires);

}  // namespace xd::ep::cuda
