// The launches of low latency: numbers of thread blocks, their roles, and the layout of their
// shared memory. Pure functions, tested without a device.
#pragma once

#include <cstdint>
#include <vector>

#include "base/math.h"
#include "ep/plan/cuda/launch_shape.h"
#include "ep/slots/cuda/map.h"
#include "ep/slots/cuda/params.h"

namespace xd::ep::cuda {

// A block of dispatch: two groups of warps that move rows, each with a tail warp, and two warps for
// all else. More and thinner threads would all execute what each warp does once for a row.
inline constexpr int kLlGroups = 2, kLlGroupThreads = 224;
inline constexpr int kLlDispatchMovers = kLlGroups * kLlGroupThreads;
inline constexpr int kLlDispatchThreads = kLlDispatchMovers + 4 * 32;

// Words of scales and weights of a row.
inline constexpr std::uint32_t kLlMostTailWords = 448;

inline constexpr int kLlMoverThreads = 896;  // of combine
inline constexpr int kLlCombineBlockThreads = 960;
// Vectors of 16 bytes of a row of partial sums that a quarter of a block's movers sends at a time.
inline constexpr int kLlPartVectors = kLlMoverThreads / 4;

// Groups up to these bounds have kernels of their own.
inline constexpr int kLlFewRanks = 32, kLlFewTopk = 8;
constexpr bool ll_is_small(int ranks, int topk) {
  return ranks <= kLlFewRanks && topk <= kLlFewTopk;
}

// Larger tables of experts stay in global memory.
inline constexpr int kLlMostSharedPlaces = 4096;

// Blocks of a dispatch that only send. Few fill the links, and each takes a multiprocessor from the
// receivers; neighbouring blocks share a part of the device, and so they have one role.
constexpr int ll_senders(int blocks) {
  if (blocks >= 128) return 24;
  const int sixth = (blocks + 5) / 6;
  const int even = (sixth + 1) / 2 * 2;
  const int senders = even < 4 ? 4 : even;
  return senders < blocks / 2 ? senders : blocks / 2;
}

// Blocks of launches that do one half: rows leave for as long as the links take, with few blocks.
// Receivers have to wait for words, so more of them are faster: one for each unit, as a block's
// units come one after another.
constexpr int ll_send_blocks(int blocks) {
  return ll_senders(blocks) < blocks ? ll_senders(blocks) + 1 : blocks;
}
// `units`: of a combine what a block sums at once.
constexpr int ll_receive_blocks(int blocks, std::int64_t units = 0) {
  constexpr std::int64_t kFewest = 48;
  const std::int64_t wanted = units < kFewest ? kFewest : units;
  return wanted < blocks ? static_cast<int>(wanted) : blocks;
}

// Of a dispatch: kLlGroups of the `rows` that may come, and the plan's head. A send half fits
// beside it: another rank may wait for that one before it sends what this half waits for.
constexpr int ll_receive_blocks_of_rows(int blocks, std::int64_t rows) {
  const std::int64_t units = (rows + kLlGroups - 1) / kLlGroups + 1;
  const std::int64_t beside = blocks - ll_send_blocks(blocks);
  return ll_receive_blocks(blocks, units < beside ? units : beside);
}

inline constexpr int kLlFewestBlocks = 2;

// The shared memory of a block of dispatch.
LlSmemLayout ll_smem_layout(const LlSizes& sizes, std::size_t shared_bytes);

// LlDevice::places.
std::vector<std::uint32_t> ll_places(const LlConfig& config);

// LlDevice::order: own tokens, then those of the other ranks as their senders send them.
std::vector<std::uint32_t> ll_order(const LlSizes& sizes, int rank, int senders);

}  // namespace xd::ep::cuda
