// Late copies: tensors whose rows come together in staging memory, and are copied to their places
// when all rows are there, by whole tiles.
//
//   memory           written by                         read by
//   staging memory   peers, and own receivers, until    all warps, after the done flags and a
//                    the done flags                     barrier of the grid
//   caller's tensor  all warps, each its tiles          the caller
//
// Scales of any strides are copied late: across the link they go as packed rows, and here the copy
// gives them their strides. So are RANK_MAJOR's weights and indices where rows need no copy, so
// that no chunk is waited for on their account.
//
// In a call with a part staging memory has only the rows that the call has brought, so these alone
// are copied, item by item, and the gaps of the part's zones.
#pragma once

#include "ep/bulk/cuda/mover.cuh"
#include "ep/bulk/cuda/rows.cuh"

namespace xd::ep::cuda {

class LateCopier {
 public:
  __device__ LateCopier(const LateCopy& copy, const Turn& turn, const PlanParts& plan)
      : c_(copy),
        turn_(turn),
        plan_(plan),
        received_(min(static_cast<std::int64_t>(turn.plan().recv_rows), copy.rows)),
        begin_(turn.scope().empty ? received_ : 0),
        tail_(turn.scope().tail ? copy.tail : LateCopy::left),
        warp_(std::int64_t{blockIdx.x} * warps_per_block() + warp_in_block()),
        warps_(std::int64_t{gridDim.x} * warps_per_block()) {}

  // All warps of the launch call it.
  __device__ void copy_all() const {
    const auto columns = static_cast<std::int64_t>(c_.row_bytes / c_.element);
    if (c_.col_stride == c_.element && c_.row_stride == static_cast<std::int64_t>(c_.row_bytes) &&
        !turn_.selects()) {
      copy_packed();
    } else if (c_.element == 4) {
      copy_strided<std::uint32_t>(columns);
    } else if (c_.element == 1) {
      copy_strided<std::uint8_t>(columns);
    } else if (c_.element == 2) {
      copy_strided<std::uint16_t>(columns);
    } else {
      copy_strided<std::uint64_t>(columns);
    }
  }

 private:
  static constexpr std::int64_t kTile = 32;  // rows: one for each lane

  __device__ void copy_packed() const {
    constexpr std::int64_t kPiece = 4096;
    const auto row_bytes = static_cast<std::int64_t>(c_.row_bytes);
    const std::int64_t bytes = received_ * row_bytes;
#pragma unroll 1
    for (std::int64_t at = begin_ * row_bytes + warp_ * kPiece; at < bytes; at += warps_ * kPiece) {
      copy_bytes(c_.to + at, c_.from + at, static_cast<std::uint64_t>(min(kPiece, bytes - at)));
    }
    if (tail_ == LateCopy::left) return;
    const auto rest = static_cast<std::uint64_t>(c_.rows - received_) * c_.row_bytes;
    fill_bytes(c_.to + bytes, rest, tail_ == LateCopy::ones ? 0xFF : 0,
               static_cast<std::uint64_t>(warp_), static_cast<std::uint64_t>(warps_));
  }

  template <class Element>
  __device__ void copy_strided(std::int64_t columns) const {
    std::int64_t begin = begin_;
    if (turn_.selects()) {
      copy_items<Element>(columns);
      fill_gaps<Element>(columns);
      begin = received_;
    }
    const std::int64_t end = tail_ == LateCopy::left ? received_ : c_.rows;
#pragma unroll 1
    for (std::int64_t first = begin + warp_ * kTile; first < end; first += warps_ * kTile) {
      const std::int64_t row = first + lane_id();
      if (row < received_) {
        copy_row<Element>(row, columns);
      } else if (row < end) {
        fill_row<Element>(row, columns);
      }
    }
  }

