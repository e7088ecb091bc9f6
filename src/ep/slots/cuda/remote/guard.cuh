// Whether a launch of the near kernels takes part in a whole call that is made of several.
#pragma once

#include "ep/slots/cuda/remote/params.h"
#include "ep/slots/cuda/turn.cuh"

namespace xd::ep::cuda {

// All threads of a block, before anything else of the launch. False: it does nothing. A block's own
// count is changed by nobody but itself, behind this. `Params`: of the near kernel.
template <class Params>
__device__ bool ll_goes(const Params& params, LlShared& shared, int kind, const LlGuarded& g) {
  if (g.guard == LlGuard::none) return true;
  const auto counts = ptx::ld_relaxed_sys_pair(&params.group.counts[kind][blockIdx.x]);
  const std::uint64_t sent = counts.x, taken = counts.y;
  if (g.guard == LlGuard::follows) return g.state->whole[kind] == sent && sent == taken + 1;
  const bool goes = sent == taken;
  if (blockIdx.x != 0 || threadIdx.x != 0) return goes;
  g.state->whole[kind] = goes ? sent + 1 : 0;
  if (goes || device::failed(params.group.comm)) return goes;
  shared.clear();
  shared.course = {};
  shared.course.status = XD_ERROR_INVALID_ARGUMENT;
  shared.course.fault = LlFault::both_between;
  shared.course.got = static_cast<std::int64_t>(sent - taken);
  LlTurn<Params>(params, shared, kind).tell_refusal();
  return false;
}

}  // namespace xd::ep::cuda
