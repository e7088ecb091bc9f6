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
#pragma once

#include "ep/bulk/cuda/mover.cuh"
#include "ep/bulk/cuda/rows.cuh"

namespace xd::ep::cuda {

class LateCopier {
 public:
  __device__ LateCopier(const LateCopy& copy, const Turn& turn)
      : c_(copy),
        received_(min(static_cast<std::int64_t>(turn.plan().recv_rows), copy.rows)),
        warp_(std::int64_t{blockIdx.x} * warps_per_block() + warp_in_block()),
        warps_(std::int64_t{gridDim.x} * warps_per_block()) {}

  // All warps of the launch call it.
  __device__ void copy_all() const {
    const auto columns = static_cast<std::int64_t>(c_.row_bytes / c_.element);
    if (c_.col_stride == c_.element && c_.row_stride == static_cast<std::int64_t>(c_.row_bytes)) {
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
    const std::int64_t bytes = received_ * static_cast<std::int64_t>(c_.row_bytes);
#pragma unroll 1
    for (std::int64_t at = warp_ * kPiece; at < bytes; at += warps_ * kPiece) {
      copy_bytes(c_.to + at, c_.from + at, static_cast<std::uint64_t>(min(kPiece, bytes - at)));
    }
    if (c_.tail == LateCopy::left) return;
    const auto rest = static_cast<std::uint64_t>(c_.rows - received_) * c_.row_bytes;
    fill_bytes(c_.to + bytes, rest, c_.tail == LateCopy::ones ? 0xFF : 0,
               static_cast<std::uint64_t>(warp_), static_cast<std::uint64_t>(warps_));
  }

  template <class Element>
  __device__ void copy_strided(std::int64_t columns) const {
    const std::int64_t end = c_.tail == LateCopy::left ? received_ : c_.rows;
#pragma unroll 1
    for (std::int64_t first = warp_ * kTile; first < end; first += warps_ * kTile) {
      const std::int64_t row = first + lane_id();
      if (row < received_) {
        copy_row<Element>(row, columns);
      } else if (row < end) {
        const auto value = static_cast<Element>(c_.tail == LateCopy::ones ? ~std::uint64_t{0} : 0);
#pragma unroll 1
        for (std::int64_t c = 0; c < columns; ++c) *element_at<Element>(row, c) = value;
      }
    }
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
  const std::int64_t received_, warp_, warps_;
};

}  // namespace xd::ep::cuda
