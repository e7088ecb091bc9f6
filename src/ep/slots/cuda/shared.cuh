// The facts that the warps of a block share about a launch of low latency, and the looks of their
// long waits.
#pragma once

#include "ep/plan/cuda/warp.cuh"
#include "ep/slots/cuda/params.h"
#include "turn/device/pipeline.cuh"

namespace xd::ep::cuda {

// The course of a launch, as its block derives it from its counts.
struct LlCourse {
  std::uint64_t send_epoch, take_epoch;
  bool fatal;     // the communicator has failed: leave
  bool sends;     // a send half: at least the record
  bool rows;      // it also sends rows
  bool receives;  // a receive half
  bool leaves;    // which delivers nothing, and waits for nobody
  int status;     // of an operation error of this rank's own call
  LlFault fault;
  std::int64_t got, expected;
};

enum class LlVerdict : int { go, leave, fatal };

struct LlShared {
  turn::PipelineEpochs before;
  LlCourse course;
  std::uint64_t freed;  // the credit that this launch gives its peers: see turn::PipelineCredit
  RankBits masked;      // ranks that this launch leaves out from its beginning
  HeapRange area[kMaxDeviceRanks];
  // Of the operation that is being received:
  RankBits company;  // the ranks that it was sent to (groups that mask)
  RankBits hurried;  // ranks of company that are masked now: what has come counts, the rest is lost
  LlRecord record[kMaxDeviceRanks];
  int gone[kMaxDeviceRanks];  // 1 = the operation goes without this source
  int verdict;                // LlVerdict
  int status, status_rank;    // of an operation error
  LlFindings findings;
  std::uint32_t bad_ids;
  std::uint32_t told_bad_ids;  // of this rank, as the tellers count them
  int bad_id_rank;
  // The other findings of waits in this block.
  int failed;
  unsigned long long lost[2], accusers[2];  // RankBits

  // One thread: nothing has been met yet.
  __device__ void clear() {
    failed = 0;
    status = XD_SUCCESS;
    verdict = static_cast<int>(LlVerdict::leave);
    bad_ids = told_bad_ids = 0;
    lost[0] = lost[1] = accusers[0] = accusers[1] = 0;
    masked = hurried = {};
  }
};

// ---- Waits -------------------------------------------------------------------------------------

// Leaves a rank out from the next operation on.
inline __device__ void ll_accuse(const LlDevice& g, LlShared& s, int peer) {
  const auto bit = 1ull << (peer % 64);
  atomicOr(&s.lost[peer / 64], bit);
  ptx::or_relaxed_gpu(&g.control->masked[peer / 64], bit);
}

// Ranks that have been accused get no rows from now on: their place may not be free. All lanes of
// the warp that begins the turn.
inline __device__ void ll_mask_lost(LlShared& s) {
  __syncwarp();
  if (lane_id() == 0) s.masked = s.masked | RankBits{s.lost[0], s.lost[1]};
  __syncwarp();
}

// One look of a long wait for words of `peer`; false ends it, after an error has been raised or the
// peer has been accused. A single thread.
inline __device__ __noinline__ bool ll_goes_on(const LlDevice& g, LlShared& s,
                                               const device::KernelWait& site, int peer,
                                               turn::LongWait& wait) {
  // One wait for a lost peer has been long enough for the launch.
  const volatile unsigned long long* lost = &s.lost[peer / 64];
  if (g.masks && (*lost >> (peer % 64) & 1) != 0) return false;
  if (g.masks && s.hurried.has(peer)) {
    ll_accuse(g, s, peer);
    return false;
  }
  const turn::Waited waited = turn::look_around(g.comm, site, peer, wait);
  if (waited == turn::Waited::goes_on) return true;
  if (waited == turn::Waited::too_long) {
    if (g.masks) {
      ll_accuse(g, s, peer);
      return false;
    }
    turn::raise_loss(g.comm, site, peer, wait);
  }
  *static_cast<volatile int*>(&s.failed) = 1;
  return false;
}

// Where ranks may be masked, a wait for what a peer says behind its waits has time for one of
// those: a peer that is not late itself is not masked because it waits for one that is.
__device__ inline int ll_timeouts_of_credits(const LlDevice& g) { return g.masks ? 2 : 1; }

// The same of a wait for the launch's last block. The last block waits for peers itself, for their
// credits, and for records with ids: so this wait never ends by time, unless a block does not run.
inline __device__ __noinline__ bool ll_goes_on_for_block(const LlDevice& g, LlShared& s,
                                                         device::KernelWait site,
                                                         turn::LongWait& wait) {
  site.timeouts = ll_timeouts_of_credits(g) + 2;
  const turn::Waited waited = turn::look_around(g.comm, site, g.rank(), wait);
  if (waited == turn::Waited::goes_on) return true;
  // A rank that stood still this long is late, which in groups that mask is no error of its peers.
  if (waited == turn::Waited::too_long) {
    device::raise(g.comm, device::error_at(g.comm, site, XD_ERROR_TIMEOUT, g.rank()),
                  device::Spread::here);
    device::tell_host(g.comm);
  }
  *static_cast<volatile int*>(&s.failed) = 1;
  return false;
}

using LlPipeline = turn::DevicePipeline<LlRecord, LlDevice>;

// `areas`: LlDevice::areas, or a copy of them.
__device__ inline LlPipeline ll_pipeline_of(const LlDevice& g, int kind, const HeapRange* areas) {
  return LlPipeline(g, g.map.pipeline[kind], g.counts[kind], areas);
}

// Whom the launch's operation is sent to, or was: behind its credits, so nothing but those can have
// been lost. The set that it sends to is kept for its receive half, for which ranks that had no
// free place are lost. One thread, in front of a barrier of the block.
inline __device__ __noinline__ void ll_begin_company(const LlDevice& g, LlShared& s, int kind) {
  const LlCourse& c = s.course;
  if (c.sends) {
    s.company = ~s.masked;
    if (blockIdx.x + 1 != gridDim.x) return;
    g.control->company[kind][turn::pipeline_stage(c.send_epoch, g.stages)] = {
        s.company | RankBits{s.lost[0], s.lost[1]}, s.company};
  } else if (c.receives) {
    const LlCompany* const kept =
        &g.control->company[kind][turn::pipeline_stage(c.take_epoch, g.stages)];
    const ulonglong2 start = ptx::ld_relaxed_sys_pair(&kept->at_start);
    const ulonglong2 sent = ptx::ld_relaxed_sys_pair(&kept->sent_to);
    s.company = {sent.x, sent.y};
    s.hurried = s.company & s.masked;
    s.lost[0] |= start.x & ~sent.x;
    s.lost[1] |= start.y & ~sent.y;
  }
}

}  // namespace xd::ep::cuda
