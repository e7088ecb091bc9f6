// The end of a dispatch whose rows lie without gaps: all groups fill what lies behind the rows,
// each a part of it, when their own rows are delivered.
//
//   memory                          content                   filled by
//   recv_tokens, in padding         0                         movers
//   recv_scales, recv_weights, ..   0                         tail warps
//   recv_topk_idx, recv_weights,    -1 and 0                  tail warps
//   past the last row of all
//     (where a row stands for all experts of its token)
#pragma once

#include "ep/slots/cuda/dispatch/list.cuh"

namespace xd::ep::cuda {

template <bool kMany>
class LlFiller {
 public:
  // `group`: of this block; `thread`: of the group's movers, or a lane of its tail warp.
  __device__ LlFiller(const LlDispatchParams& params, const LlList<kMany, true>& list, int group,
                      int thread)
      : p_(params),
        list_(list),
        part_(list.taker() + group * list.takers()),
        parts_(kLlGroups * list.takers()),
        thread_(thread) {}

  // All threads of a group.
  __device__ void fill(bool moves) const {
    // The block that writes the plan's head may take no rows, and fills none.
    if (part_ >= parts_) return;
    if (!list_.by_rank()) return fill_padding(moves);
    if (!moves) fill_choices();
  }

 private:
  __device__ void fill_padding(bool moves) const;
  __device__ void zero_row(int row) const;
  __device__ void zero_beside(int row) const;
  __device__ void fill_choices() const;

  const LlDispatchParams& p_;
  const LlList<kMany, true>& list_;
  const int part_, parts_, thread_;
};

// Rows are dealt out one by one: a zone may have many, and its neighbour none.
template <bool kMany>
__device__ inline void LlFiller<kMany>::fill_padding(bool moves) const {
  if (p_.rows.alignment == 1) return;
#pragma unroll 1
  for (int base = 0; base < list_.num_zones(); base += 32) {
    const int z = base + lane_id();
    int first = 0, end = 0;
    if (z < list_.num_zones()) {
      first = max(list_.zone(z) + list_.rows_in_zone(z), 0);
      end = min(list_.zone(z + 1), p_.rows.rows);
    }
    unsigned left = __ballot_sync(kAllLanes, first < end);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int end_of = __shfl_sync(kAllLanes, end, lane);
      // Each zone begins with another group.
      int row = __shfl_sync(kAllLanes, first, lane) + (part_ + (base + lane) * 13) % parts_;
#pragma unroll 1
      for (; row < end_of; row += parts_) {
        if (moves) {
          zero_row(row);
        } else {
          zero_beside(row);
        }
      }
    }
  }
}

template <bool kMany>
__device__ inline void LlFiller<kMany>::zero_row(int row) const {
  std::byte* const at = p_.recv_tokens.row(0, row);
#pragma unroll 1
  for (std::uint32_t v = thread_; v < p_.recv_row_bytes / 16; v += kLlGroupThreads) {
    ptx::st_streaming_pair(at + v * 16, make_ulonglong2(0, 0));
  }
}

template <bool kMany>
__device__ inline void LlFiller<kMany>::zero_beside(int row) const {
  std::byte* const at = p_.recv_scales.row(0, row);
#pragma unroll 1
  for (std::uint32_t c = thread_; c < p_.scale_columns; c += 32) {
    std::byte* const element = at + c * p_.recv_scales.col_stride;
    if (p_.scale_element == 4) {
      *reinterpret_cast<std::uint32_t*>(element) = 0;
    } else {
      *element = std::byte{0};
    }
  }
  if (thread_ == 0 && p_.rows.recv_weights != nullptr) p_.rows.recv_weights[row] = 0.0f;
}

template <bool kMany>
__device__ inline void LlFiller<kMany>::fill_choices() const {
  const std::int64_t topk = p_.rows.topk, end = p_.rows.rows * topk;
  std::int64_t i = list_.zone(list_.num_zones()) * topk + part_ * 32 + thread_;
#pragma unroll 1
  for (; i < end; i += parts_ * 32) {
    if (p_.rows.recv_weights != nullptr) p_.rows.recv_weights[i] = 0.0f;
    if (p_.rows.recv_topk_idx == nullptr) continue;
    if (p_.rows.wide_topk) {
      static_cast<std::int64_t*>(p_.rows.recv_topk_idx)[i] = -1;
    } else {
      static_cast<std::int32_t*>(p_.rows.recv_topk_idx)[i] = -1;
    }
  }
}

// It is rare, or small, and no part of the code that moves rows: it would take registers of that.
template <bool kMany>
__device__ __noinline__ void ll_fill_behind(const LlDispatchParams& p, LlShared& shared,
                                            LlListShared& of_list, bool moves) {
  LlDispatchTurn turn(p, shared, kLlDispatch);
  const LlList<kMany, true> list(p, turn, of_list, {p.smem, ptx::dynamic_shared()});
  const int group = moves ? warp_in_block() / kLlGroupWarps : warp_in_block() - kLlMovers / 32;
  const int thread = moves ? static_cast<int>(threadIdx.x) - group * kLlGroupThreads : lane_id();
  LlFiller<kMany>(p, list, group, thread).fill(moves);
}

}  // namespace xd::ep::cuda
