// The small operations of low latency: masks, reset, the end of a change of the table of slots, and
// the check of staging.
//
// A reset is three kernels, one after another on the stream:
//
//   meet, round 0   gives the credits of all that has been taken, since a send half of a peer that
//                   comes before its reset may wait for them. Then every rank that is not masked
//                   has come: none of its earlier kernels runs, so nothing more is written here.
//                   Each tells the numbers of its operations
//   fill            all staging of this rank is free, and no tag or record is left
//   meet, round 1   all have filled. Everybody goes on from the highest number
//
// A rank greets every peer with a number that it has never used, and answers each greeting by its
// number. A peer that has answered this greeting takes part in this reset; an old greeting or
// answer proves nothing. The words are released and acquired at system scope, in both rounds.
#include "cuda/error.h"
#include "ep/plan/cuda/launch.cuh"
#include "ep/plan/cuda/load.h"
#include "ep/plan/cuda/slot_table.cuh"
#include "ep/slots/cuda/kernels.h"
#include "ep/slots/cuda/turn.cuh"
#include "ep/slots/cuda/words.cuh"

namespace xd::ep::cuda {
namespace {

constexpr int kControlThreads = 128, kFillBlocks = 64, kFillThreads = 256;

struct ResetParams {
  LlDevice group;
  std::uint32_t launch;
  int round;
};

__device__ void show_masks(const LlDevice& g) {
  g.report->masked = {g.control->masked[0], g.control->masked[1]};
  g.report->masked_by = {g.control->masked_by[0], g.control->masked_by[1]};
}

// A rank that is unmasked may be accused anew.
__global__ void mask_set_kernel(const __grid_constant__ LlDevice g, int rank, bool masked) {
  const std::uint64_t bit = std::uint64_t{1} << (rank % 64);
  if (masked) {
    g.control->masked[rank / 64] |= bit;
  } else {
    g.control->masked[rank / 64] &= ~bit;
    g.control->masked_by[rank / 64] &= ~bit;
  }
  show_masks(g);
}

__global__ void mask_get_kernel(const __grid_constant__ LlDevice g, std::int32_t* mask) {
  for (int r = static_cast<int>(threadIdx.x); r < g.ranks(); r += static_cast<int>(blockDim.x)) {
    mask[r] = static_cast<std::int32_t>(g.control->masked[r / 64] >> (r % 64) & 1);
  }
}

// ---- Reset -------------------------------------------------------------------------------------

__device__ LlMeeting* meeting_at(const LlDevice& g, std::byte* area, int source, int round) {
  return reinterpret_cast<LlMeeting*>(area + g.map.meet) + source * 2 + round;
}

// One thread meets one peer; false if it has been lost.
__device__ bool meet_peer(const ResetParams& p, int peer, const std::uint64_t (&own)[2],
                          std::uint64_t greeting) {
  const LlDevice& g = p.group;
  LlMeeting* there = meeting_at(g, g.areas[peer].base, g.rank(), p.round);
  const LlMeeting* here = meeting_at(g, g.own_area, peer, p.round);
  ptx::st_relaxed_sys(&there->numbers[0], own[0]);
  ptx::st_relaxed_sys(&there->numbers[1], own[1]);
  ptx::st_release_sys(&there->greeting, greeting);
  const device::KernelWait site{XD_PHASE_ENTRY, g.number, XD_LL_RESET, greeting};
  std::uint64_t seen = 0;
  turn::LongWait wait;
  return turn::poll_until(
      [&] {
        // The peer's greeting comes before its answers.
        const bool answered = ptx::ld_acquire_sys(&here->answer) == greeting;
        const std::uint64_t theirs = ptx::ld_acquire_sys(&here->greeting);
        if (theirs != seen) ptx::st_release_sys(&there->answer, seen = theirs);
        return answered;
      },
      [&] {
        const turn::Waited waited = turn::look_around(g.comm, site, peer, wait);
        if (waited != turn::Waited::too_long) return waited == turn::Waited::goes_on;
        const std::uint64_t bit = std::uint64_t{1} << (peer % 64);
        ptx::or_relaxed_gpu(&g.control->masked[peer / 64], bit);
        ptx::or_relaxed_gpu(&g.control->lost[peer / 64], bit);
        return false;
      });
}

__device__ void report_loss(const ResetParams& p, const RankBits& lost) {
  LlReport* to = p.group.report;
  show_masks(p.group);
  const std::uint32_t written = ptx::ld_relaxed_sys(&to->written);
  if (written == ptx::ld_acquire_sys(&to->taken)) {
    to->status = XD_ERROR_PEER_LOST;
    to->operation = XD_LL_RESET;
    to->epoch = p.group.control->greeting;
    to->rank = lost.word[0] != 0 ? __ffsll(static_cast<long long>(lost.word[0])) - 1
                                 : 63 + __ffsll(static_cast<long long>(lost.word[1]));
    to->findings = {};
    ptx::st_release_sys(&to->written, written + 1);
  }
  ptx::st_release_sys(&to->errors, ++p.group.control->errors);
}

// Everybody goes on from the highest number, with nothing between its halves. A peer that has gone
// on before may have given a higher credit already.
__device__ void go_on(const LlDevice& g) {
  for (int pipeline = 0; pipeline < 2; ++pipeline) {
    const std::uint64_t number = g.control->highest[pipeline];
    for (int b = static_cast<int>(threadIdx.x); b < g.most_blocks; b += kControlThreads) {
      g.counts[pipeline][b].sent = g.counts[pipeline][b].taken = number;
    }
    // Both words of each credit.
    auto* credits =
        reinterpret_cast<unsigned long long*>(g.own_area + g.map.pipeline[pipeline].credit);
    for (int r = static_cast<int>(threadIdx.x); r < 2 * g.ranks(); r += kControlThreads) {
      atomicMax_system(&credits[r], static_cast<unsigned long long>(number));
    }
    if (threadIdx.x == 0) g.control->verified[pipeline] = number;
    if (threadIdx.x >= kLlMaxStages) continue;
    g.control->failed_send[pipeline][threadIdx.x] = g.control->left[pipeline][threadIdx.x] = 0;
  }
}

__global__ void __launch_bounds__(kControlThreads)
    meet_kernel(const __grid_constant__ ResetParams p) {
  __shared__ unsigned long long highest[2];
  const LlDevice& g = p.group;
  LlControl* control = g.control;
  if (threadIdx.x == 0) {
    for (int pipeline = 0; pipeline < 2; ++pipeline) {
      highest[pipeline] = p.round == 0 ? g.counts[pipeline][0].sent : control->highest[pipeline];
    }
    if (p.round == 0) {
      ++control->greeting;
      control->lost[0] = control->lost[1] = 0;
    }
  }
  __syncthreads();
  // Each round has waits of its own: where a rank is missed in the first one, the others come to
  // the second one just when the first one's time is over.
  const std::uint64_t own[2] = {highest[0], highest[1]};
  const std::uint64_t greeting = control->greeting;
  ptx::fence_acq_rel_sys();
  __syncthreads();
  if (p.round == 0 && threadIdx.x < 32) {
    // This rank takes nothing more before it fills its memory, so all of its stages are free.
    for (int pipeline = 0; pipeline < 2; ++pipeline) {
      const turn::PipelineCount& count = g.counts[pipeline][0];
      ll_pipeline_of(g, pipeline, g.areas).give_credit({count.taken, count.sent});
    }
  }
  __syncwarp();
  for (int r = static_cast<int>(threadIdx.x); r < g.ranks(); r += kControlThreads) {
    const bool masked = (control->masked[r / 64] >> (r % 64) & 1) != 0;
    if (r == g.rank() || masked || !meet_peer(p, r, own, greeting)) continue;
    const LlMeeting* here = meeting_at(g, g.own_area, r, p.round);
    atomicMax(&highest[0], static_cast<unsigned long long>(ptx::ld_relaxed_sys(&here->numbers[0])));
    atomicMax(&highest[1], static_cast<unsigned long long>(ptx::ld_relaxed_sys(&here->numbers[1])));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    control->highest[0] = highest[0];
    control->highest[1] = highest[1];
    show_masks(g);
    const RankBits lost{ptx::ld_relaxed_sys(&control->lost[0]),
                        ptx::ld_relaxed_sys(&control->lost[1])};
    if (p.round == 1 && !lost.empty()) report_loss(p, lost);
  }
  __syncthreads();
  if (p.round == 1) go_on(g);
}

// Frees all staging, and clears all that has tags, and the credits. Between the rounds no peer
// writes.
__global__ void __launch_bounds__(kFillThreads) fill_kernel(const __grid_constant__ LlDevice g) {
  const std::uint64_t first = (std::uint64_t{blockIdx.x} * kFillThreads + threadIdx.x) * 16;
  const std::uint64_t step = std::uint64_t{gridDim.x} * kFillThreads * 16;
  for (std::uint64_t i = first; i < g.map.end; i += step) {
    if (i >= g.map.rows) {
      put_back_pair(g.own_area + i);
    } else if (i < g.map.meet) {
      ptx::st_streaming_pair(g.own_area + i, make_ulonglong2(0, 0));
    }
  }
}

// ---- The table of slots ------------------------------------------------------------------------

__global__ void __launch_bounds__(kControlThreads)
    end_change_kernel(const __grid_constant__ SlotTableChange change, const PlanHeader* plan) {
  end_change(change, plan->magic == PlanHeader::kMagic);
}

// ---- The check ---------------------------------------------------------------------------------

// True if all that this thread looks at in an operation's stage is free.
__device__ bool is_clean(const LlDevice& g, int pipeline, std::uint64_t epoch) {
  const std::uint64_t stage = turn::pipeline_stage(epoch, g.stages);
  if (epoch == g.control->left[pipeline][stage]) return true;
  const LlStaging staging = g.staging(pipeline, stage);
  const std::uint64_t step = std::uint64_t{gridDim.x} * kFillThreads * 8;
  const RankBits sent_to = g.control->company[pipeline][stage].sent_to;
  bool clean = true;
  for (std::uint64_t i = (std::uint64_t{blockIdx.x} * kFillThreads + threadIdx.x) * 8;
       i < staging.bytes; i += step) {
    if (*reinterpret_cast<const std::uint64_t*>(staging.data + i) == kFree) continue;
    // Words that a masked rank has stored, or one that the operation was not sent to, lie there for
    // good, in places of their own.
    const auto row = static_cast<int>(i / staging.stride);
    const int writer = pipeline == kLlDispatch ? row / g.max_tokens : row % g.partials_per_token();
    clean &= g.masks &&
             ((g.control->masked[writer / 64] >> (writer % 64) & 1) != 0 || !sent_to.has(writer));
  }
  return clean;
}

// The stages of operations that have been taken are free until this rank gives its credit, which
// the pipeline's next launch does: so they are looked at once, in front of that one. Rows that have
// not been delivered lie in their stages, and are looked at by nobody.
__global__ void __launch_bounds__(kFillThreads)
    verify_kernel(const __grid_constant__ LlDevice g, int pipeline) {
  const std::uint64_t taken = g.counts[pipeline][0].taken;
  bool clean = true;
  for (std::uint64_t epoch = g.control->verified[pipeline] + 1; epoch <= taken; ++epoch) {
    clean &= is_clean(g, pipeline, epoch);
  }
  if (clean || atomicCAS(&g.control->reporting, 0u, 1u) != 0) return;
  LlReport* to = g.report;
  const std::uint32_t written = ptx::ld_relaxed_sys(&to->written);
  if (written == ptx::ld_acquire_sys(&to->taken)) {
    to->status = XD_ERROR_INTERNAL;
    to->operation = pipeline == kLlDispatch ? XD_LL_DISPATCH : XD_LL_COMBINE;
    to->epoch = taken;
    to->rank = g.rank();
    to->findings = {};
    to->findings.kind = LlFault::not_clean;
    ptx::st_release_sys(&to->written, written + 1);
  }
  ptx::st_release_sys(&to->errors, ++g.control->errors);
  atomicExch(&g.control->reporting, 0u);
}

__global__ void verified_kernel(const __grid_constant__ LlDevice g, int pipeline) {
  g.control->verified[pipeline] = g.counts[pipeline][0].taken;
}

}  // namespace

void launch_mask_set(const LlDevice& group, int rank, bool masked, cudaStream_t stream) {
  launch_plain(mask_set_kernel, 1, 1, stream, group, rank, masked);
}

void launch_mask_get(const LlDevice& group, std::int32_t* mask, cudaStream_t stream) {
  launch_plain(mask_get_kernel, 1, kControlThreads, stream, group, mask);
}

void launch_reset(const LlDevice& group, std::uint32_t launch, cudaStream_t stream) {
  ResetParams params{group, launch, 0};
  launch_plain(meet_kernel, 1, kControlThreads, stream, params);
  launch_plain(fill_kernel, kFillBlocks, kFillThreads, stream, group);
  params.round = 1;
  launch_plain(meet_kernel, 1, kControlThreads, stream, params);
}

void launch_end_change(const SlotTableChange& change, const PlanHeader* plan, cudaStream_t stream) {
  launch_plain(end_change_kernel, 1, kControlThreads, stream, change, plan);
}

void launch_verify(const LlDevice& group, int pipeline, cudaStream_t stream) {
  launch_plain(verify_kernel, kFillBlocks, kFillThreads, stream, group, pipeline);
  launch_plain(verified_kernel, 1, 1, stream, group, pipeline);
}

void load_ll_control() {
  load_plain(mask_set_kernel, mask_get_kernel, meet_kernel, fill_kernel, verify_kernel,
             verified_kernel, end_change_kernel);
}

}  // namespace xd::ep::cuda
