// How the blocks of a launch agree on who is left out, in groups that mask: its last block decides,
// and the others follow.
//
//   LlControl             written by      read by
//   starts[pipeline][]    the last block  the others: the ranks that the launch leaves out from its
//                                         beginning, when all others have freed their place for it
//   sources[pipeline][s]  the last block  the others: whether the operation goes without the
//                                         source, or else how many tokens it has sent
//   verdict[pipeline]     the last block  the others
//
// Masks, clocks, and the records of a rank that has masked this one, change while a launch runs. So
// blocks that went by them, and do not all run at one time, could come to different ends. Each word
// here has the number of the launch or of the operation in its upper half: it is its own flag, and
// nobody reads anything else because of it but words that it waits for itself.
#pragma once

#include "ep/slots/cuda/shared.cuh"

namespace xd::ep::cuda {

inline constexpr std::uint32_t kLlGone = 1u << 31;  // in `sources`

__device__ inline void ll_tell_word(std::uint64_t* at, std::uint64_t number, std::uint32_t value) {
  ptx::st_relaxed_sys(at, number << 32 | value);
}

// One thread waits for a word of that number. False: the launch has failed.
inline __device__ __noinline__ bool ll_follow_word(const LlDevice& g, LlShared& s,
                                                   const device::KernelWait& site,
                                                   const std::uint64_t* at, std::uint64_t number,
                                                   std::uint32_t& value) {
  std::uint64_t word = 0;
  turn::LongWait wait;
  const bool here = turn::poll_until(
      [&] {
        word = ptx::ld_relaxed_sys(at);
        return word >> 32 == static_cast<std::uint32_t>(number);
      },
      [&] { return ll_goes_on_for_block(g, s, site, wait); });
  value = static_cast<std::uint32_t>(word);
  return here;
}

// The number of a launch in its pipeline: each that takes a turn sends, or takes, or does both.
__device__ inline std::uint64_t ll_launch_number(const LlShared& s) {
  return s.before.sent + s.before.taken + 1;
}

// The halves of the words of LlShared::masked.
inline constexpr int kLlMaskParts = sizeof(RankBits) / sizeof(std::uint32_t);
__device__ inline std::uint32_t* ll_mask_part(LlShared& s, int part) {
  return reinterpret_cast<std::uint32_t*>(&s.masked) + part;
}

// All lanes of a warp of the last block.
inline __device__ void ll_tell_start(const LlDevice& g, LlShared& s, int kind) {
  __syncwarp();
  if (lane_id() >= kLlMaskParts || s.failed != 0) return;
  ll_tell_word(&g.control->starts[kind][lane_id()], ll_launch_number(s),
               *ll_mask_part(s, lane_id()));
}

// All lanes of a warp of each other block.
inline __device__ void ll_follow_start(const LlDevice& g, LlShared& s, int kind,
                                       const device::KernelWait& site) {
  if (lane_id() < kLlMaskParts) {
    std::uint32_t part = 0;
    ll_follow_word(g, s, site, &g.control->starts[kind][lane_id()], ll_launch_number(s), part);
    *ll_mask_part(s, lane_id()) = part;
  }
  __syncwarp();
}

// All lanes of a warp of the last block, when it has judged the operation.
inline __device__ __noinline__ void ll_tell_sources(const LlDevice& g, const LlShared& s, int kind,
                                                    std::uint64_t epoch) {
  __syncwarp();
  if (s.failed != 0) return;
#pragma unroll 1
  for (int r = lane_id(); r < g.ranks(); r += 32) {
    ll_tell_word(&g.control->sources[kind][r], epoch,
                 s.gone[r] != 0 ? kLlGone : s.record[r].tokens);
  }
  if (lane_id() == 0) {
    ll_tell_word(&g.control->verdict[kind], epoch, static_cast<std::uint32_t>(s.verdict));
  }
}

// All lanes of a warp of each other block, instead of a judgement of its own. Of the sources'
// records it gets their T alone, and this rank's own record, which nobody changes.
inline __device__ __noinline__ void ll_follow_sources(const LlDevice& g, LlShared& s, int kind,
                                                      const device::KernelWait& site) {
  const std::uint64_t epoch = site.epoch;
#pragma unroll 1
  for (int r = lane_id(); r < g.ranks(); r += 32) {
    std::uint32_t value = kLlGone;
    if (s.gone[r] != 0) continue;
    if (!ll_follow_word(g, s, site, &g.control->sources[kind][r], epoch, value)) continue;
    if ((value & kLlGone) != 0) {
      atomicExch(&s.gone[r], 1);
      ll_accuse(g, s, r);
    } else if (r != g.rank()) {
      s.record[r].tokens = value;
    } else {
      turn::LongWait wait;
      const LlPipeline pipeline = ll_pipeline_of(g, kind, s.area);
      turn::poll_until([&] { return pipeline.read_record(r, epoch, s.record[r]); },
                       [&] { return ll_goes_on_for_block(g, s, site, wait); });
    }
  }
  std::uint32_t verdict = 0;
  if (lane_id() == 0 && ll_follow_word(g, s, site, &g.control->verdict[kind], epoch, verdict)) {
    s.verdict = static_cast<int>(verdict);
  }
  __syncwarp();
}

}  // namespace xd::ep::cuda