  // Copies the rows of the items that the call has brought; a lane takes an item.
  template <class Element>
  __device__ void copy_items(std::int64_t columns) const {
    const auto capacity = static_cast<std::uint32_t>(turn_.group().capacity);
    const int items = min(plan_.item_begin[turn_.ranks()], static_cast<int>(capacity));
    const PartRows& part = turn_.peer(turn_.rank()).part;
#pragma unroll 1
    for (std::int64_t i = warp_ * kTile + lane_id(); i < items; i += warps_ * kTile) {
      const std::uint32_t first = min(plan_.start[i], capacity);
      const std::uint32_t last = min(plan_.start[i + 1], capacity);
      bool here = false, earlier = false;
#pragma unroll 1
      for (std::uint32_t r = first; r < last; ++r) {
        here |= part.has(plan_.list[r]);
        earlier |= part.is_earlier(plan_.list[r]);
      }
      if (!is_due(1, here, earlier)) continue;
#pragma unroll 1
      for (std::uint32_t r = first; r < last; ++r) {
        if (plan_.list[r] < received_) copy_row<Element>(plan_.list[r], columns);
      }
    }
  }

  // The gaps of the zones in the call's scope; a warp takes an expert's.
  template <class Element>
  __device__ void fill_gaps(std::int64_t columns) const {
    if (!pads_zones(turn_)) return;
    const ScopeExperts zones = experts_of(turn_);
#pragma unroll 1
    for (std::int64_t e = zones.first + warp_; e < zones.end; e += warps_) {
      const std::int64_t end = min(std::int64_t{plan_.offset[e + 1]}, received_);
#pragma unroll 1
      for (std::int64_t row = std::int64_t{plan_.offset[e]} + plan_.count[e] + lane_id(); row < end;
           row += 32) {
        zero_row<Element>(row, columns);
      }
    }
  }

  template <class Element>
  __device__ void zero_row(std::int64_t row, std::int64_t columns) const {
#pragma unroll 1
    for (std::int64_t c = 0; c < columns; ++c) *element_at<Element>(row, c) = 0;
  }
  // A row of the tail.
  template <class Element>
  __device__ void fill_row(std::int64_t row, std::int64_t columns) const {
    const auto value = static_cast<Element>(tail_ == LateCopy::ones ? ~std::uint64_t{0} : 0);
#pragma unroll 1
    for (std::int64_t c = 0; c < columns; ++c) *element_at<Element>(row, c) = value;
  }

  template <class Element>
  __device__ Element* element_at(std::int64_t row, std::int64_t column) const {
    return reinterpret_cast<Element*>(c_.to + row * c_.row_stride + column * c_.col_stride);
  }

  // Copies one row, by one lane. Stores that the lanes of a warp make at the same time are
  // neighbours where rows are neighbours.
  template <class Element>
  __device__ void copy_row(std::int64_t row, std::int64_t columns) const {
    constexpr int kOfVector = 16 / sizeof(Element);
    const std::byte* from = c_.from + row * static_cast<std::int64_t>(c_.row_bytes);
    const std::int64_t vectors = c_.row_bytes % 16 == 0 ? columns / kOfVector : 0;
#pragma unroll 4
    for (std::int64_t v = 0; v < vectors; ++v) {
      const uint4 x = ptx::ld_streaming(from + v * 16);
      Element parts[kOfVector];
      memcpy(parts, &x, sizeof(x));
#pragma unroll
      for (int i = 0; i < kOfVector; ++i) *element_at<Element>(row, v * kOfVector + i) = parts[i];
    }
#pragma unroll 1
    for (std::int64_t c = vectors * kOfVector; c < columns; ++c) {
      *element_at<Element>(row, c) = reinterpret_cast<const volatile Element*>(from)[c];
    }
  }

  const LateCopy& c_;
  const Turn& turn_;
  const PlanParts& plan_;
  const std::int64_t received_, begin_;
  const LateCopy::Tail tail_;
  const std::int64_t warp_, warps_;
};

}  // namespace xd::ep::cuda
