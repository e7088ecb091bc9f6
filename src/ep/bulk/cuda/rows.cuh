// Copies and fills of rows of any size, by a warp, for scales, weights, indices and zeros. Token
// rows go through the mover or the sums.
#pragma once

#include "ep/bulk/cuda/walk.cuh"

namespace xd::ep::cuda {

__device__ inline bool aligned(const void* a, const void* b, std::uint64_t bytes,
                               std::uint64_t alignment) {
  return (reinterpret_cast<std::uint64_t>(a) | reinterpret_cast<std::uint64_t>(b) | bytes) %
             alignment ==
         0;
}

// All lanes call it, with any address and size. It may read memory that peers have written (never
// ld.nc).
__device__ inline void copy_bytes(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  if (aligned(to, from, bytes, 16)) {
    for (std::uint64_t i = lane_id() * 16; i < bytes; i += 512) {
      ptx::st_streaming(to + i, ptx::ld_streaming(from + i));
    }
  } else if (aligned(to, from, bytes, 4)) {
    for (std::uint64_t i = lane_id() * 4; i < bytes; i += 128) {
      *reinterpret_cast<std::uint32_t*>(to + i) =
          *reinterpret_cast<const volatile std::uint32_t*>(from + i);
    }
  } else {
    for (std::uint64_t i = lane_id(); i < bytes; i += 32) {
      *reinterpret_cast<unsigned char*>(to + i) =
          *reinterpret_cast<const volatile unsigned char*>(from + i);
    }
  }
}

// Fills [to, to + bytes) with a byte value; all warps of the launch share the work. `to` may have
// any alignment.
__device__ inline void fill_bytes(std::byte* to, std::uint64_t bytes, unsigned char value,
                                  std::uint64_t warp, std::uint64_t warps) {
  const std::uint32_t word = value * 0x01010101u;
  const std::uint64_t head = min((16 - reinterpret_cast<std::uint64_t>(to) % 16) % 16, bytes);
  const std::uint64_t body = (bytes - head) / 16 * 16;
#pragma unroll 1
  for (std::uint64_t i = (warp * 32 + lane_id()) * 16; i < body; i += warps * 512) {
    ptx::st_streaming(to + head + i, make_uint4(word, word, word, word));
  }
  if (warp != 0) return;
#pragma unroll 1
  for (std::uint64_t i = lane_id(); i < head; i += 32) to[i] = std::byte{value};
#pragma unroll 1
  for (std::uint64_t i = head + body + lane_id(); i < bytes; i += 32) to[i] = std::byte{value};
}

__device__ inline bool pads_zones(const Turn& turn) {
  const GroupDevice& g = turn.group();
  return g.layout.has_zones && turn.plan().alignment > 1 && g.local_experts > 0;
}

// True if zero_gaps() may have something to do.
__device__ inline bool has_gaps(const Turn& turn) {
  return pads_zones(turn) || turn.group().zero_tail;
}

// The local experts whose zones are in the call's scope: [first, end).
struct ScopeExperts {
  int first, end;
};
__device__ inline ScopeExperts experts_of(const Turn& turn) {
  const int local = turn.group().local_experts;
  if (!turn.selects()) return {0, turn.scope().empty ? 0 : local};
  const int parts = turn.part().parts;
  return {turn.scope().first_expert(parts, local), turn.scope().end_expert(parts, local)};
}

// Rows in the call's scope that hold no token's row and must read as zero: padding of zones, and
// the tail if the group zeroes it. No peer touches these rows. All warps of the launch call it.
__device__ inline void zero_gaps(const Turn& turn, const PlanParts& plan,
                                 const ReceiveRows& tensor) {
  if (tensor.data == nullptr) return;
  const GroupDevice& g = turn.group();
  const std::uint64_t warps = std::uint64_t{gridDim.x} * warps_per_block();
  const std::uint64_t warp = std::uint64_t{blockIdx.x} * warps_per_block() + warp_in_block();
  const ScopeExperts zones = experts_of(turn);
  if (pads_zones(turn) && zones.first < zones.end) {
    // With few experts gaps are long, and several warps share one; with many they are short, and a
    // warp takes several.
    const auto experts = static_cast<std::uint64_t>(zones.end - zones.first);
    const std::uint64_t parts = max(warps / experts, std::uint64_t{1});
#pragma unroll 1
    for (std::uint64_t i = warp; i < experts * parts; i += warps) {
      const std::uint64_t e = zones.first + i / parts;
      const std::int64_t end = std::int64_t{plan.offset[e]} + plan.count[e];
      const std::int64_t gap = plan.offset[e + 1] - end;
      if (gap > 0) {
        fill_bytes(tensor.data + end * tensor.row_bytes, gap * tensor.row_bytes, 0, i % parts,
                   parts);
      }
    }
  }
  const std::int64_t rows = turn.plan().recv_rows;
  if (g.zero_tail && turn.scope().tail && tensor.rows > rows) {
    fill_bytes(tensor.data + rows * tensor.row_bytes, (tensor.rows - rows) * tensor.row_bytes, 0,
               warp, warps);
  }
}

// Sets all bytes past the last row to `value`. All warps of the launch call it.
__device__ inline void fill_tail(const Turn& turn, const ReceiveRows& tensor, unsigned char value) {
  if (tensor.data == nullptr) return;
  const std::int64_t rows = turn.plan().recv_rows;
  if (tensor.rows <= rows) return;
  fill_bytes(tensor.data + rows * tensor.row_bytes, (tensor.rows - rows) * tensor.row_bytes, value,
             std::uint64_t{blockIdx.x} * warps_per_block() + warp_in_block(),
             std::uint64_t{gridDim.x} * warps_per_block());
}

}  // namespace xd::ep::cuda
