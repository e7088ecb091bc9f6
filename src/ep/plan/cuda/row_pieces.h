// The way an operation's rows are cut into pieces that pass through shared memory
// (ep/bulk/cuda/mover.cuh). It is a pure function, tested without a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ep/plan/quantise.h"

namespace xd::ep::cuda {

inline constexpr int kStages = 2;

// The pieces of an operation's rows, and the layout of a warp's part of shared memory.
struct RowPieces {
  std::uint32_t row_bytes;    // bytes of a source row
  std::uint32_t piece_bytes;  // bytes of a stage; a row's last piece may be shorter
  std::uint32_t pieces;
  std::uint32_t scales_bytes;  // quantising: room for a piece's scales; else 0
  QuantiseFormat format;       // format of quantised rows
  std::uint32_t beside_bytes;  // bytes of a second row that goes with the first piece; 0 = none
  std::uint32_t warp_bytes;    // shared memory per warp, barriers included

  // Where warps also compute, as they quantise or scale rows, pieces are smaller, so that more
  // warps share the arithmetic. Pieces that are quantised hold whole blocks of columns.
  static constexpr std::uint32_t kMostPieceBytes = 16384, kMostComputedBytes = 8192, kAlign = 256;

  // `beside_bytes`: bytes of a row of scales, if a stage can hold it (else its sender moves it).
  // `scaled`: the receiver multiplies rows by their weights.
  static constexpr RowPieces make(std::uint64_t row_bytes, const QuantiseFormat& format = {},
                                  std::uint64_t beside_bytes = 0, bool scaled = false) {
    RowPieces row{};
    const bool quantise = static_cast<bool>(format);
    const std::uint32_t most = quantise || scaled ? kMostComputedBytes : kMostPieceBytes;
    row.row_bytes = static_cast<std::uint32_t>(row_bytes);
    const bool carried = beside_bytes <= kMostPieceBytes && !quantise;
    row.beside_bytes = carried ? static_cast<std::uint32_t>(beside_bytes) : 0;
    row.pieces = static_cast<std::uint32_t>((row_bytes + most - 1) / most);
    if (row.pieces == 0) row.pieces = 1;
    const std::uint64_t even = (row_bytes + row.pieces - 1) / row.pieces;
    row.piece_bytes = static_cast<std::uint32_t>((even + kAlign - 1) / kAlign * kAlign);
    if (quantise) {
      row.format = format;
      const auto scales = static_cast<std::uint32_t>(format.scale_row_bytes(row.piece_bytes / 2));
      row.scales_bytes = (scales + 15) / 16 * 16;
    }
    const std::uint32_t stage =
        row.piece_bytes + (row.scales_bytes + row.beside_bytes + 127) / 128 * 128;
    row.warp_bytes = kStages * stage + 128;
    return row;
  }
};

// The rows that are added up pass through shared memory as well (TermRing in
// ep/plan/cuda/sums.cuh): a warp has pieces of some of a sum's terms on their way, each of a few
// vectors of 16 bytes a lane.
struct TermPieces {
  static constexpr int kAhead = 5;
  static constexpr int kVectors = 4;
  static constexpr std::uint32_t kColumns = 32 * kVectors;         // vectors of a piece
  static constexpr std::uint32_t kBytes = kAhead * kColumns * 16;  // of a warp
};

// The rows of one sum, in order, in shared memory of the warp; or a gradient, and the rows with
// which its dot products are taken.
struct WarpTerms {
  static constexpr int kMostRows = 32, kMost = kMostRows + 1;
  const std::byte* row[kMost];
  float weight[kMost];
};

// Shared memory of a warp that scales a token's rows (ep/bulk/cuda/scaler.cuh).
struct ScalerShared {
  alignas(128) std::byte ring[TermPieces::kBytes];
  float dot[WarpTerms::kMostRows][32];  // of each row, what each lane has added up so far
  WarpTerms terms;
};

// The shared memory of each warp of a dispatch or combine_bwd, which first sends and then receives.
constexpr std::uint32_t dispatch_warp_bytes(const RowPieces& send, const RowPieces& fan_out,
                                            bool scaled) {
  const std::uint32_t moving =
      send.warp_bytes > fan_out.warp_bytes ? send.warp_bytes : fan_out.warp_bytes;
  const auto scaling = static_cast<std::uint32_t>(scaled ? sizeof(ScalerShared) : 0);
  return moving > scaling ? moving : scaling;
}

}  // namespace xd::ep::cuda
