// combine_bwd of a weighted combine, at the owner of the rows: a row becomes its token's gradient
// times the row's weight, and the weight's gradient is the dot product of the token's gradient and
// the row of expert_out.
//
//   memory                written by                   read by
//   tokens (gradients)    the caller                   the warps that have this rank's own tokens
//   own receive rows,     peers' senders, before the   the warp that has the token: the gradient
//   or staging memory     chunk's flag                 lies in the place of the token's first row
//   expert_out, weights   the caller                   the warp that has the token
//   own receive rows,     the warp that has the        the caller
//   grad_weights          token
//
// A gradient is read once for all rows of its token. They go through the ring of the sums: of some
// columns first the gradient's vectors, then those of each row of expert_out. A lane has taken a
// column's vector of the gradient before it stores any row's there, and no lane touches another
// lane's columns, so the first row may be the gradient's own place.
#pragma once

#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/walk.cuh"
#include "ep/plan/cuda/sums.cuh"

namespace xd::ep::cuda {

template <class T>
class Scaler {
 public:
  // `shared`: that of the warp. All lanes call it.
  __device__ Scaler(const DispatchParams& params, Turn& turn, const PlanParts& plan,
                    ScalerShared& shared)
      : p_(params),
        turn_(turn),
        plan_(plan),
        s_(shared),
        row_bytes_(params.recv_tokens.row_bytes),
        vectors_(static_cast<std::uint32_t>(params.recv_tokens.row_bytes / 16)) {}

  // Returns false after a fatal error. This rank's own tokens come first; meanwhile those of peers
  // are on their way.
  __device__ bool scale_all() {
    const int own = turn_.rank(), others = turn_.ranks() - 1;
    const int own_units = units_of(own);
    int most = 0;
#pragma unroll 1
    for (int i = 1; i <= others; ++i) most = max(most, units_of((own + i) % (others + 1)));
    return for_each_unit(turn_, 1, blocks_behind(p_.send_blocks), own_units + most * others, false,
                         [&](int unit) {
                           if (unit < own_units) return scale_unit(own, unit);
                           const int i = unit - own_units;
                           return scale_unit((own + 1 + i % others) % (others + 1), i / others);
                         });
  }

 private:
  static constexpr int kVectors = TermPieces::kVectors;
  // A unit has so few tokens of a chunk that all warps end at about the same time.
  static constexpr int kMostTokens = 2;

  using Values = float[kVectors][T::kPerVector];

  __device__ int tokens_of(int source) const {
    return min(max(plan_.tokens[source], 0), turn_.group().max_tokens);
  }
  __device__ ChunkFlags chunks() const { return sent_chunks(turn_.selects()); }
  __device__ int units_per_chunk(int tokens) const {
    return (chunks().tokens_per_chunk(tokens) + kMostTokens - 1) / kMostTokens;
  }
  __device__ int units_of(int source) const {
    const int tokens = tokens_of(source);
    return chunks().count(tokens) * units_per_chunk(tokens);
  }

  __device__ bool scale_unit(int source, int unit) {
    const int all = tokens_of(source);
    const int each = chunks().tokens_per_chunk(all), units = units_per_chunk(all);
    const int chunk = unit / units, begin = unit % units * kMostTokens;
    const int token = chunk * each + begin;
    const int tokens = min(min(kMostTokens, each - begin), all - token);
    if (tokens <= 0) return true;
    const ItemRange items = items_of(turn_, plan_, source, token, tokens);
    const unsigned due = due_items(turn_, plan_, items, false);
    if (due == 0) return true;
    const bool own = source == turn_.rank();
    if (!own && !await_chunk(turn_, source, chunk)) return false;
    for_each_item(turn_, plan_, items, due, [&](const ItemRows& rows, std::uint32_t cell) {
      if (rows.count == 0) return;
      const std::byte* gradient = own ? own_gradient(cell) : arrived_gradient(rows);
      if (gradient == nullptr) return;
      if (p_.expert_out != nullptr) {
        scale<true>(gradient, rows);
      } else {
        scale<false>(gradient, rows);
      }
    });
    return true;
  }

  __device__ const std::byte* arrived_gradient(const ItemRows& rows) const {
    return p_.recv_tokens.arrived(__shfl_sync(kAllLanes, rows.row, 0));
  }
  // The gradient of the token that has this cell; nullptr in damaged plans.
  __device__ const std::byte* own_gradient(std::uint32_t cell) const {
    const auto per_token =
        static_cast<std::uint32_t>(turn_.group().cells_per_token(turn_.plan().topk));
    const std::uint32_t token = cell / per_token;
    if (token >= static_cast<std::uint32_t>(turn_.plan().tokens)) return nullptr;
    return p_.tokens + token * row_bytes_;
  }

  // Finishes the rows of one token. `kDots`: with the gradients of their weights.
  template <bool kDots>
  __device__ void scale(const std::byte* gradient, const ItemRows& rows) {
    set_terms<kDots>(gradient, rows);
    TermRing coming(s_.ring, s_.terms, kDots ? rows.count + 1 : 1, 0, vectors_);
#pragma unroll 1
    for (std::uint32_t first = 0; first < vectors_; first += TermPieces::kColumns) {
      const std::uint32_t v = first + lane_id();
      uint4 taken[kVectors];
      Values x;
      coming.take(taken);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) T::unpack(taken[j], x[j]);
#pragma unroll 1
      for (int r = 0; r < rows.count; ++r) {
        if constexpr (kDots) {
          coming.take(taken);
          float& dot = s_.dot[r][lane_id()];
          dot = add_products(first == 0 ? 0.0f : dot, taken, x, v);
        }
        const std::uint32_t row = __shfl_sync(kAllLanes, rows.row, r);
        store_scaled(p_.recv_tokens.data + row * row_bytes_, s_.terms.weight[r], x, v);
      }
    }
    if constexpr (kDots) store_dots(rows);
  }

  // The gradient is the first term. Row i has weight i.
  template <bool kDots>
  __device__ void set_terms(const std::byte* gradient, const ItemRows& rows) {
    __syncwarp();  // the last token's terms have been read
    const int i = lane_id();
    if (i == 0) s_.terms.row[0] = gradient;
    if (i < rows.count) {
      if constexpr (kDots) s_.terms.row[i + 1] = p_.expert_out + rows.row * row_bytes_;
      s_.terms.weight[i] = p_.weights[rows.row];
    }
    __syncwarp();
  }

  // dot + the products of vectors v, v + 32, ... of a row and the gradient, by ascending column.
  __device__ float add_products(float dot, const uint4 (&row)[kVectors], const Values& x,
                                std::uint32_t v) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (v + j * 32 >= vectors_) continue;
      float y[T::kPerVector];
      T::unpack(row[j], y);
#pragma unroll
      for (int n = 0; n < T::kPerVector; ++n) dot = __fadd_rn(dot, __fmul_rn(y[n], x[j][n]));
    }
    return dot;
  }

  __device__ void store_scaled(std::byte* row, float weight, const Values& x,
                               std::uint32_t v) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float scaled[T::kPerVector];
#pragma unroll
      for (int n = 0; n < T::kPerVector; ++n) scaled[n] = __fmul_rn(weight, x[j][n]);
      if (v + j * 32 < vectors_) {
        ptx::st_streaming(row + std::uint64_t{v + j * 32} * 16, pack<T>(scaled));
      }
    }
  }

  // Adds the lanes' sums pairwise.
  __device__ void store_dots(const ItemRows& rows) const {
#pragma unroll 1
    for (int r = 0; r < rows.count; ++r) {
      const float dot = warp_sum(s_.dot[r][lane_id()]);
      if (lane_id() != r) continue;
      p_.grad_weights[rows.row] = dot == dot ? dot : __uint_as_float(0x7FC00000u);
    }
  }

  const DispatchParams& p_;
  Turn& turn_;
  const PlanParts& plan_;
  ScalerShared& s_;
  const std::uint64_t row_bytes_;
  const std::uint32_t vectors_;
};

}  // namespace xd::ep::cuda
